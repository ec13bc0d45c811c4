"""`RolloutTracer`: rollouts as spans, for OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trajpack.agent.errors import EpisodeError
from trajpack.agent.observability.episodes import EpisodeObserver, OpenEpisode, remember
from trajpack.agent.protocols import GenerationOutput
from trajpack.packing.optional import require
from trajpack.packing.text import one_line

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, TracerProvider

    from trajpack.agent.runner.runner import EpisodeResult

_MAX_ID_CHARS = 200


class RolloutTracer(EpisodeObserver["Span"]):
    """Makes spans of the events of a `RolloutRunner`.

    Each attempt at an episode is a trace, linked to the attempt before::

        trajpack.episode
            trajpack.turn
                trajpack.generation
                trajpack.verification
            trajpack.rejection (of a result that was stale at its hand-over)

    Give it to the runner among its observers. Parents are explicit, so any number of episodes may
    interleave.

    Attributes are numbers, the episode's id and kinds of errors, never text from a model, a server
    or an environment.

    One instance may watch any number of runs, if no two running episodes share a name.

    Args:
        provider: Provider of the tracer, with its exporters; the global one if None.

    Raises:
        ModuleNotFoundError: If opentelemetry-api is not installed (extra ``metrics``).

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

    def __init__(self, provider: TracerProvider | None = None) -> None:
        require("opentelemetry")
        from opentelemetry import trace
        from opentelemetry.context import Context

        super().__init__()
        self._trace = trace
        self._tracer = trace.get_tracer("trajpack", tracer_provider=provider)
        self._no_parent = Context()
        self._attempts: dict[str, SpanContext] = {}
        """Context of the last ended attempt of episodes that may have another."""

    @property
    def num_open(self) -> int:
        """Episodes whose spans have not ended; 0 when no run is active."""
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
        self._open[qid] = OpenEpisode(span)

    def generation_started(self, qid: str, turn: int, num_prompt_tokens: int) -> None:
        """Begin a turn, and a generation in it; end other turns without an open stage."""
        episode = self._open.get(qid)
        if episode is not None:
            waiting = {turn, *(number for _, number in episode.stages)}
            for index in [index for index in episode.turns if index not in waiting]:
                episode.turns.pop(index).end()
        attributes = {"trajpack.generation.num_prompt_tokens": num_prompt_tokens}
        self._begin_stage(qid, "generation", turn, attributes)

    def generation_ended(self, qid: str, turn: int, reply: GenerationOutput | EpisodeError) -> None:
        """End the generation with its tokens and versions, or its error."""
        if (ended := self._end(qid, "generation", turn)) is None:
            return
        episode, span = ended
        if not isinstance(reply, GenerationOutput):
            return self._end_span(span, reply)
        episode.num_turns += 1
        episode.num_tokens += len(reply.output_ids)
        attributes = {
            "trajpack.generation.num_tokens": len(reply.output_ids),
            "trajpack.generation.version_start": int(reply.version_start),
            "trajpack.generation.version_end": int(reply.version_end),
            "trajpack.generation.truncated": bool(reply.no_eos),
        }
        self._end_span(span, None, attributes)

    def verification_started(self, qid: str, turn: int) -> None:
        """Begin a verification in its turn."""
        self._begin_stage(qid, "verification", turn)

    def verification_ended(self, qid: str, turn: int, error: BaseException | None) -> None:
        """End the verification."""
        if (ended := self._end(qid, "verification", turn)) is not None:
            self._end_span(ended[1], error)

    def episode_ended(
        self, qid: str, attempt: int, error: Exception | None, *, final: bool
    ) -> None:
        """End the trace; spans that are still open in it get the episode's error."""
        is_final = {"trajpack.episode.final": final}
        span = self._end_episode(qid, error, is_final)
        if span is not None:
            remember(self._attempts, qid, span.get_span_context())
        elif error is not None and (ended := self._attempts.get(qid)) is not None:
            parent = self._trace.NonRecordingSpan(ended)
            self._end_span(self._begin_span("trajpack.rejection", parent), error, is_final)
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

    def close(self) -> None:
        """End all open spans, such as those of an abandoned run."""
        for qid in list(self._open):
            self._end_episode(qid, None, {})
        self._attempts.clear()

    def _begin_stage(
        self, qid: str, stage: str, turn: int, attributes: Mapping[str, Any] | None = None
    ) -> None:
        """Begin a stage in the span of its turn, which begins too if it is not open."""

        def make(episode: OpenEpisode[Span]) -> Span:
            if turn not in episode.turns:
                index = {"trajpack.turn.index": turn}
                episode.turns[turn] = self._begin_span("trajpack.turn", episode.own, index)
            return self._begin_span(f"trajpack.{stage}", episode.turns[turn], attributes)

        self._begin(qid, stage, turn, make)

    def _begin_span(
        self, name: str, parent: Span, attributes: Mapping[str, Any] | None = None
    ) -> Span:
        context = self._trace.set_span_in_context(parent, self._no_parent)
        return self._tracer.start_span(name, context, attributes=attributes)

    def _end_episode(
        self, qid: str, error: BaseException | None, attributes: Mapping[str, Any]
    ) -> Span | None:
        """End the spans of an episode, the inner ones first; return its own if it was open."""
        episode = self._open.pop(qid, None)
        if episode is None:
            return None
        for span in episode.stages.values():
            self._end_span(span, error)
        waiting = {turn for _, turn in episode.stages}
        for turn, span in episode.turns.items():
            self._end_span(span, error if turn in waiting else None)
        numbers = {
            "trajpack.episode.num_turns": episode.num_turns,
            "trajpack.episode.num_tokens": episode.num_tokens,
        }
        self._end_span(episode.own, error, numbers | dict(attributes))
        return episode.own

    def _end_span(
        self,
        span: Span,
        error: BaseException | None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        if span.is_recording():
            span.set_attributes(dict(attributes or {}))
            if error is not None:
                cause = error.cause if isinstance(error, EpisodeError) else type(error).__name__
                span.set_attribute("trajpack.error.cause", cause)
                span.set_attribute("trajpack.error.type", type(error.__cause__ or error).__name__)
                span.set_status(self._trace.StatusCode.ERROR, cause)
        span.end()
