"""Rollout workers and trainer ranks together: what feeds them, and what outlives their deaths."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trajpack.agent.blocking_work import run_to_end
from trajpack.agent.protocols import Prompt
from trajpack.agent.ray.payload import TrajectoryArrays
from trajpack.agent.ray.rollouts.workers import RolloutWorkers
from trajpack.agent.ray.training.checkpoint import Checkpoints, SettledPrompts, TrainingState
from trajpack.agent.ray.training.groups import LearnableGroup, accepted, was_stopped
from trajpack.agent.ray.training.recovery import RecoveredTrainers
from trajpack.agent.ray.training.trainers import TrainerRanks
from trajpack.agent.runner.run import Prompts
from trajpack.agent.runner.runner import RolloutRunner
from trajpack.packing.trajectory_log.log import TrajectoryLog


@dataclass(frozen=True)
class TrainingSettings:
    """How steps are made of groups.

    Raises:
        ValueError: If a count is below 1.
    """

    groups_per_step: int
    """Groups that a step learns from."""
    checkpoint_every: int = 1
    """Steps between two checkpoints; as many batches are kept in the object store."""
    max_rebuilds: int = 3
    """How often in a row the trainer ranks are rebuilt for the same step; then the error that
    ended them is raised."""

    def __post_init__(self) -> None:
        for name in ("groups_per_step", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_rebuilds < 0:
            raise ValueError(f"max_rebuilds must be 0 or more, got {self.max_rebuilds}")


@dataclass(frozen=True)
class TrainingStep:
    """What one step of a training came to."""

    step: int
    """Which one, from 1; the version of the weights after it."""
    prompts: tuple[str, ...]
    """Ids of the prompts whose groups it learned from."""
    num_trajectories: int
    """In them."""
    mean_reward: float
    """Sum of the rewards of a trajectory, on average."""
    ranks: tuple[dict[str, float], ...]
    """What each trainer rank says of it."""
    num_rebuilds: int
    """How often the trainer ranks have been rebuilt so far, in this process."""
    seconds: float
    """From the whole batch to the published weights."""


class RayTraining:
    """Trains from groups as they are accepted, and comes back from the death of any process.

    Workers roll out while ranks learn; after each step all workers are sent the new weights,
    whose version is the number of the step. What is on disk is the last checkpoint: the
    trainer's state, and which prompts are settled: trained on, or rejected.

    - A worker dies: `RolloutWorkers` has its episodes run elsewhere, and replaces it.
    - A trainer rank dies: all ranks are made anew from the last checkpoint and take the steps
      since then once more, with the very batches, which the object store has kept. Nothing is
      rolled out again, and all numbers are what they would have been.
    - This process dies: a new training in the same folder goes on from the last checkpoint. With
      a log, groups accepted since then come back from it, in the order in which they were, and
      make the same batches; without one, their prompts are rolled out once more.

    Args:
        workers: Have not been entered; `run` does.
        trainers: The same.
        runner: Rolls groups out on the workers, see `RolloutWorkers.runner`.
        folder: Of the checkpoints.
        settings: How steps are made.
        log: Keeps what was accepted; a group is an episode of it, named by its prompt.
    """

    def __init__(
        self,
        workers: RolloutWorkers,
        trainers: TrainerRanks,
        runner: RolloutRunner,
        folder: Path,
        settings: TrainingSettings,
        log: TrajectoryLog | None = None,
    ) -> None:
        self._workers, self._runner = workers, runner
        self._trainers = RecoveredTrainers(trainers, settings.max_rebuilds)
        self._checkpoints = Checkpoints(folder)
        self._settings = settings
        self._log = log
        self._state = TrainingState()
        self._settled = SettledPrompts()

    async def run(self, prompts: Prompts) -> AsyncGenerator[TrainingStep, None]:
        """Train on all prompts that are not settled yet; yield a report after each step.

        The last step has the groups that are left, which may be fewer.

        Args:
            prompts: In the same order whenever a training goes on; their ids are unique.

        Raises:
            RankLostError: If the trainer ranks were lost too often in a row, or refuse a batch.
            EpisodeError: If no worker is left.
            RuntimeError: If another training has the folder.
            ValueError: If the last checkpoint is damaged, or of other prompts or another log.
        """
        async with AsyncExitStack() as stack:
            stack.enter_context(self._checkpoints.held())
            await self._begin(stack)
            groups = await stack.enter_async_context(aclosing(self._groups(prompts)))
            batch: list[LearnableGroup] = []
            while (group := await self._next(groups)) is not None:
                batch.append(group)
                if len(batch) == self._settings.groups_per_step:
                    yield await self._take_step(batch)
                    batch = []
            if batch:
                yield await self._take_step(batch)
            if self._trainers.num_since:
                await self._save()

    async def _begin(self, stack: AsyncExitStack) -> None:
        """Start the ranks from the last checkpoint, and the workers with the ranks' weights."""
        import ray

        found = await run_to_end(self._checkpoints.load)
        if found is not None:
            self._state, trainer = found
            state = self._state
            self._settled = SettledPrompts(state.num_settled, state.ahead, state.order)
            self._trainers.mark(ray.put(trainer))
            self._trainers.trainers.begin_with(self._trainers.saved)
        try:
            async with asyncio.TaskGroup() as starting:  # each takes seconds
                starting.create_task(stack.enter_async_context(self._trainers.trainers))
                starting.create_task(stack.enter_async_context(self._workers))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if self._state.num_steps:
            await self._publish()
            await self._workers.everywhere()

    async def _groups(self, prompts: Prompts) -> AsyncGenerator[LearnableGroup, None]:
        """Yield accepted groups that nobody has learned from: those of the log, then new ones."""
        known: frozenset[str] = frozenset()
        if self._log is not None:
            known = self._log.finished
            logged = await run_to_end(self._read_log)
            self._count_as_accepted(len(logged))
            for group in logged:
                yield group
        results = self._runner.run_groups(self._unsettled(prompts, known))
        async with aclosing(results):
            async for result in results:
                trajectories = accepted(result)
                if not trajectories:
                    if not was_stopped(result):
                        self._settled.add(result.prompt.id)
                    continue
                group = LearnableGroup(result.prompt.id, trajectories)
                if self._log is not None:
                    await run_to_end(partial(self._log.append, group.prompt, group.trajectories))
                yield group

    def _read_log(self) -> list[LearnableGroup]:
        """Return the groups that were accepted since the last checkpoint, in that order."""
        assert self._log is not None
        num_learned = self._state.num_groups
        logged = [
            LearnableGroup(episode.episode, episode.trajectories)
            for number, episode in enumerate(self._log.replay())
            if number >= num_learned
        ]
        if len(self._log) < num_learned:
            raise ValueError(
                f"the checkpoint has learned from {num_learned} groups, but the log has "
                f"{len(self._log)}: it is not the log of this training"
            )
        return logged

    def _count_as_accepted(self, num_groups: int) -> None:
        """Let groups of the log take the place that new ones have for their age."""
        if (gate := self._runner.staleness) is not None:
            for _ in range(num_groups):
                gate.begin(self._workers.version)
                gate.accept()

    async def _unsettled(
        self, prompts: Prompts, known: frozenset[str]
    ) -> AsyncGenerator[Prompt, None]:
        """Yield the prompts that need a rollout."""
        async for prompt in self._settled.left_of(prompts):
            if prompt.id not in known:
                yield prompt

    async def _next(self, groups: AsyncGenerator[LearnableGroup, None]) -> LearnableGroup | None:
        """Wait for the next group, and mend the trainer ranks should they break meanwhile."""
        following = asyncio.ensure_future(anext(groups, None))
        try:
            while not following.done():
                events: set[asyncio.Future[Any]] = {following, self._trainers.trainers.lost}
                await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
                if self._trainers.trainers.lost.done():
                    await self._trainers.ask(self._trainers.trainers.check)
            return following.result()
        finally:
            following.cancel()
            await asyncio.wait({following})

    async def _take_step(self, groups: Sequence[LearnableGroup]) -> TrainingStep:
        import ray

        began = time.monotonic()
        paths = [path for group in groups for path in group.trajectories]
        batch = await run_to_end(lambda: ray.put(TrajectoryArrays.of(paths)))
        ranks = await self._trainers.step(batch)
        for group in groups:
            self._settled.add(group.prompt)
        self._state = TrainingState(
            self._state.num_steps + 1,
            self._state.num_groups + len(groups),
            self._settled.num_settled,
            tuple(self._settled.ahead),
            self._settled.order,
        )
        await self._publish()
        if self._trainers.num_since >= self._settings.checkpoint_every:
            await self._save()
        return TrainingStep(
            step=self._state.num_steps,
            prompts=tuple(group.prompt for group in groups),
            num_trajectories=len(paths),
            mean_reward=sum(turn.reward for path in paths for turn in path.turns) / len(paths),
            ranks=tuple(ranks),
            num_rebuilds=self._trainers.num_rebuilds,
            seconds=time.monotonic() - began,
        )

    async def _publish(self) -> None:
        weights = await self._trainers.ask(
            lambda: self._trainers.trainers.weights(self._state.num_steps)
        )
        await self._workers.publish(weights)

    async def _save(self) -> None:
        """Write a checkpoint; what it counts as settled is durable in the log before."""
        trainer = await self._trainers.ask(self._trainers.trainers.state)
        await run_to_end(lambda: self._write(self._state, trainer))

    def _write(self, state: TrainingState, trainer: Any) -> None:
        import ray

        if self._log is not None:
            self._log.flush()
        self._checkpoints.save(state, trainer)
        self._trainers.mark(ray.put(trainer))
