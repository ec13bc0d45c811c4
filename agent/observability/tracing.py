"""Rollouts as spans, for OpenTelemetry: episode, turn, generation and verification; and packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trajpack.agent.errors import EpisodeError
from trajpack.agent.observability.recent_values import RecentValues
from trajpack.agent.protocols import GenerationOutput, Reply
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.packing.optional import require
from trajpack.packing.text import one_line

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, TracerProvider

    from trajpack.agent.observability.pack_watch import WatchedPack
    from trajpack.agent.runner.runner import EpisodeResult

_MAX_ID_CHARS = 200
_Attributes = Mapping[str, str | bool | int | float]


@dataclass(slots=True)
class _OpenTurn:
    span: Span
    context: Context
    generation: Span | None = None
    verification: Span | None = None


@dataclass(slots=True)
class _OpenEpisode:
    span: Span
    context: Context
    turns: dict[int, _OpenTurn] = field(default_factory=dict)
    num_turns: int = 0
    num_tokens: int = 0


class RolloutTracer(RolloutObserver):
    """Makes spans of what a `RolloutRunner` does, and of what is packed.

    Each attempt at an episode is a trace of its own, linked to the attempt before::

        trajpack.episode
            trajpack.turn
                trajpack.generation
                trajpack.verification
            trajpack.rejection (of a result that was stale when it was to be handed over)

    Give it to the runner among its observers, and to `watch_pack`, whose span
    ``trajpack.pack`` is a child of whatever span is current there. Parents are told
    explicitly, never by what is current, so any number of episodes may interleave.

    Attributes are numbers, the episode's id and kinds of errors. What a model, a server or an
    environment wrote is no part of them.

    One instance watches any number of runs, as long as no two episodes in flight share a name.

    Args:
        provider: Where spans go, with the exporters that you gave it; the global one if None.
        records_messages: Whether an error's text, which may quote a model or a server, becomes
            the description of its span's status: on one line, escaped and cut.

    Raises:
        ModuleNotFoundError: If opentelemetry-api is not installed (extra ``metrics``).

    Cost: some 20 microseconds a span with the SDK, three spans a turn; a fraction of that
        where no SDK is installed or a trace is not sampled. See the guide for what was measured.

    Example:
        >>> from opentelemetry.sdk.trace import TracerProvider
        >>> from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        >>> from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        >>> provider, spans = TracerProvider(), InMemorySpanExporter()
        >>> provider.add_span_processor(SimpleSpanProcessor(spans))
        >>> tracer = RolloutTracer(provider)
        >>> tracer.episode_started("q0@0", 0)
        >>> tracer.episode_ended("q0@0", 0, None, final=True)
        >>> [(span.name, span.attributes["trajpack.episode.id"])
        ...  for span in spans.get_finished_spans()]
        [('trajpack.episode', 'q0@0')]
    """

    def __init__(
        self, provider: TracerProvider | None = None, *, records_messages: bool = False
    ) -> None:
        require("opentelemetry")
        from opentelemetry import trace
        from opentelemetry.context import Context

        self._trace = trace
        self._tracer = trace.get_tracer("trajpack", tracer_provider=provider)
        self._records_messages = records_messages
        self._no_parent = Context()
        self._open: dict[str, _OpenEpisode] = {}
        self._attempts = RecentValues[Any]()

    @property
    def num_open(self) -> int:
        """Episodes whose spans have not ended; 0 when no run is under way."""
        return len(self._open)

    def episode_started(self, qid: str, attempt: int) -> None:
        """Begin a trace."""
        self._end_episode(qid, None, {})
        before = self._attempts.pop(qid, None)
        span = self._tracer.start_span(
            "trajpack.episode",
            self._no_parent,
            attributes={
                "trajpack.episode.id": one_line(qid, _MAX_ID_CHARS),
                "trajpack.episode.attempt": attempt,
            },
            links=(self._trace.Link(before),) if before and attempt else (),
        )
        self._open[qid] = _OpenEpisode(span, self._context_of(span))

    def generation_started(self, qid: str, turn: int, num_prompt_tokens: int) -> None:
        """Begin a turn, and in it a generation; turns that wait for nothing are over."""
        episode = self._open.get(qid)
        if episode is None:
            return
        for index, earlier in list(episode.turns.items()):
            if index != turn and earlier.generation is earlier.verification is None:
                episode.turns.pop(index).span.end()
        opened = self._turn_of(episode, turn)
        if opened.generation is None:
            opened.generation = self._tracer.start_span(
                "trajpack.generation",
                opened.context,
                attributes={"trajpack.generation.num_prompt_tokens": num_prompt_tokens},
            )

    def generation_ended(self, qid: str, turn: int, reply: Reply) -> None:
        """End the generation with its tokens and versions, or its error."""
        episode = self._open.get(qid)
        opened = None if episode is None else episode.turns.get(turn)
        if episode is None or opened is None or opened.generation is None:
            return
        span, opened.generation = opened.generation, None
        if not isinstance(reply, GenerationOutput):
            return self._end(span, reply)
        episode.num_turns += 1
        episode.num_tokens += len(reply.output_ids)
        self._end(
            span,
            None,
            {
                "trajpack.generation.num_tokens": len(reply.output_ids),
                "trajpack.generation.version_start": int(reply.version_start),
                "trajpack.generation.version_end": int(reply.version_end),
                "trajpack.generation.truncated": bool(reply.no_eos),
            },
        )

    def verification_started(self, qid: str, turn: int) -> None:
        """Begin a verification in its turn."""
        episode = self._open.get(qid)
        if episode is None:
            return
        opened = self._turn_of(episode, turn)
        if opened.verification is None:
            opened.verification = self._tracer.start_span("trajpack.verification", opened.context)

    def verification_ended(self, qid: str, turn: int, error: BaseException | None) -> None:
        """End the verification."""
        episode = self._open.get(qid)
        opened = None if episode is None else episode.turns.get(turn)
        if opened is not None and opened.verification is not None:
            span, opened.verification = opened.verification, None
            self._end(span, error)

    def episode_ended(
        self, qid: str, attempt: int, error: Exception | None, *, final: bool
    ) -> None:
        """End the trace; what was in flight in it ends with the episode's error."""
        is_final = {"trajpack.episode.final": final}
        span = self._end_episode(qid, error, is_final)
        if span is not None:
            self._attempts.put(qid, span.get_span_context())
        elif error is not None and (ended := self._attempts.get(qid)) is not None:
            parent = self._context_of(self._trace.NonRecordingSpan(ended))
            self._end(self._tracer.start_span("trajpack.rejection", parent), error, is_final)
        if error is not None and final:
            self._attempts.pop(qid, None)

    def result_accepted(self, result: EpisodeResult, version: int) -> None:
        """Forget the attempt: no other will follow."""
        self._attempts.pop(result.qid, None)

    def group_ended(
        self, prompt_id: str, results: Sequence[EpisodeResult], reason: str | None
    ) -> None:
        """Forget the attempts of a group that was dropped."""
        for result in results:
            self._attempts.pop(result.qid, None)

    def pack_ended(self, pack: WatchedPack) -> None:
        """Make the span of what `watch_pack` saw."""
        span = self._tracer.start_span("trajpack.pack", start_time=pack.began_ns)
        figures = pack.figures() if pack.error is None and span.is_recording() else None
        numbers = {} if figures is None else figures._asdict()
        attributes: dict[str, str | int | float] = {
            f"trajpack.pack.{name}": number
            for name, number in numbers.items()
            if number is not None
        }
        if pack.batch is not None:
            attributes["trajpack.pack.layout"] = pack.batch.layout
        if pack.plan is not None:
            attributes["trajpack.pack.plan_fill"] = pack.plan.fill
        self._end(span, pack.error, attributes, end_time=pack.began_ns + int(pack.seconds * 1e9))

    def close(self) -> None:
        """End every span that is still open, such as those of a run that was given up."""
        for qid in list(self._open):
            self._end_episode(qid, None, {})
        self._attempts.clear()

    def _turn_of(self, episode: _OpenEpisode, turn: int) -> _OpenTurn:
        opened = episode.turns.get(turn)
        if opened is None:
            span = self._tracer.start_span(
                "trajpack.turn", episode.context, attributes={"trajpack.turn.index": turn}
            )
            opened = episode.turns[turn] = _OpenTurn(span, self._context_of(span))
        return opened

    def _end_episode(
        self, qid: str, error: BaseException | None, attributes: _Attributes
    ) -> Span | None:
        episode = self._open.pop(qid, None)
        if episode is None:
            return None
        for turn in episode.turns.values():
            waiting = [span for span in (turn.generation, turn.verification) if span is not None]
            for span in waiting:
                self._end(span, error)
            self._end(turn.span, error if waiting else None)
        numbers = {
            "trajpack.episode.num_turns": episode.num_turns,
            "trajpack.episode.num_tokens": episode.num_tokens,
        }
        self._end(episode.span, error, numbers | dict(attributes))
        return episode.span

    def _end(
        self,
        span: Span,
        error: BaseException | None,
        attributes: _Attributes | None = None,
        end_time: int | None = None,
    ) -> None:
        if span.is_recording():
            span.set_attributes(dict(attributes or {}))
            if error is not None:
                cause = error.cause if isinstance(error, EpisodeError) else type(error).__name__
                span.set_attribute("trajpack.error.cause", cause)
                span.set_attribute("trajpack.error.type", type(error.__cause__ or error).__name__)
                text = one_line(error) if self._records_messages else cause
                span.set_status(self._trace.StatusCode.ERROR, text)
        span.end(end_time)

    def _context_of(self, span: Span) -> Any:
        return self._trace.set_span_in_context(span, self._no_parent)
