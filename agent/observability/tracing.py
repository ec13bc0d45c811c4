"""`RolloutTracer`: rollouts as spans, for OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import GenerationOutput
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.packing.optional import require
from trajpack.packing.text import one_line

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, TracerProvider

    from trajpack.agent.runner.runner import EpisodeResult


class RolloutTracer(RolloutObserver):
    """Makes spans of the events of a `RolloutRunner`.

    Each attempt at an episode is a trace, linked to the attempt before: a span
    ``trajpack.episode`` with a ``trajpack.generation`` and a ``trajpack.verification`` for each
    turn, and a ``trajpack.rejection`` where the result was stale at its hand-over. Attributes are
    numbers, the episode's id and kinds of errors, never text from a model, a server or an
    environment.

    Give it to the runner among its observers. One instance may watch any number of runs, if no two
    running episodes share a name.

    Args:
        provider: Provider of the tracer, with its exporters; the global one if None.

    Raises:
        ModuleNotFoundError: If opentelemetry-api is not installed (extra ``metrics``).

    Example:
        >>> from opentelemetry.sdk.trace import TracerProvider
        >>> tracer = RolloutTracer(TracerProvider())
        >>> tracer.episode_started("q0@0", 0)
        >>> tracer.num_open
        1
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        require("opentelemetry")
        from opentelemetry import trace
        from opentelemetry.context import Context

        self._trace = trace
        self._tracer = trace.get_tracer("trajpack", tracer_provider=provider)
        self._no_parent = Context()
        self._open: dict[str, dict[tuple[str, int], Span]] = {}
        """Open spans of running attempts: first that of the attempt, then those of stages."""
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
        attributes: dict[str, str | int] = {"trajpack.episode.attempt": attempt}
        attributes["trajpack.episode.id"] = one_line(qid, 200)
        links = (self._trace.Link(before),) if before and attempt else ()
        span = self._tracer.start_span(
            "trajpack.episode", self._no_parent, attributes=attributes, links=links
        )
        self._open[qid] = {("episode", 0): span}

    def generation_started(self, qid: str, turn: int, num_prompt_tokens: int) -> None:
        """Begin the generation of a turn."""
        numbers = {"trajpack.generation.num_prompt_tokens": num_prompt_tokens}
        self._begin_stage(qid, "generation", turn, numbers)

    def generation_ended(self, qid: str, turn: int, reply: GenerationOutput | EpisodeError) -> None:
        """End the generation with its tokens and versions, or its error."""
        if not isinstance(reply, GenerationOutput):
            self._end_stage(qid, "generation", turn, reply, {})
            return
        numbers = {
            "trajpack.generation.num_tokens": len(reply.output_ids),
            "trajpack.generation.version_start": int(reply.version_start),
            "trajpack.generation.version_end": int(reply.version_end),
            "trajpack.generation.truncated": bool(reply.no_eos),
        }
        self._end_stage(qid, "generation", turn, None, numbers)

    def verification_started(self, qid: str, turn: int) -> None:
        """Begin a verification in its turn."""
        self._begin_stage(qid, "verification", turn, {})

    def verification_ended(self, qid: str, turn: int, error: BaseException | None) -> None:
        """End the verification."""
        self._end_stage(qid, "verification", turn, error, {})

    def episode_ended(
        self, qid: str, attempt: int, error: Exception | None, *, final: bool
    ) -> None:
        """End the trace; spans that are still open in it get the episode's error."""
        is_final = {"trajpack.episode.final": final}
        span = self._end_episode(qid, error, is_final)
        if span is not None:
            self._attempts[qid] = span.get_span_context()
        elif error is not None and (ended := self._attempts.get(qid)) is not None:
            rejection = self._begin_span("rejection", self._trace.NonRecordingSpan(ended), {})
            self._end_span(rejection, error, is_final)
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

    def _begin_stage(self, qid: str, stage: str, turn: int, numbers: Mapping[str, int]) -> None:
        spans = self._open.get(qid, {})
        if spans and (stage, turn) not in spans:
            attributes = {"trajpack.turn.index": turn, **numbers}
            spans[stage, turn] = self._begin_span(stage, spans["episode", 0], attributes)

    def _end_stage(
        self,
        qid: str,
        stage: str,
        turn: int,
        error: BaseException | None,
        numbers: Mapping[str, int],
    ) -> None:
        span = self._open.get(qid, {}).pop((stage, turn), None)
        if span is not None:  # its episode has not ended
            self._end_span(span, error, numbers)

    def _begin_span(self, name: str, parent: Span, attributes: dict[str, int]) -> Span:
        context = self._trace.set_span_in_context(parent, self._no_parent)
        return self._tracer.start_span(f"trajpack.{name}", context, attributes=attributes)

    def _end_episode(
        self, qid: str, error: BaseException | None, numbers: Mapping[str, int]
    ) -> Span | None:
        """End the spans of an episode, the inner ones first; return its own if it was open."""
        spans = self._open.pop(qid, {})
        span = spans.pop(("episode", 0), None)
        for stage in spans.values():
            self._end_span(stage, error, {})
        if span is not None:
            self._end_span(span, error, numbers)
        return span

    def _end_span(
        self, span: Span, error: BaseException | None, numbers: Mapping[str, int]
    ) -> None:
        if span.is_recording():
            span.set_attributes(numbers)
            if error is not None:
                cause = error.cause if isinstance(error, EpisodeError) else type(error).__name__
                span.set_attribute("trajpack.error.cause", cause)
                span.set_attribute("trajpack.error.type", type(error.__cause__ or error).__name__)
                span.set_status(self._trace.StatusCode.ERROR, cause)
        span.end()
