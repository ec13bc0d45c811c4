"""Log lines of a run that gives nothing to train on."""

from __future__ import annotations

import logging
from collections import Counter

from trajpack.agent.runner.results import EpisodeResult, GroupResult
from trajpack.packing.text import one_line

_logger = logging.getLogger(__name__)


_EARLY = 100
"""Failures or rejections in a row, from the first result on, that are logged before the end."""


class RunOutcome:
    """Counts of one run, which log a line if there is nothing to train on.

    That is the case where every episode has failed, no episode has brought a generated token,
    every group was rejected, or all trajectories of more than one sample earned the same, so that
    comparing them gives no advantage. The line comes at the end; each of the first three comes
    after the first hundred instead, if it holds then, since a run may have no end.
    """

    def __init__(self) -> None:
        self._num_episodes = 0
        self._num_groups = 0
        self._num_trajectories = 0
        self._has_tokens = False
        self._causes: Counter[str] = Counter()
        self._rejections: Counter[str] = Counter()
        self._first_error: Exception | None = None
        self._rewards: set[float] = set()
        self._told: set[str] = set()

    def count(self, result: EpisodeResult) -> None:
        """Count an episode."""
        self._num_episodes += 1
        if result.error is not None:
            self._causes[result.error.cause] += 1
            self._first_error = self._first_error or result.error
        for trajectory in result.trajectories:
            self._num_trajectories += 1
            if len(self._rewards) < 2:
                self._rewards.add(sum(turn.reward for turn in trajectory.turns))
            if not self._has_tokens:
                self._has_tokens = any(len(turn.completion_ids) for turn in trajectory.turns)
        if self._num_episodes == _EARLY and not self._log_failures("the first"):
            self._log_emptiness("the first")

    def count_group(self, group: GroupResult) -> None:
        """Count a group and its episodes."""
        self._num_groups += 1
        if group.rejected is not None:
            self._rejections[group.rejected] += 1
        for result in group.results:
            self.count(result)
        if self._num_groups == _EARLY:
            self._log_rejections("the first")

    def log(self, *, had_prompts: bool, group_size: int) -> None:
        """Log a line if the run gave nothing to train on, unless the same was told early.

        Args:
            had_prompts: Whether the run was given any. One whose episodes were all finished
                before was, and has no results.
            group_size: Episodes of each prompt.
        """
        if not had_prompts:
            _logger.warning("the run was given no prompts: is their iterator used up?")
        elif self._log_failures("all") or self._log_emptiness("all") or self._log_rejections("all"):
            return
        elif group_size > 1 and self._num_trajectories > 1 and len(self._rewards) == 1:
            _logger.info(
                "all %d trajectories earned the same reward, %g: estimators that compare the "
                "trajectories of a group give them no advantage",
                self._num_trajectories, *self._rewards,
            )  # fmt: skip

    def _log_failures(self, which: str) -> bool:
        """Log a line, once, if all episodes have failed; return whether they have."""
        if not self._num_episodes or self._causes.total() < self._num_episodes:
            return False
        if self._is_new("failures"):
            _logger.error(
                "%s %d episodes failed, by cause: %s; the first: %s; see result.error of each, "
                "and its __cause__",
                one_line(which), self._num_episodes, one_line(_counted(self._causes)),
                one_line(self._first_error),
            )  # fmt: skip
        return True

    def _log_emptiness(self, which: str) -> bool:
        """Log a line, once, if no episode brought a token to train on; return whether none did."""
        if not self._num_episodes or self._has_tokens:
            return False
        if self._is_new("emptiness"):
            _logger.warning(
                "%s %d episodes brought no generated token to train on (failed: %d; trajectories: "
                "%d); an agent returns trajectories whose turns hold the replies' output_ids as "
                "completion_ids",
                one_line(which), self._num_episodes, self._causes.total(), self._num_trajectories,
            )  # fmt: skip
        return True

    def _log_rejections(self, which: str) -> bool:
        """Log a line, once, if all groups were rejected; return whether they were."""
        if not self._num_groups or self._rejections.total() < self._num_groups:
            return False
        # Groups that were rejected as failed alone are told of as failed episodes.
        if self._rejections.keys() != {"failed"} and self._is_new("rejections"):
            _logger.warning(
                "%s %d groups were rejected: %s; see group.rejected of each, and GroupPolicy",
                one_line(which), self._num_groups, one_line(_counted(self._rejections)),
            )  # fmt: skip
        return True

    def _is_new(self, kind: str) -> bool:
        """Return whether this kind of line was not logged before, and note that it is."""
        is_new = kind not in self._told
        self._told.add(kind)
        return is_new


def _counted(counts: Counter[str]) -> str:
    """Return names with their counts.

    Example:
        >>> _counted(Counter(timeout=1, environment=30))
        'environment 30, timeout 1'
    """
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
