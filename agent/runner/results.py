"""Results of episodes and groups, and the progress of a run."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import GenerationOutput, Prompt, Reply
from trajpack.packing.types import Trajectory, Turn


@dataclass(frozen=True)
class EpisodeResult:
    """Result of one episode: its trajectories, or the error that ended it."""

    prompt: Prompt
    """Prompt as given to the runner."""
    trajectories: tuple[Trajectory, ...]
    """Trajectories that the agent returned; empty if the episode failed."""
    error: EpisodeError | None = None
    """Failure of the episode, with the original exception as its cause; None if it succeeded."""
    sample: int = 0
    """Index of this rollout among those of its prompt, from 0."""
    attempts: int = 1
    """Number of attempts; the result is that of the last one."""

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
    """Results of all samples of one prompt."""

    prompt: Prompt
    """Prompt as given to the runner."""
    results: tuple[EpisodeResult, ...]
    """One result for each episode that was begun, failed ones included, by sample."""
    rejected: str | None = None
    """Reason not to train on the group: ``failed`` if all episodes failed, ``incomplete`` if
    some did, ``filtered:`` and a filter's reason. ``None`` if it was accepted."""

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Trajectories of all episodes that have succeeded, by sample."""
        return tuple(one for result in self.results for one in result.trajectories)


@dataclass(frozen=True)
class Progress:
    """Counts of a run so far."""

    num_prompts: int = 0
    """Prompts taken."""
    num_started: int = 0
    """Episodes begun, ``group_size`` to a prompt; each counts once, whatever its attempts."""
    num_finished: int = 0
    """Episodes ended, the failed ones included."""
    num_failed: int = 0
    """Episodes that ended with an error."""
    num_turns: int = 0
    """Turns sampled, those of failed and of unfinished episodes included."""
    num_tokens: int = 0
    """Tokens sampled in these turns."""
    num_kept_turns: int = 0
    """Turns of the episodes that finished without an error."""
    num_rewarded_turns: int = 0
    """Kept turns with a reward above zero."""
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


class Counters:
    """Mutable counts of a run, by the names of the fields of `Progress`."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._reward_sum = 0.0
        self._began = time.monotonic()

    def add(self, name: str, number: int = 1) -> None:
        """Add a number to a count."""
        self._counts[name] += number

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def count_reply(self, reply: Reply) -> None:
        """Count a turn, unless the reply is an error."""
        if isinstance(reply, GenerationOutput):
            self._counts["num_turns"] += 1
            if hasattr(reply.output_ids, "__len__"):
                self._counts["num_tokens"] += len(reply.output_ids)

    def count_result(self, result: EpisodeResult, times: int = 1) -> None:
        """Count an episode that has ended; -1 ``times`` takes it back."""
        turns = result.turns
        self.add("num_finished", times)
        self.add("num_failed", times * (result.error is not None))
        self.add("num_kept_turns", times * len(turns))
        self.add("num_rewarded_turns", times * sum(turn.reward > 0 for turn in turns))
        self._reward_sum += times * sum(turn.reward for turn in turns)

    def progress(self) -> Progress:
        """Return the counts of this moment."""
        elapsed_s = time.monotonic() - self._began
        return Progress(**self._counts, reward_sum=self._reward_sum, elapsed_s=elapsed_s)
