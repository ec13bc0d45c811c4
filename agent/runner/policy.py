"""Policies of a rollout: retries, time limits, staleness of weights, and groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Literal, TypeAlias

from trajpack.agent.errors import CAUSES, StaleEpisodeError
from trajpack.agent.runner.results import EpisodeResult
from trajpack.agent.seeding import derive_seed
from trajpack.packing.conversion import as_integer, merge_spans

RETRIED = CAUSES - {"agent", "cancelled", "ended", "refused", "stale"}
"""Causes retried by default."""


@dataclass(frozen=True)
class RetryPolicy:
    """Retries of failed episodes: from the start, with the same name and seed.

    The wait before a retry doubles each time, and is shortened by up to a half, by the episode's
    name. Other episodes use the slot meanwhile.

    Attributes:
        max_attempts: Attempts at an episode at most; 1 disables retries.
        causes: `EpisodeError.cause` of failures that are retried. By default all but those of the
            agent, of refused requests, of cancellations and of the engine's end.
        wait_initial_s: Seconds after the first attempt at most.
        wait_max_s: Seconds after any attempt at most.
    """

    max_attempts: int = 1
    causes: Collection[str] = RETRIED
    wait_initial_s: float = 0.1
    wait_max_s: float = 10.0

    def __post_init__(self) -> None:
        check_least(self, max_attempts=1, wait_initial_s=0.0, wait_max_s=0.0)
        if isinstance(self.causes, str):
            raise TypeError(f"causes must be several, got {self.causes!r}")
        object.__setattr__(self, "causes", frozenset(self.causes))
        if unknown := sorted(set(self.causes) - CAUSES):
            raise ValueError(f"causes must be among {sorted(CAUSES)}, got {unknown}")

    def allows(self, cause: str, attempts: int) -> bool:
        """Return whether an episode that failed after ``attempts`` is retried."""
        return attempts < self.max_attempts and cause in self.causes

    def wait_s(self, qid: str, attempts: int) -> float:
        """Return the wait of an episode after ``attempts``, in seconds."""
        longest = min(self.wait_initial_s * 2.0 ** min(attempts - 1, 64), self.wait_max_s)
        return longest * (1 - derive_seed(attempts, "back off", qid) / 2**32)


@dataclass(frozen=True)
class StalenessPolicy:
    """Limits on how many versions old the weights of a result may be.

    Attributes:
        max_staleness: Versions between the weights that an episode starts with and those it trains:
            with 0 no episode starts before the weights of its training step are there.
        batch_size: Results per version: episodes for `RolloutRunner.run`, groups for
            `RolloutRunner.run_groups`.
        max_token_age: A result whose oldest token is more versions than this behind the engine's,
            when it is handed over, has failed as ``stale``. ``None`` sets no limit.
        num_accepted: Results accepted before this runner: what a checkpoint says. ``None`` counts
            one ``batch_size`` for each version that the engine has when the first episode begins.
    """

    max_staleness: int
    batch_size: int
    max_token_age: int | None = None
    num_accepted: int | None = None

    def __post_init__(self) -> None:
        check_least(self, max_staleness=0, batch_size=1, max_token_age=0, num_accepted=0)


class StalenessGate:
    """Limit on the results under way, by the version of the engine's weights; none without policy.

    With weights of version ``v``, results may begin as long as those accepted and those under way
    are fewer than ``(max_staleness + v + 1) * batch_size``: the rule of AReaL (arXiv 2505.24298,
    equation 3). A result is under way from its beginning until it is handed over; one that failed
    or was rejected gives its place back.
    """

    def __init__(self, policy: StalenessPolicy | None) -> None:
        self._policy = policy
        self._num_accepted = None if policy is None else policy.num_accepted
        self.num_running = 0
        """Results under way."""

    @property
    def num_accepted(self) -> int:
        """Results accepted so far, those before the runner included: part of a checkpoint."""
        return self._num_accepted or 0

    def capacity(self, version: int) -> int:
        """Return how many more results may begin now; none if below 1."""
        if self._policy is None:
            return 1
        if self._num_accepted is None:
            self._num_accepted = version * self._policy.batch_size
        limit = (self._policy.max_staleness + version + 1) * self._policy.batch_size
        return limit - self._num_accepted - self.num_running

    def end(self, *, is_accepted: bool) -> None:
        """Count a result as no longer under way, and as accepted or not."""
        self.num_running -= 1
        self._num_accepted = self.num_accepted + is_accepted


def refuse_stale(
    result: EpisodeResult, policy: StalenessPolicy | None, version: int
) -> EpisodeResult:
    """Return a result, or its failure if it is too old for weights of ``version``."""
    if policy is None or policy.max_token_age is None:
        return result
    versions = (
        merge_spans(turn.version_spans, turn.version_start, turn.version_end)[1]
        for turn in result.turns
        if len(turn.completion_ids)
    )
    oldest = min(versions, default=version)
    if version - oldest <= policy.max_token_age:
        return result
    reason = (
        f"a token is of version {oldest}, {version - oldest} behind the engine's; at most "
        f"{policy.max_token_age} are allowed"
    )
    return replace(result, trajectories=(), error=StaleEpisodeError(result.qid, reason))


GroupFilter: TypeAlias = Callable[[Sequence[EpisodeResult]], str | None]
"""Function of the results of a group that did not fail: a word why to reject it, or None."""


def not_all_equal(results: Sequence[EpisodeResult]) -> str | None:
    """Reject a group of several as ``all_equal`` if its episodes have the same sum of rewards."""
    sums = {float(sum(turn.reward for turn in result.turns)) for result in results}
    return "all_equal" if len(results) > 1 and len(sums) == 1 else None


def success_rate_between(low: float, high: float) -> GroupFilter:
    """Return a filter that rejects groups as ``too_hard`` or ``too_easy``.

    Args:
        low: Least share of successes that is accepted: episodes whose last reward is above zero.
        high: Greatest one.

    Raises:
        ValueError: If not ``0 <= low <= high <= 1``.
    """
    if not 0 <= low <= high <= 1:
        raise ValueError(f"expected 0 <= low <= high <= 1, got {low} and {high}")

    def success_rate(results: Sequence[EpisodeResult]) -> str | None:
        rewards = [result.turns[-1].reward if result.turns else 0.0 for result in results]
        rate = sum(reward > 0 for reward in rewards) / len(results)
        if rate < low:
            return "too_hard"
        return "too_easy" if rate > high else None

    return success_rate


@dataclass(frozen=True)
class GroupPolicy:
    """Rules that accept or reject a group, for `RolloutRunner.run_groups`.

    Attributes:
        incomplete: Treatment of a group with failed episodes: accept the others, or reject the
            group.
        filters: Filters, called in turn with the results that did not fail; the first reason
            rejects the group.
    """

    incomplete: Literal["keep", "drop"] = "keep"
    filters: Sequence[GroupFilter] = ()

    def __post_init__(self) -> None:
        if self.incomplete not in ("keep", "drop"):
            raise ValueError(f"incomplete must be 'keep' or 'drop', got {self.incomplete!r}")
        object.__setattr__(self, "filters", tuple(self.filters))
        for entry in self.filters:
            if not callable(entry):
                raise TypeError(f"a filter must be callable, got {type(entry).__name__}")


@dataclass(frozen=True)
class RolloutPolicy:
    """Policies of a rollout. The default tries once, sets no limits and keeps every result.

    Each policy raises a `TypeError` or `ValueError` for a value of the wrong kind or out of range.

    Attributes:
        retries: Retries of failed episodes.
        episode_timeout_s: Seconds that one attempt at an episode may take, without those of
            `RolloutRunner.paused`; ``None`` sets no limit.
        generation_timeout_s: The same for one reply of the engine.
        staleness: Limits on staleness; ``None`` sets none.
        groups: Rules that accept or reject a group.
        seed: Seed of all episodes: each `Prompt.seed` is derived from it and the episode's name.
        silence_warning_s: Seconds in which nothing happens in the whole run, after which a warning
            says what it waits for, and again after twice as long; ``None`` logs none.
    """

    retries: RetryPolicy = field(default_factory=RetryPolicy)
    episode_timeout_s: float | None = None
    generation_timeout_s: float | None = None
    staleness: StalenessPolicy | None = None
    groups: GroupPolicy = field(default_factory=GroupPolicy)
    seed: int = 0
    silence_warning_s: float | None = 10.0

    def __post_init__(self) -> None:
        as_integer("seed", self.seed)
        kinds = {"retries": RetryPolicy, "groups": GroupPolicy, "staleness": StalenessPolicy}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or name != "staleness"):
                raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")
        for name in ("silence_warning_s", "episode_timeout_s", "generation_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")


def check_least(options: object, **least: float) -> None:
    """Check numbers, integers if their least is one; None may be where it is the default."""
    for name, minimum in least.items():
        value = getattr(options, name)
        if value is None and getattr(type(options), name, 0) is None:
            continue
        if isinstance(minimum, int):
            as_integer(name, value)
        elif not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        if not value >= minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}")
