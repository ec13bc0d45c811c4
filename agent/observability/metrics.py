"""Rollouts in numbers, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from trajpack.agent.errors import EpisodeError
from trajpack.agent.observability.families import (
    CAUSES,
    OTHER,
    STAGES,
    WAITS,
    EpisodeFamilies,
    FillFamilies,
    GenerationFamilies,
    PackFamilies,
    ResultFamilies,
    VerificationFamilies,
    VersionFamilies,
    WaitFamilies,
)
from trajpack.agent.observability.recent_values import RecentValues
from trajpack.agent.protocols import GenerationOutput, Reply
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.packing.conversion import merge_spans
from trajpack.packing.optional import require

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter

    from trajpack.agent.observability.pack_watch import WatchedPack
    from trajpack.agent.runner.runner import EpisodeResult
    from trajpack.packing.types import Turn

GROUP_OUTCOMES = ("kept", "failed", "incomplete", "filtered")
"""What can become of a group; any other reason for dropping one counts as ``"other"``."""


@dataclass(slots=True)
class _OpenEpisode:
    began: float
    generations: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Turns that wait for a completion: since when, and the tokens of their prompt."""
    verifications: dict[int, float] = field(default_factory=dict)


class RolloutMetrics(RolloutObserver):
    """Counts what a `RolloutRunner` does, and what is packed; `serve_metrics` shows it.

    Give it to the runner among its observers, and to `watch_pack`. Labels have few, fixed
    values: causes of failures, outcomes of groups, stages of a turn. Nothing that a model, a
    server or a data set wrote becomes a label.

    One instance watches any number of runs, one after the other or at once, as long as no
    two episodes in flight share a name.

    Args:
        registry: Where the metrics are registered; a new one of its own if None, so that any
            number of instances can live in one program.
        clock: Seconds that only grow.

    Raises:
        ModuleNotFoundError: If prometheus_client is not installed (extra ``metrics``).
        ValueError: If ``registry`` has metrics of these names already.

    Cost: about 20 microseconds a turn, its verification and its share of the episode
        included; see the guide for what was measured.

    Example:
        >>> from trajpack.agent.protocols import GenerationOutput
        >>> metrics = RolloutMetrics()
        >>> metrics.episode_started("q0@0", 0)
        >>> metrics.generation_started("q0@0", 0, num_prompt_tokens=3)
        >>> reply = GenerationOutput("q0@0", [1, 2, 3], [4, 5], [-0.1, -0.2], False, 0, 0)
        >>> metrics.generation_ended("q0@0", 0, reply)
        >>> metrics.registry.get_sample_value("trajpack_generated_tokens_total")
        2.0
    """

    registry: CollectorRegistry
    """Holds the metrics."""

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        require("prometheus_client")
        from prometheus_client import CollectorRegistry

        self.registry = CollectorRegistry() if registry is None else registry
        self._clock = clock
        self._turns = GenerationFamilies(self.registry)
        self._verifications = VerificationFamilies(self.registry)
        self._episodes = EpisodeFamilies(self.registry)
        self._waits = WaitFamilies(self.registry)
        self._results = ResultFamilies(self.registry)
        self._versions = VersionFamilies(self.registry)
        self._packs = PackFamilies(self.registry)
        self._fill = FillFamilies(self.registry)
        self._open: dict[str, _OpenEpisode] = {}
        self._ended = RecentValues[float]()
        self._failed = RecentValues[float]()
        self._num_in_flight = dict.fromkeys(STAGES, 0)
        self._make_labels()

    def _make_labels(self) -> None:
        """Make every labelled series now, at 0: a rate needs a first value."""
        causes = (*CAUSES, OTHER)
        self._generation_errors = _by_label(self._turns.generation_errors, causes)
        self._episodes_failed = _by_label(self._episodes.failed, causes)
        self._retries = _by_label(self._episodes.retries, causes)
        self._groups = _by_label(self._results.groups, (*GROUP_OUTCOMES, OTHER))
        self._wait_seconds = {reason: self._waits.seconds.labels(reason) for reason in WAITS}
        for stage in STAGES:  # read when they are asked for: nothing is spent on them before
            gauge = self._turns.in_flight.labels(stage)
            gauge.set_function(partial(self._num_in_flight.__getitem__, stage))
        self._episodes.in_flight.set_function(lambda: len(self._open))
        self._results.waiting.set_function(lambda: len(self._ended))

    def episode_started(self, qid: str, attempt: int) -> None:
        """Take the time, and how long a failed episode has waited to begin anew."""
        now = self._clock()
        self._close(qid)
        self._ended.pop(qid, None)
        self._open[qid] = _OpenEpisode(now)
        failed = self._failed.pop(qid, None)
        if failed is not None and attempt > 0:
            self._results.retry_wait_seconds.observe(now - failed)

    def wait_ended(self, reason: str, seconds: float) -> None:
        """Measure the wait."""
        if reason in self._wait_seconds:
            self._wait_seconds[reason].observe(seconds)

    def generation_started(self, qid: str, turn: int, num_prompt_tokens: int) -> None:
        """Take the time."""
        episode = self._open.get(qid)
        if episode is not None and turn not in episode.generations:
            episode.generations[turn] = (self._clock(), num_prompt_tokens)
            self._num_in_flight["generation"] += 1

    def generation_ended(self, qid: str, turn: int, reply: Reply) -> None:
        """Count the turn, its tokens and its time, or its error."""
        episode = self._open.get(qid)
        asked = None if episode is None else episode.generations.pop(turn, None)
        if asked is not None:
            self._num_in_flight["generation"] -= 1
            self._turns.generation_seconds.observe(self._clock() - asked[0])
        if not isinstance(reply, GenerationOutput):
            self._generation_errors[_cause(reply)].inc()
            return
        self._turns.turns.inc()
        self._turns.generated_tokens.inc(len(reply.output_ids))
        if asked is not None:
            self._turns.prompt_tokens.inc(asked[1])
        if reply.no_eos:
            self._turns.truncated_turns.inc()

    def verification_started(self, qid: str, turn: int) -> None:
        """Take the time."""
        episode = self._open.get(qid)
        if episode is not None and turn not in episode.verifications:
            episode.verifications[turn] = self._clock()
            self._num_in_flight["verification"] += 1

    def verification_ended(self, qid: str, turn: int, error: BaseException | None) -> None:
        """Count its time, and whether it failed."""
        episode = self._open.get(qid)
        began = None if episode is None else episode.verifications.pop(turn, None)
        if began is not None:
            self._num_in_flight["verification"] -= 1
            self._verifications.seconds.observe(self._clock() - began)
        if error is not None:
            self._verifications.errors.inc()

    def episode_ended(
        self, qid: str, attempt: int, error: Exception | None, *, final: bool
    ) -> None:
        """Count the attempt by what came of it; what was in flight for it no longer is."""
        now = self._clock()
        episode = self._close(qid)
        if episode is not None:
            self._episodes.seconds.observe(now - episode.began)
        if error is None:
            self._episodes.finished.inc()
            self._ended.put(qid, now)
            return
        self._ended.pop(qid, None)  # ended well, but was stale when it was to be handed over
        if final:
            self._episodes_failed[_cause(error)].inc()
        else:
            self._retries[_cause(error)].inc()
            self._failed.put(qid, now)

    def result_accepted(self, result: EpisodeResult, version: int) -> None:
        """Measure how long the result has waited, and how old its tokens are."""
        results = self._results
        ended = self._ended.pop(result.qid, None)
        if ended is not None:
            results.wait_seconds.observe(self._clock() - ended)
        self._versions.policy_version.set(version)
        turns = [turn for trajectory in result.trajectories for turn in trajectory.turns]
        results.accepted_turns.inc(len(turns))
        results.rewarded_turns.inc(sum(turn.reward > 0 for turn in turns))
        for turn in turns:
            if len(turn.completion_ids):
                self._versions.staleness.observe(max(version - _oldest_version(turn), 0))

    def group_ended(
        self, prompt_id: str, results: Sequence[EpisodeResult], reason: str | None
    ) -> None:
        """Count the group by what became of it."""
        kind = "kept" if reason is None else reason.split(maxsplit=1)[0].rstrip(":")
        self._groups[kind if kind in self._groups else OTHER].inc()
        if reason is not None:
            for result in results:
                self._ended.pop(result.qid, None)

    def pack_ended(self, pack: WatchedPack) -> None:
        """Count what `watch_pack` saw."""
        packs = self._packs
        packs.seconds.observe(pack.seconds)
        if pack.error is not None:
            packs.errors.inc()
            return
        if pack.plan is not None:
            self._fill.plan.observe(pack.plan.fill)
        figures = pack.figures()
        if figures is None:
            return
        packs.tokens.inc(figures.num_tokens)
        packs.generated_tokens.inc(figures.num_generated)
        packs.continuations.inc(figures.num_continuations or 0)
        packs.prefix_breaks.inc(figures.num_prefix_breaks or 0)
        if figures.rectangle_fill is not None:
            self._fill.rectangle.observe(figures.rectangle_fill)

    def close(self) -> None:
        """Forget what is open or waits, such as what a run that was given up left behind."""
        for qid in list(self._open):
            self._close(qid)
        self._ended.clear()
        self._failed.clear()

    def _close(self, qid: str) -> _OpenEpisode | None:
        episode = self._open.pop(qid, None)
        if episode is not None:
            self._num_in_flight["generation"] -= len(episode.generations)
            self._num_in_flight["verification"] -= len(episode.verifications)
        return episode


def _by_label(counter: Counter, values: Sequence[str]) -> dict[str, Counter]:
    return {value: counter.labels(value) for value in values}


def _cause(error: BaseException) -> str:
    cause = error.cause if isinstance(error, EpisodeError) else OTHER
    return cause if cause in CAUSES else OTHER


def _oldest_version(turn: Turn) -> int:
    if turn.version_spans is None:
        return turn.version_start
    return merge_spans(turn.version_spans, turn.version_start, turn.version_end)[1]
