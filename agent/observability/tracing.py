"""`RolloutTracer`: rollouts as spans, for OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import GenerationOutput
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.packing.optional import require
from trajpack.packing.text import one_line

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

_Numbers: TypeAlias = Mapping[str, int]


class RolloutTracer(RolloutObserver):
    """Makes spans of the events of a `RolloutRunner`.

    Each attempt at an episode is a trace: a span ``trajpack.episode`` with a
    ``trajpack.generation`` and a ``trajpack.verification`` for each turn. Attributes are numbers,
    the episode's id and kinds of errors, never text from a model, a server or an environment.

    One instance may watch any number of runs, if no two running episodes share a name.

    Args:
        provider: Provider of the tracer, with its exporters; the global one if None.

    Raises:
        ModuleNotFoundError: If opentelemetry-api is not installed (extra ``metrics``).
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        require("opentelemetry")
        from opentelemetry import trace

        self._trace = trace
        self._tracer = trace.get_tracer("trajpack", tracer_provider=provider)
        self._open: dict[str, dict[tuple[str, int], Span]] = {}
        """Open spans of running attempts: first that of the attempt, then those of stages."""

    @property
    def num_open(self) -> int:
        """Episodes whose spans have not ended; 0 when no run is active."""
        return len(self._open)

    def episode_started(self, qid: str, attempt: int) -> None:
        self._end_episode(qid, None, {})
        self._open[qid] = {}
        name = one_line(qid, 200)
        attributes = {"trajpack.episode.id": name, "trajpack.episode.attempt": attempt}
        self._start(qid, "episode", 0, attributes)

    def generation_started(self, qid: str, turn: int, num_prompt_tokens: int) -> None:
        numbers = {"trajpack.generation.num_prompt_tokens": num_prompt_tokens}
        self._start(qid, "generation", turn, {"trajpack.turn.index": turn, **numbers})

    def generation_ended(self, qid: str, turn: int, reply: GenerationOutput | EpisodeError) -> None:
        if isinstance(reply, EpisodeError):
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
        self._start(qid, "verification", turn, {"trajpack.turn.index": turn})

    def verification_ended(self, qid: str, turn: int, error: BaseException | None) -> None:
        self._end_stage(qid, "verification", turn, error, {})

    def episode_ended(
        self, qid: str, attempt: int, error: Exception | None, *, final: bool
    ) -> None:
        self._end_episode(qid, error, {"trajpack.episode.final": final})

    def close(self) -> None:
        """End all open spans, such as those of an abandoned run."""
        for qid in list(self._open):
            self._end_episode(qid, None, {})

    def _start(self, qid: str, stage: str, turn: int, attributes: Mapping[str, Any]) -> None:
        spans = self._open.get(qid)
        if spans is not None and (stage, turn) not in spans:
            parent = spans.get(("episode", 0), self._trace.INVALID_SPAN)
            context = self._trace.set_span_in_context(parent)
            span = self._tracer.start_span(f"trajpack.{stage}", context, attributes=attributes)
            spans[stage, turn] = span

    def _end_episode(self, qid: str, error: BaseException | None, numbers: _Numbers) -> None:
        """End the spans of an episode, its own at last."""
        for stage, turn in reversed([*self._open.get(qid, {})]):
            self._end_stage(qid, stage, turn, error, numbers if stage == "episode" else {})
        self._open.pop(qid, None)

    def _end_stage(
        self, qid: str, stage: str, turn: int, error: BaseException | None, numbers: _Numbers
    ) -> None:
        span = self._open.get(qid, {}).pop((stage, turn), None)
        if span is None:  # its episode has ended
            return
        span.set_attributes(numbers)
        if error is not None:
            cause = error.cause if isinstance(error, EpisodeError) else type(error).__name__
            span.set_attribute("trajpack.error.cause", cause)
            span.set_attribute("trajpack.error.type", type(error.__cause__ or error).__name__)
            span.set_status(self._trace.StatusCode.ERROR, cause)
        span.end()
