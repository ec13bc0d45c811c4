"""Many episodes at once, on one engine, with results as they finish."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TypeAlias

from trajpack.agent.counted_replies import CountedReplies
from trajpack.agent.errors import EngineEndedError, EpisodeError
from trajpack.agent.protocols import Agent, Engine, Environment, GenerationOutput, Prompt, Reply
from trajpack.packing.types import Trajectory

Prompts: TypeAlias = Iterable[Prompt] | AsyncIterable[Prompt]


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

    @property
    def qid(self) -> str:
        """Name of the episode: ``prompt.id``, an at sign and the sample.

        Example:
            >>> EpisodeResult(Prompt("gsm8k-7", [1]), (), sample=2).qid
            'gsm8k-7@2'
        """
        return f"{self.prompt.id}@{self.sample}"


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    num_prompts: int = 0
    """Prompts taken so far."""
    num_started: int = 0
    """Episodes begun, ``group_size`` to a prompt."""
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


class _Mark(Enum):
    REPLIED = auto()
    ENDED = auto()


@dataclass
class _Run:
    """The moving parts of one call to `RolloutRunner.run`."""

    slots: asyncio.Semaphore
    waiting: asyncio.Semaphore
    """Bounds the results that wait in ``events``."""
    events: asyncio.Queue[EpisodeResult | _Mark] = field(default_factory=asyncio.Queue)
    progress: Progress = field(default_factory=Progress)
    began: float = field(default_factory=time.monotonic)
    has_replied: bool = False
    """Whether a mark that there were replies waits in ``events``."""
    is_engine_ended: bool = False

    def add(self, **numbers: float) -> None:
        sums = {name: getattr(self.progress, name) + number for name, number in numbers.items()}
        elapsed_s = time.monotonic() - self.began
        self.progress = replace(self.progress, **sums, elapsed_s=elapsed_s)

    def count_reply(self, reply: Reply) -> None:
        if not isinstance(reply, GenerationOutput):
            return
        self.add(num_turns=1, num_tokens=len(reply.output_ids))
        if not self.has_replied:
            self.has_replied = True
            self.events.put_nowait(_Mark.REPLIED)

    def count_result(self, result: EpisodeResult) -> None:
        turns = [turn for trajectory in result.trajectories for turn in trajectory.turns]
        self.add(
            num_finished=1,
            num_failed=int(result.error is not None),
            num_kept_turns=len(turns),
            num_rewarded_turns=sum(turn.reward > 0 for turn in turns),
            reward_sum=sum(turn.reward for turn in turns),
        )


class RolloutRunner:
    """Rolls prompts out: one agent and one environment, any number of episodes at once.

    Sample ``k`` of the prompt ``q`` is the episode ``q@k``. Its trajectories get the group
    ``q``, unless the agent gave them one, so that samples of a prompt can be compared.

    Args:
        engine: Has been entered by the caller, and is not closed here.
        agent: Collects the trajectories.
        environment: Shared by all episodes.
        concurrency: Episodes in flight at most. As many finished ones again may wait to
            be taken; then no new ones begin.
        group_size: Episodes for each prompt.
        on_progress: Called while results are waited for, after replies of the engine and
            before each result is handed over. What it raises ends the run.

    Raises:
        ValueError: If ``concurrency`` or ``group_size`` is below 1.
    """

    def __init__(
        self,
        engine: Engine,
        agent: Agent,
        environment: Environment,
        *,
        concurrency: int = 64,
        group_size: int = 1,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        for name, value in (("concurrency", concurrency), ("group_size", group_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self._engine = engine
        self._agent = agent
        self._environment = environment
        self._concurrency = concurrency
        self._group_size = group_size
        self._on_progress = on_progress

    async def run(self, prompts: Prompts) -> AsyncGenerator[EpisodeResult, None]:
        """Yield a result for each episode, in the order in which they finish.

        Prompts are taken one by one, as episodes end. An exception in an episode, from
        the agent or the environment, is its result's ``error``. Leaving the loop early,
        closing the generator or cancelling the task that iterates cancels every episode
        in flight and closes it in the engine; close the generator with
        `contextlib.aclosing` where that must have happened before the next statement.

        Once an episode has failed because the engine ended, no new ones begin; those in
        flight still give their results.

        Raises:
            Exception: What iterating ``prompts`` or ``on_progress`` raised; episodes in
                flight are cancelled.
        """
        run = _Run(asyncio.Semaphore(self._concurrency), asyncio.Semaphore(self._concurrency))
        # The task group lives in a task of its own: its scope must not span a yield.
        episodes = asyncio.create_task(self._run_episodes(prompts, run))
        episodes.add_done_callback(lambda _: run.events.put_nowait(_Mark.ENDED))
        try:
            while (event := await run.events.get()) is not _Mark.ENDED:
                if isinstance(event, EpisodeResult):
                    run.waiting.release()
                    run.count_result(event)
                else:
                    run.has_replied = False
                if self._on_progress is not None:
                    self._on_progress(run.progress)
                if isinstance(event, EpisodeResult):
                    yield event
            await episodes
        finally:
            episodes.cancel()
            await asyncio.wait({episodes})

    async def _run_episodes(self, prompts: Prompts, run: _Run) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                async for prompt, sample in self._samples(prompts, run):
                    group.create_task(self._run_episode(prompt, sample, run))
        except ExceptionGroup as errors:
            # Episodes raise nothing, so this is what iterating the prompts raised.
            raise errors.exceptions[0] from None

    async def _samples(self, prompts: Prompts, run: _Run) -> AsyncIterator[tuple[Prompt, int]]:
        """Yield what to roll out next, together with a slot for it."""
        await run.slots.acquire()
        async for prompt in _one_by_one(prompts):
            run.add(num_prompts=1)
            for sample in range(self._group_size):
                yield prompt, sample
                await run.slots.acquire()
                if run.is_engine_ended:
                    return

    async def _run_episode(self, prompt: Prompt, sample: int, run: _Run) -> None:
        run.add(num_started=1)
        result = EpisodeResult(prompt, (), sample=sample)
        try:
            trajectories = await self._collect(prompt, result.qid, run)
            result = replace(result, trajectories=trajectories)
        except EpisodeError as error:
            result = replace(result, error=error)
            run.is_engine_ended |= has_engine_ended(error)
        await run.waiting.acquire()
        run.events.put_nowait(result)
        run.slots.release()

    async def _collect(self, prompt: Prompt, qid: str, run: _Run) -> tuple[Trajectory, ...]:
        task = asyncio.current_task()
        try:
            replies = CountedReplies(self._engine.open_episode(qid), run.count_reply)
            try:
                trajectories = await self._agent.collect_trajectory(
                    replace(prompt, id=qid), self._environment, self._engine.obs_queue, replies
                )
            finally:
                self._engine.close_episode(qid)
            return tuple(
                replace(trajectory, group=prompt.id) if trajectory.group is None else trajectory
                for trajectory in trajectories
            )
        except asyncio.CancelledError as error:
            if task is None or task.cancelling():
                raise
            raise EpisodeError(qid, "something the agent awaited was cancelled") from error
        except Exception as error:  # of any kind: it must not end the other episodes
            if isinstance(error, EpisodeError) and error.qid == qid:
                raise
            raise EpisodeError(qid, f"{type(error).__name__}: {error}") from error


def has_engine_ended(error: BaseException | None) -> bool:
    """Return whether an episode failed because its engine gives no more replies.

    Example:
        >>> has_engine_ended(EngineEndedError("q0@0", "shut down"))
        True
    """
    while error is not None and not isinstance(error, EngineEndedError):
        error = error.__cause__
    return error is not None


async def _one_by_one(prompts: Prompts) -> AsyncIterator[Prompt]:
    if isinstance(prompts, AsyncIterable):
        async for prompt in prompts:
            yield prompt
    else:
        for prompt in prompts:
            yield prompt
