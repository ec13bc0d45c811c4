"""What stands for an episode on its way, and the rules that all of them go by."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.attempt import Stage
from trajpack.agent.runner.groups import OpenGroup
from trajpack.agent.runner.policy import RolloutPolicy
from trajpack.agent.runner.results import EpisodeResult, Progress
from trajpack.agent.runner.staleness import StalenessGate
from trajpack.packing.types import Trajectory

Prompts: TypeAlias = Iterable[Prompt] | AsyncIterable[Prompt]
Outcome: TypeAlias = tuple[Trajectory, ...] | EpisodeError


@dataclass(eq=False)
class Ticket:
    """An episode that was begun and is not settled."""

    prompt: Prompt
    """As given to the runner."""
    sample: int
    """Which of the prompt's rollouts."""
    group: OpenGroup | None = None
    """Where its result goes, if groups are wanted."""
    attempts: int = 0
    """How often it was begun."""
    has_place: bool = False
    """Whether it is counted among the episodes that were begun and not taken."""
    has_slot: bool = False
    """Whether it may run."""

    @property
    def qid(self) -> str:
        """Name of the episode."""
        return f"{self.prompt.id}@{self.sample}"

    def result(self, outcome: Outcome) -> EpisodeResult:
        """Return the result for trajectories, or for an error."""
        attempts = max(self.attempts, 1)
        if isinstance(outcome, EpisodeError):
            return EpisodeResult(self.prompt, (), outcome, self.sample, attempts)
        return EpisodeResult(self.prompt, outcome, None, self.sample, attempts)


@dataclass(frozen=True, eq=False)
class Rules:
    """What the runs of a runner have in common."""

    stage: Stage
    """What episodes share."""
    policy: RolloutPolicy
    """How failures and old weights are dealt with."""
    concurrency: int
    """Attempts in flight at most."""
    group_size: int
    """Episodes of each prompt."""
    finished: Collection[str]
    """Episodes that need not begin."""
    staleness: StalenessGate | None
    """Says how many results may be under way."""
    on_progress: Callable[[Progress], None] | None
    """Called with each step forward."""

    def samples_of(self, prompt: Prompt, *, by_group: bool) -> list[int]:
        """Return which samples of a prompt to begin; of a group, all or none."""
        if not self.finished:
            return list(range(self.group_size))
        if not by_group:
            samples = range(self.group_size)
            return [k for k in samples if f"{prompt.id}@{k}" not in self.finished]
        most = self.group_size + self.policy.groups.max_refills
        num_finished = sum(f"{prompt.id}@{k}" in self.finished for k in range(most))
        return list(range(self.group_size)) if num_finished < self.group_size else []


async def one_by_one(prompts: Prompts) -> AsyncGenerator[Prompt, None]:
    """Yield the prompts of any kind of source, which is not closed if this is."""
    if isinstance(prompts, AsyncIterable):
        async for prompt in prompts:
            yield prompt
    else:
        for prompt in prompts:
            yield prompt
