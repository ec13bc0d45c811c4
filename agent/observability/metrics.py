"""`RolloutMetrics`: rollouts in numbers, for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from trajpack.agent.errors import CAUSES, EpisodeError
from trajpack.agent.protocols import GenerationOutput
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.packing.conversion import merge_spans
from trajpack.packing.optional import require

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from trajpack.agent.runner.runner import EpisodeResult
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.plan.types import Plan

OTHER = "other"  # a cause of a caller's own
LABELS = {
    "cause": (*sorted(CAUSES), OTHER),
    "outcome": ("kept", "failed", "incomplete", "filtered"),
    "stage": ("generation", "verification"),
}
"""All values of each label."""

_LATENCY = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_WAIT = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 1800)
_PACK = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
_RATIO = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)
_GAUGES = {"turns_in_flight", "episodes_in_flight", "results_waiting", "policy_version"}


class _Family(NamedTuple):
    """A metric: a gauge if `_GAUGES` has it, a histogram if it has buckets, else a counter."""

    name: str  # without the prefix trajpack_
    meaning: str
    label: str | None = None
    buckets: Sequence[float] = ()  # upper bounds, in the unit of the name


_FAMILIES = (
    _Family("turns_in_flight", "Turns waiting for a completion or a verification.", "stage"),
    _Family("turns", "Turns that the engine completed."),
    _Family("prompt_tokens", "Prompt tokens of completed turns, the whole conversation each time."),
    _Family("generated_tokens", "Tokens sampled, whether kept or not."),
    _Family("truncated_turns", "Completed turns without an end-of-sequence token."),
    _Family("generation_seconds", "Time from a request to its reply or error.", None, _LATENCY),
    _Family("generation_errors", "Errors of the engine, by cause.", "cause"),
    _Family("verification_seconds", "Time of an environment's step or error.", None, _LATENCY),
    _Family("verification_errors", "Steps of the environment that raised."),
    _Family("episodes_in_flight", "Running episodes."),
    _Family("episodes_finished", "Attempts without an error, even if found stale afterwards."),
    _Family("episodes_failed", "Episodes given up, by the cause of the last failure.", "cause"),
    _Family("episode_retries", "Failed attempts followed by another, by cause.", "cause"),
    _Family("episode_seconds", "Time of an attempt at an episode, failed or not.", None, _LATENCY),
    _Family("groups", "Groups completed or given up, by outcome.", "outcome"),
    _Family("results_waiting", "Results of finished episodes that were not taken yet."),
    _Family("result_wait_seconds", "Time from an episode's end to its hand-over.", None, _WAIT),
    _Family("retry_wait_seconds", "Time from a failed attempt to the next.", None, _WAIT),
    _Family("accepted_turns", "Turns of the results that were taken."),
    _Family("rewarded_turns", "Turns of the results that were taken, with a reward above 0."),
    _Family("policy_version", "Version of the weights when a result was last taken."),
    _Family("staleness_versions", "Age of a turn's oldest token at hand-over.", None, _VERSIONS),
    _Family("pack_seconds", "Time of a pack on the host.", None, _PACK),
    _Family("packed_tokens", "Tokens of packed batches."),
    _Family("packed_generated_tokens", "Sampled tokens of packed batches, each trained once."),
    _Family("packed_continuations", "Packed turns after a trajectory's first (merged layout)."),
    _Family("prefix_breaks", "Continuations whose prompt does not begin with the turns before."),
    _Family("plan_fill_ratio", "Tokens over the capacity of a plan's micro-batches.", None, _RATIO),
    _Family("rectangle_fill_ratio", "Tokens over a padded rectangle of the rows.", None, _RATIO),
)


class RolloutMetrics(RolloutObserver):
    """Counts the events of a `RolloutRunner` and of packs.

    Call `pack_ended` after a pack. The server of prometheus_client shows the counts:
    ``start_http_server(9464, "127.0.0.1", metrics.registry)``.
    Labels have few, fixed values, never text from a model, a server or a data set. One instance may
    watch any number of runs, if no two running episodes share a name.

    Args:
        registry: Registry of the metrics; a new one if None.

    Raises:
        ModuleNotFoundError: If prometheus_client is not installed (extra ``metrics``).
        ValueError: If ``registry`` has metrics of these names already.
    """

    registry: CollectorRegistry  # holds the metrics

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        require("prometheus_client")
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry() if registry is None else registry
        self._began: dict[str, dict[tuple[str, int], float]] = {}
        """Of each episode, when what goes on began: itself, stages of its turns, or a wait."""
        self._series: dict[str | tuple[str, str], Any] = {}
        """Each metric by its name, and by name and label value if it has a label."""
        for name, meaning, label, buckets in _FAMILIES:
            kind: Any = Gauge if name in _GAUGES else Counter
            if buckets:
                kind = partial(Histogram, buckets=buckets)
            labels = [label] if label else []
            family = kind(f"trajpack_{name}", meaning, labels, registry=self.registry)
            if label is None:
                self._series[name] = family
            else:  # made now, at 0: a rate needs a first value
                self._series |= {(name, value): family.labels(value) for value in LABELS[label]}
        of = self._series
        of["episodes_in_flight"].set_function(partial(self._count, "episode"))
        of["results_waiting"].set_function(partial(self._count, "result_wait"))
        for stage in LABELS["stage"]:
            of["turns_in_flight", stage].set_function(partial(self._count, stage))

    def _count(self, stage: str) -> int:
        # scrapes run in another thread: list() copies in one step
        return sum(kind == stage for began in list(self._began.values()) for kind, _ in list(began))

    def _begin(self, qid: str, stage: str, turn: int) -> None:
        began = self._began.get(qid, {})
        if ("episode", 0) in began:
            began.setdefault((stage, turn), perf_counter())

    def _end(self, qid: str, stage: str, turn: int = 0) -> None:
        began = self._began.get(qid, {}).pop((stage, turn), None)
        if began is not None:
            self._series[f"{stage}_seconds"].observe(perf_counter() - began)

    def _count_error(self, name: str, error: BaseException) -> None:
        cause = getattr(error, "cause", OTHER)
        self._series[name, cause if cause in CAUSES else OTHER].inc()

    def episode_started(self, qid: str, attempt: int) -> None:
        self._end(qid, "retry_wait")
        self._began[qid] = {("episode", 0): perf_counter()}

    def generation_started(self, qid: str, turn: int, num_prompt_tokens: int) -> None:
        self._begin(qid, "generation", turn)

    def generation_ended(self, qid: str, turn: int, reply: GenerationOutput | EpisodeError) -> None:
        self._end(qid, "generation", turn)
        if not isinstance(reply, GenerationOutput):
            self._count_error("generation_errors", reply)
            return
        of = self._series
        of["turns"].inc()
        of["generated_tokens"].inc(len(reply.output_ids))
        of["truncated_turns"].inc(bool(reply.no_eos))
        of["prompt_tokens"].inc(len(reply.prompt_ids))

    def verification_started(self, qid: str, turn: int) -> None:
        self._begin(qid, "verification", turn)

    def verification_ended(self, qid: str, turn: int, error: BaseException | None) -> None:
        self._end(qid, "verification", turn)
        self._series["verification_errors"].inc(error is not None)

    def episode_ended(
        self, qid: str, attempt: int, error: Exception | None, *, final: bool
    ) -> None:
        self._end(qid, "episode")
        self._began.pop(qid, None)  # also the wait of a result that was stale at its hand-over
        if error is None:
            self._series["episodes_finished"].inc()
        else:
            self._count_error("episodes_failed" if final else "episode_retries", error)
        if error is None or not final:
            wait = "result_wait" if error is None else "retry_wait"
            self._began[qid] = {(wait, 0): perf_counter()}

    def result_accepted(self, result: EpisodeResult, version: int) -> None:
        self._end(result.qid, "result_wait")
        self._began.pop(result.qid, None)
        of = self._series
        of["policy_version"].set(version)
        of["accepted_turns"].inc(len(result.turns))
        of["rewarded_turns"].inc(sum(turn.reward > 0 for turn in result.turns))
        for turn in result.turns:
            if len(turn.completion_ids):
                _, oldest, _ = merge_spans(turn.version_spans, turn.version_start, turn.version_end)
                of["staleness_versions"].observe(max(version - oldest, 0))

    def group_ended(
        self, prompt_id: str, results: Sequence[EpisodeResult], reason: str | None
    ) -> None:
        outcome = "kept" if reason is None else reason.partition(":")[0]
        self._series["groups", outcome].inc()
        for result in () if reason is None else results:
            self._began.pop(result.qid, None)

    def pack_ended(self, batch: PackedBatch, seconds: float, plan: Plan | None = None) -> None:
        """Count a packed batch that took ``seconds`` on the host, and the fill of its plan."""
        of = self._series
        of["pack_seconds"].observe(seconds)
        of["packed_tokens"].inc(batch.num_tokens)
        of["packed_generated_tokens"].inc(batch.num_generated)
        if batch.num_prefix_breaks is not None:
            of["packed_continuations"].inc(batch.num_turns - len(batch.ids))
            of["prefix_breaks"].inc(batch.num_prefix_breaks)
        if batch.num_tokens:
            fill = batch.num_tokens / (len(batch) * batch.max_seqlen)
            of["rectangle_fill_ratio"].observe(fill)
        if plan is not None:
            of["plan_fill_ratio"].observe(plan.fill)

    def close(self) -> None:
        """Forget open episodes and waiting results, such as those of an abandoned run."""
        self._began.clear()
