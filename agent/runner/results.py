"""Results of episodes and groups, and the counts of a run."""

from __future__ import annotations

import logging
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
        error: Failure of the episode, with the original exception as its cause, or None.
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
        """Name of the episode: ``prompt.id``, an at sign and the sample."""
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
            ``incomplete`` if some did, ``filtered:`` and a filter's reason; None if accepted.
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


@dataclass
class Progress:
    """Counts of a run so far.

    Attributes:
        num_finished: Episodes handed over, the failed ones included.
        num_failed: Those with an error.
        num_turns: Turns sampled, those of failed and of unfinished episodes included.
        num_tokens: Tokens sampled in these turns.
        num_kept_turns: Turns of the episodes that finished without an error.
        num_rewarded_turns: Kept turns with a reward above zero.
        elapsed_s: Seconds since the run began.
    """

    num_finished: int = 0
    num_failed: int = 0
    num_turns: int = 0
    num_tokens: int = 0
    num_kept_turns: int = 0
    num_rewarded_turns: int = 0
    elapsed_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens sampled per second of the run."""
        return self.num_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def count_result(self, result: EpisodeResult) -> None:
        """Count an episode that is handed over."""
        self.num_finished += 1
        self.num_failed += result.error is not None
        self.num_kept_turns += len(result.turns)
        self.num_rewarded_turns += sum(turn.reward > 0 for turn in result.turns)


class OutcomeLog:
    """Logs a line, once, if a run gives nothing to train on: early, or at its end."""

    def __init__(self) -> None:
        self._num_episodes = 0
        self._reasons: Counter[str] = Counter()
        self._first_error: Exception | None = None
        self._is_silent = False

    def add(self, group: GroupResult) -> None:
        """Count why a group cannot be trained."""
        self._num_episodes += len(group.results)
        self._reasons[group.rejected or "no generated token"] += 1
        if group.rejected is None:
            self._is_silent |= any(len(turn.completion_ids) for turn in group.turns)
        errors = (result.error for result in group.results if result.error is not None)
        self._first_error = self._first_error or next(errors, None)
        if self._num_episodes >= _EARLY:
            self.log()

    def log(self) -> None:
        """Log the line unless a group was of use, or it was logged before."""
        if self._reasons and not self._is_silent:
            self._is_silent = True
            reasons = ", ".join(f"{name} {count}" for name, count in self._reasons.most_common())
            _logger.error(
                "%d episodes gave nothing to train on, groups: %s; the first error: %s",
                self._num_episodes,
                one_line(reasons),
                one_line(self._first_error),
            )
