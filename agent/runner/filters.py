"""Filters of groups: which prompts have nothing to teach at this time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from trajpack.agent.runner.results import EpisodeResult

GroupFilter: TypeAlias = Callable[[Sequence[EpisodeResult]], str | None]
"""Given the episodes of a group that did not fail, says in one word why to reject it, or None."""


def sum_of_rewards(result: EpisodeResult) -> float:
    """Return the sum of the rewards of all turns of an episode."""
    return float(sum(turn.reward for turn in result.turns))


def has_succeeded(result: EpisodeResult) -> bool:
    """Return whether the last turn of an episode has a reward above zero."""
    turns = result.turns
    return bool(turns) and turns[-1].reward > 0


def not_all_equal(results: Sequence[EpisodeResult]) -> str | None:
    """Reject a group whose episodes all have the same sum of rewards: nothing to compare.

    Returns:
        ``"all_equal"``, or None. A group of one is not rejected: it is compared with others.
    """
    scores = {sum_of_rewards(result) for result in results}
    return "all_equal" if len(results) > 1 and len(scores) == 1 else None


@dataclass(frozen=True)
class SuccessRate:
    """Rejects a group whose share of successes lies outside of bounds.

    Raises:
        ValueError: If not ``0 <= low <= high <= 1``.
    """

    low: float
    """Least share that is accepted."""
    high: float
    """Greatest share that is accepted."""
    succeeded: Callable[[EpisodeResult], bool] = has_succeeded
    """Says of an episode whether it succeeded."""

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"expected 0 <= low <= high <= 1, got {self.low} and {self.high}")

    def __call__(self, results: Sequence[EpisodeResult]) -> str | None:
        """Return ``"too_hard"`` or ``"too_easy"``, or None for a group that is accepted."""
        if not results:
            return None
        rate = sum(map(self.succeeded, results)) / len(results)
        if rate < self.low:
            return "too_hard"
        return "too_easy" if rate > self.high else None


def success_rate_between(
    low: float, high: float, succeeded: Callable[[EpisodeResult], bool] = has_succeeded
) -> SuccessRate:
    """Return a filter that rejects groups which are solved too seldom or too often.

    Args:
        low: Least share of successes that is accepted.
        high: Greatest one.
        succeeded: Says of an episode whether it succeeded; by default, whether its last turn
            has a reward above zero.

    Raises:
        ValueError: If not ``0 <= low <= high <= 1``.
    """
    return SuccessRate(low, high, succeeded)
