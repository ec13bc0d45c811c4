"""Results of episodes and groups, and the counts of a run."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass

from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import Prompt
from trajpack.packing.representation import brief_repr
from trajpack.packing.text import one_line
from trajpack.packing.types import Trajectory, Turn

_logger = logging.getLogger(__name__)
_EARLY = 100
"""Episodes after which a run that gave nothing so far says so."""


@dataclass(frozen=True)
class EpisodeResult:
    """Result of one episode: its trajectories, or the error that ended it.

    Attributes:
        prompt: Prompt as given to the runner.
        trajectories: Trajectories that the agent returned; empty if the episode failed.
        error: Failure of the episode, with the original exception as its cause; None if it
            succeeded.
        sample: Index of this rollout among those of its prompt, from 0.
        attempts: Number of attempts; the result is that of the last one.
    """

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    error: EpisodeError | None = None
    sample: int = 0
    attempts: int = 1

    __repr__ = brief_repr

    @property
    def qid(self) -> str:
        """Name of the episode: ``prompt.id``, an at sign and the sample.

        Example:
            >>> EpisodeResult(Prompt("gsm8k-7", [1]), (), sample=2).qid
            'gsm8k-7@2'
        """
        return f"{self.prompt.id}@{self.sample}"

    @property
    def turns(self) -> list[Turn]:
        """Turns of all its trajectories."""
        return [turn for trajectory in self.trajectories for turn in trajectory.turns]


@dataclass(frozen=True)
class GroupResult:
    """Results of all samples of one prompt.

    Attributes:
        prompt: Prompt as given to the runner.
        results: One result for each episode that was begun, failed ones included, by sample.
        rejected: Reason not to train on the group: ``failed`` if all episodes failed,
            ``incomplete`` if some did, ``filtered:`` and a filter's reason. ``None`` if it was
            accepted.
    """

    prompt: Prompt
    results: tuple[EpisodeResult, ...]
    rejected: str | None = None

    __repr__ = brief_repr

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Trajectories of all episodes that have succeeded, by sample."""
        return tuple(path for result in self.results for path in result.trajectories)

    @property
    def turns(self) -> list[Turn]:
        """Turns of all its trajectories."""
        return [turn for trajectory in self.trajectories for turn in trajectory.turns]


@dataclass(frozen=True)
class Progress:
    """Counts of a run so far.

    Attributes:
        num_started: Episodes begun, ``group_size`` to a prompt; each counts once, whatever its
            attempts.
        num_finished: Episodes ended, the failed ones included.
        num_failed: Episodes that ended with an error.
        num_turns: Turns sampled, those of failed and of unfinished episodes included.
        num_tokens: Tokens sampled in these turns.
        num_kept_turns: Turns of the episodes that finished without an error.
        num_rewarded_turns: Kept turns with a reward above zero.
        reward_sum: Sum of the rewards of the kept turns, not discounted.
        elapsed_s: Seconds since the run began.
    """

    num_started: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_turns: int = 0
    num_tokens: int = 0
    num_kept_turns: int = 0
    num_rewarded_turns: int = 0
    reward_sum: float = 0.0
    elapsed_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens sampled per second of the run.

        Example:
            >>> Progress(num_tokens=500, elapsed_s=2.0).tokens_per_s
            250.0
        """
        return self.num_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0


class Counters:
    """Mutable counts of a run, by the names of the fields of `Progress`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._reward_sum = 0.0
        self._began = time.monotonic()
        self._reasons: Counter[str] = Counter()
        self._first_error: Exception | None = None
        self._num_judged = 0
        self._is_of_use = False

    def count_turn(self, turn: Turn) -> None:
        """Count a turn that was sampled."""
        self.counts["num_turns"] += 1
        self.counts["num_tokens"] += len(turn.completion_ids)

    def count_result(self, result: EpisodeResult, times: int = 1) -> None:
        """Count an episode that has ended; -1 ``times`` takes it back."""
        turns = result.turns
        self.counts["num_finished"] += times
        self.counts["num_failed"] += times * (result.error is not None)
        self.counts["num_kept_turns"] += times * len(turns)
        self.counts["num_rewarded_turns"] += times * sum(turn.reward > 0 for turn in turns)
        self._reward_sum += times * sum(turn.reward for turn in turns)

    def progress(self) -> Progress:
        """Return the counts of this moment."""
        elapsed_s = time.monotonic() - self._began
        return Progress(**self.counts, reward_sum=self._reward_sum, elapsed_s=elapsed_s)

    def count_group(self, group: GroupResult) -> None:
        """Count why a group cannot be trained; after a hundred episodes without use, say so."""
        self._num_judged += len(group.results)
        self._reasons[group.rejected or "no generated token"] += 1
        self._is_of_use |= group.rejected is None and any(
            len(turn.completion_ids) for turn in group.turns
        )
        errors = (result.error for result in group.results if result.error is not None)
        self._first_error = self._first_error or next(errors, None)
        if self._num_judged >= _EARLY:
            self.log_outcome()

    def log_outcome(self) -> None:
        """Log a line if the run gave nothing to train on, once."""
        if self._reasons and not self._is_of_use:
            self._is_of_use = True  # so that no other line follows
            reasons = ", ".join(f"{name} {count}" for name, count in self._reasons.most_common())
            _logger.error(
                "%d episodes gave nothing to train on, groups: %s; the first error: %s",
                self._num_judged,
                one_line(reasons),
                one_line(self._first_error),
            )
