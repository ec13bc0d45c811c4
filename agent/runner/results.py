"""What comes of episodes and of groups, and how far a run has come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import GenerationOutput, Prompt, Reply
from trajpack.packing.types import Trajectory, Turn


@dataclass(frozen=True)
class EpisodeResult:
    """What came of one episode: trajectories, or the error that ended it."""

    prompt: Prompt
    """The prompt as given to the runner."""
    trajectories: tuple[Trajectory, ...]
    """What the agent produced; empty if the episode failed."""
    error: EpisodeError | None = None
    """Why it failed, with the original exception as its cause; ``None`` if it did not."""
    sample: int = 0
    """Which of the prompt's rollouts this is, from 0."""
    attempts: int = 1
    """How often it was begun; this is the outcome of the last time."""

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
    """What came of all samples of one prompt."""

    prompt: Prompt
    """The prompt as given to the runner."""
    results: tuple[EpisodeResult, ...]
    """One for each episode that was begun, by sample; the failed ones are among them."""
    rejected: str | None = None
    """Why the group is not to be trained on: ``failed`` where no episode has succeeded,
    ``incomplete`` where some have not, or ``filtered:`` and what a filter said of it. ``None``
    if it was accepted."""

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Trajectories of all episodes that have succeeded, by sample."""
        return tuple(one for result in self.results for one in result.trajectories)


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    num_prompts: int = 0
    """Prompts taken so far."""
    num_started: int = 0
    """Episodes begun, ``group_size`` to a prompt; each counts once, however often it was tried."""
    num_finished: int = 0
    """Episodes ended, the failed ones included."""
    num_failed: int = 0
    """Episodes that ended with an error."""
    num_turns: int = 0
    """Turns sampled so far, those of failed and of unfinished episodes included."""
    num_tokens: int = 0
    """Tokens sampled in them."""
    num_kept_turns: int = 0
    """Turns of the episodes that finished without an error."""
    num_rewarded_turns: int = 0
    """Those among the kept ones with a reward above zero."""
    reward_sum: float = 0.0
    """Sum of the rewards of the kept turns, not discounted."""
    elapsed_s: float = 0.0
    """Seconds since the run began."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens sampled per second of the run.

        Example:
            >>> Progress(num_tokens=500, elapsed_s=2.0).tokens_per_s
            250.0
        """
        return self.num_tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass
class Tally:
    """The numbers behind `Progress`, while they change."""

    num_prompts: int = 0
    """As `Progress` has it, like all that follow."""
    num_started: int = 0
    """Episodes begun."""
    num_finished: int = 0
    """Episodes ended."""
    num_failed: int = 0
    """Those with an error."""
    num_turns: int = 0
    """Turns sampled."""
    num_tokens: int = 0
    """Tokens in them."""
    num_kept_turns: int = 0
    """Turns of episodes without an error."""
    num_rewarded_turns: int = 0
    """Those with a reward."""
    reward_sum: float = 0.0
    """Of the kept turns."""
    began: float = field(default_factory=time.monotonic)
    """When the run began, in seconds of the monotonic clock."""

    def count_reply(self, reply: Reply) -> None:
        """Count a turn, if it is one."""
        if isinstance(reply, GenerationOutput):
            self.num_turns += 1
            if isinstance(reply.output_ids, Sequence) or hasattr(reply.output_ids, "__len__"):
                self.num_tokens += len(reply.output_ids)

    def count_result(self, result: EpisodeResult, times: int = 1) -> None:
        """Count an episode that has ended; -1 ``times`` takes it back."""
        turns = result.turns
        self.num_finished += times
        self.num_failed += times * (result.error is not None)
        self.num_kept_turns += times * len(turns)
        self.num_rewarded_turns += times * sum(turn.reward > 0 for turn in turns)
        self.reward_sum += times * sum(turn.reward for turn in turns)

    def progress(self) -> Progress:
        """Return the numbers of this moment."""
        numbers = dict(vars(self))
        elapsed_s = time.monotonic() - numbers.pop("began")
        return Progress(**numbers, elapsed_s=elapsed_s)
