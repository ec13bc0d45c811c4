"""Results of episodes and groups, and the counts of a run."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass

from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import GenerationOutput, Prompt, Reply
from trajpack.packing.representation import brief_repr
from trajpack.packing.text import one_line
from trajpack.packing.types import Trajectory, Turn

_logger = logging.getLogger(__name__)
_EARLY = 100
"""Failures or rejections in a row, from the first result on, that are logged before the end."""


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
        return tuple(one for result in self.results for one in result.trajectories)


@dataclass(frozen=True)
class Progress:
    """Counts of a run so far.

    Attributes:
        num_prompts: Prompts taken.
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

    num_prompts: int = 0
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

    def count_reply(self, reply: Reply) -> None:
        """Count a turn, unless the reply is an error."""
        if isinstance(reply, GenerationOutput):
            self.counts["num_turns"] += 1
            if hasattr(reply.output_ids, "__len__"):
                self.counts["num_tokens"] += len(reply.output_ids)

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


class RunOutcome:
    """Log line of a run that gives nothing to train on.

    Every episode has failed, none has brought a generated token, every group was rejected, or all
    trajectories of more than one sample earned the same. The line comes at the end; each of the
    first three comes after the first hundred instead, since a run may have no end.
    """

    def __init__(self) -> None:
        self._num_episodes = self._num_groups = self._num_trajectories = 0
        self._has_tokens = False
        self._causes: Counter[str] = Counter()
        self._rejections: Counter[str] = Counter()
        self._first_error: Exception | None = None
        self._rewards: set[float] = set()
        self._logged: set[str] = set()

    def count(self, group: GroupResult) -> None:
        """Count a group and its episodes."""
        self._num_groups += 1
        if group.rejected is not None:
            self._rejections[group.rejected] += 1
        for result in group.results:
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
            if self._num_episodes == _EARLY:
                self._log_episodes("the first")
        if self._num_groups == _EARLY:
            self._log_rejections("the first")

    def log(self, *, had_prompts: bool, group_size: int) -> None:
        """Log a line if the run gave nothing to train on, unless the same was logged early."""
        if not had_prompts:
            _logger.warning("the run was given no prompts: is their iterator used up?")
        elif self._log_episodes("all") or self._log_rejections("all"):
            return
        elif group_size > 1 and self._num_trajectories > 1 and len(self._rewards) == 1:
            _logger.warning(
                "all %d trajectories earned the same reward, %g: estimators that compare the "
                "trajectories of a group give them no advantage; see the environment's answers, or "
                "take easier or harder questions",
                self._num_trajectories,
                *self._rewards,
            )

    def _log_episodes(self, which: str) -> bool:
        """Log a line, once, if all episodes failed or none brought a token; return if so."""
        if not self._num_episodes:
            return False
        if self._causes.total() == self._num_episodes:
            if self._is_new("failures"):
                _logger.error(
                    "%s %d episodes failed, by cause: %s; the first: %s; see result.error of each, "
                    "and its __cause__",
                    one_line(which),
                    self._num_episodes,
                    one_line(_counted(self._causes)),
                    one_line(self._first_error),
                )
            return True
        if not self._has_tokens and self._is_new("emptiness"):
            _logger.warning(
                "%s %d episodes brought no generated token to train on (failed: %d; trajectories: "
                "%d); an agent returns trajectories whose turns hold the replies' output_ids as "
                "completion_ids",
                one_line(which),
                self._num_episodes,
                self._causes.total(),
                self._num_trajectories,
            )
        return not self._has_tokens

    def _log_rejections(self, which: str) -> bool:
        """Log a line, once, if all groups were rejected; return whether they were."""
        if not self._num_groups or self._rejections.total() < self._num_groups:
            return False
        # Where all groups failed, the line of failed episodes says so.
        if self._rejections.keys() != {"failed"} and self._is_new("rejections"):
            _logger.warning(
                "%s %d groups were rejected: %s; see group.rejected of each, and GroupPolicy",
                one_line(which),
                self._num_groups,
                one_line(_counted(self._rejections)),
            )
        return True

    def _is_new(self, kind: str) -> bool:
        """Return whether this kind of line was not logged before, and note that it is."""
        is_new = kind not in self._logged
        self._logged.add(kind)
        return is_new


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
