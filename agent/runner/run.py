"""One run of a runner: takes prompts, starts and retries episodes, hands over results."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Collection,
    Iterable,
)
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from trajpack.agent.blocking_work import cancel_and_wait
from trajpack.agent.errors import (
    EpisodeCancelledError,
    EpisodeError,
    StaleEpisodeError,
    has_engine_ended,
)
from trajpack.agent.protocols import Prompt, Reply
from trajpack.agent.runner.attempt import attempt_episode, shield_from_agent_cancel
from trajpack.agent.runner.bridge import RunnerContext
from trajpack.agent.runner.gates import StalenessGate, staleness_error
from trajpack.agent.runner.policy import GroupPolicy, RolloutPolicy
from trajpack.agent.runner.results import Counters, EpisodeResult, GroupResult, Progress
from trajpack.agent.seeding import derive_seed
from trajpack.packing.types import Trajectory

if TYPE_CHECKING:
    from anyio import CancelScope
    from anyio.abc import TaskGroup

Prompts: TypeAlias = Iterable[Prompt] | AsyncIterable[Prompt]

_VERSION_INTERVAL_S = 0.05
"""Seconds between looks at the engine's version, while episodes wait for newer weights."""
_STARTED_AT_ONCE = 8
"""Episodes that start before the event loop runs other tasks."""


@dataclass(frozen=True, eq=False)
class RunConfig:
    """Configuration that all runs of a runner share."""

    context: RunnerContext
    """Engine, agent, environment and observers."""
    policy: RolloutPolicy
    """Retries, staleness, groups and the seed."""
    concurrency: int
    """Attempts in flight at most."""
    group_size: int
    """Episodes of each prompt."""
    finished: Collection[str]
    """Names of episodes that are not started."""
    staleness: StalenessGate | None
    """Limit on the results under way."""
    on_progress: Callable[[Progress], None] | None
    """Called with the counts of a run when they change."""


@dataclass(eq=False)
class OpenGroup:
    """Samples of one prompt, some of which are under way."""

    prompt: Prompt
    """Prompt as given to the runner."""
    size: int
    """Number of episodes that must succeed."""
    num_expected: int
    """Number of episodes that were started or are about to be."""
    ended: dict[EpisodeState, EpisodeResult] = field(default_factory=dict)
    """Results of the episodes that have ended."""

    @property
    def is_complete(self) -> bool:
        """Whether no episode is under way."""
        return len(self.ended) >= self.num_expected

    def refill(self, policy: GroupPolicy) -> range:
        """Return the samples to start in place of failed ones; none if that is too many."""
        begin = self.num_expected
        missing = self.size - sum(result.error is None for result in self.ended.values())
        if policy.incomplete != "refill" or begin + missing > self.size + policy.max_refills:
            missing = 0
        self.num_expected += missing
        return range(begin, begin + missing)

    def judge(self, policy: GroupPolicy) -> GroupResult:
        """Return the result of the group, once no episode is under way."""
        ordered = sorted(self.ended.values(), key=lambda result: result.sample)
        good = [result for result in ordered if result.error is None]
        rejected: str | None = None
        if not good:
            rejected = "failed"
        elif len(good) < self.size and policy.incomplete != "keep":
            rejected = "incomplete"
        else:
            reasons = (reason_for(good) for reason_for in policy.filters)
            reason = next((reason for reason in reasons if reason is not None), None)
            rejected = None if reason is None else f"filtered: {reason}"
        return GroupResult(self.prompt, tuple(ordered), rejected)


@dataclass(eq=False)
class EpisodeState:
    """One sample of a prompt that has started and whose result was not handed over yet.

    It holds a slot during an attempt, and a place in the run's room from its start until its
    result is taken.
    """

    prompt: Prompt
    """Prompt as given to the runner."""
    sample: int
    """Index among the samples of the prompt."""
    group: OpenGroup | None = None
    """Group that its result belongs to, if results are grouped."""
    attempts: int = 0
    """Number of attempts so far."""
    has_place: bool = False
    """Whether the episode counts towards the limit of unfinished episodes."""
    has_slot: bool = False
    """Whether the episode holds a slot of the running attempts."""

    @property
    def qid(self) -> str:
        """Name of the episode."""
        return f"{self.prompt.id}@{self.sample}"

    def result(self, outcome: tuple[Trajectory, ...] | EpisodeError) -> EpisodeResult:
        """Return the result for trajectories, or for an error."""
        error = outcome if isinstance(outcome, EpisodeError) else None
        trajectories = () if isinstance(outcome, EpisodeError) else outcome
        attempts = max(self.attempts, 1)
        return EpisodeResult(self.prompt, trajectories, error, self.sample, attempts)


class Run:
    """One call of `RolloutRunner.run` or `RolloutRunner.run_groups`."""

    def __init__(self, config: RunConfig, prompts: Prompts, *, by_group: bool) -> None:
        self._config = config
        self._prompts = prompts
        self._by_group = by_group
        # A place in the room is kept until the result is taken, so that failed episodes that wait
        # for their retry, and results that are not taken, stop new episodes.
        self._slots = asyncio.Semaphore(config.concurrency)
        self._room = asyncio.Semaphore(2 * config.concurrency)
        # None wakes the reader, for progress or at the end.
        self._events: asyncio.Queue[tuple[EpisodeState, EpisodeResult] | OpenGroup | None]
        self._events = asyncio.Queue()
        self._changed = asyncio.Event()
        self._counters = Counters()
        self._has_replied = False
        self._tasks: TaskGroup | None = None
        self._taking: CancelScope | None = None
        self._scopes: dict[EpisodeState, CancelScope] = {}
        self._num_waits = 0
        self._num_units = 0  # units of staleness under way: episodes, or groups
        self.is_stopping = False
        """Whether no more episodes start."""
        self.is_cancelling = False
        """Whether those in flight were cancelled."""

    @property
    def num_prompts(self) -> int:
        """Prompts taken so far."""
        return self._counters["num_prompts"]

    def stop(self, *, drain: bool) -> None:
        """Start no more episodes; cancel those in flight, unless they are to ``drain``."""
        self.is_stopping = True
        if self._taking is not None:
            self._taking.cancel()
        if not drain:
            self.is_cancelling = True
            for scope in list(self._scopes.values()):
                scope.cancel()

    def wake(self) -> None:
        """Check again whether an episode may start."""
        self._changed.set()

    async def episodes(self) -> AsyncGenerator[EpisodeResult, None]:
        """Yield the result of each episode as it ends."""
        async with aclosing(self._ended()) as events:
            async for event in events:
                assert isinstance(event, tuple)
                _, result = event
                self._settle(accepted=result.error is None)
                yield result

    async def groups(self) -> AsyncGenerator[GroupResult, None]:
        """Yield the result of each group as its last episode ends."""
        async with aclosing(self._ended()) as events:
            async for event in events:
                if isinstance(event, tuple):
                    state, result = event
                    assert state.group is not None
                    group = state.group
                    group.ended[state] = result
                else:
                    group = event
                if not group.is_complete or self._goes_on(group):
                    continue
                judged = group.judge(self._config.policy.groups)
                self._settle(accepted=judged.rejected is None)
                yield judged

    async def _ended(
        self,
    ) -> AsyncGenerator[tuple[EpisodeState, EpisodeResult] | OpenGroup, None]:
        """Yield each episode with its result as it ends, and each group that was cut short."""
        # The task group lives in its own task: its scope must not span a yield.
        driver = asyncio.create_task(self._drive())
        driver.add_done_callback(lambda _: self._events.put_nowait(None))
        try:
            while not (driver.done() and self._events.empty()):
                event = await self._events.get()
                if isinstance(event, tuple):
                    state, result = event
                    self._leave_place(state)
                    if result.error is not None or not self._retry_stale(state, result):
                        result = self._checked_age(state, result)
                        self._counters.count_result(result)
                        self._show_progress()
                        yield state, result
                elif event is not None:
                    yield event
                elif self._has_replied:
                    self._has_replied = False
                    self._show_progress()
            await driver
        finally:
            await cancel_and_wait(driver)
            if self._config.staleness is not None:
                self._config.staleness.give_back(self._num_units)

    def _goes_on(self, group: OpenGroup) -> bool:
        """Retry stale episodes, and start others in place of failed ones."""
        for state, result in list(group.ended.items()):
            if self._staleness_error(result) is None:
                continue
            del group.ended[state]
            self._counters.count_result(result, -1)
            if not self._retry_stale(state, result):
                group.ended[state] = self._checked_age(state, result)
                self._counters.count_result(group.ended[state])
        if group.is_complete and not self.is_stopping:
            for sample in group.refill(self._config.policy.groups):
                self._start(EpisodeState(group.prompt, sample, group))
        return not group.is_complete

    def _settle(self, *, accepted: bool) -> None:
        """Count an episode, or a group, as handed over."""
        self._num_units -= 1
        if (gate := self._config.staleness) is not None:
            gate.accept() if accepted else gate.give_back()
        self.wake()

    def _staleness_error(self, result: EpisodeResult) -> StaleEpisodeError | None:
        version = self._config.context.engine.version
        return staleness_error(result, self._config.policy.staleness, version)

    def _retry_stale(self, state: EpisodeState, result: EpisodeResult) -> bool:
        """Start an episode again whose result is stale, if the policy allows it."""
        error = self._staleness_error(result)
        if error is None or not self._may_retry(state, error):
            return False
        self._tell_end(state, error, final=False)
        self._start(state)
        return True

    def _checked_age(self, state: EpisodeState, result: EpisodeResult) -> EpisodeResult:
        """Return the result, or a failed one if it is stale."""
        error = self._staleness_error(result)
        if error is None:
            return result
        self._tell_end(state, error, final=True)
        return replace(result, trajectories=(), error=error)

    async def _drive(self) -> None:
        from anyio import CancelScope, create_task_group

        try:
            async with create_task_group() as self._tasks:
                with CancelScope() as self._taking:
                    if not self.is_stopping:
                        await self._take_prompts()
                while self._num_units:
                    self._changed.clear()
                    await self._changed.wait()
            if self._tasks.cancel_scope.cancel_called:
                raise RuntimeError("an episode's task was cancelled before it began")
        except BaseExceptionGroup as errors:
            self.is_stopping = True
            # Episodes raise nothing, so this comes from the iterator of prompts.
            raise errors.exceptions[0] from None

    async def _take_prompts(self) -> None:
        prompts = one_by_one(self._prompts)
        while True:
            await self._wait_for_turn(is_unit=True)
            try:
                with self._config.context.watchdog.wanting_prompt():
                    prompt = await anext(prompts)
            except StopAsyncIteration:
                return
            if not isinstance(prompt, Prompt):
                raise TypeError(f"prompts must be Prompts, got {type(prompt).__name__}")
            self._counters.add("num_prompts")
            await self._start_samples(prompt)

    async def _start_samples(self, prompt: Prompt) -> None:
        samples = self._samples_of(prompt)
        group = OpenGroup(prompt, len(samples), len(samples)) if self._by_group else None
        num_started = 0
        try:
            for sample in samples:
                if num_started:
                    await self._wait_for_turn(is_unit=group is None)
                state = EpisodeState(prompt, sample, group)
                try:
                    await self._take_place(state)
                    await self._take_slot(state)
                finally:
                    if self.is_stopping:
                        self._leave_slot(state)
                        self._leave_place(state)
                if self.is_stopping:
                    return
                if not num_started or group is None:
                    self._num_units += 1
                    if self._config.staleness is not None:
                        self._config.staleness.begin(self._config.context.engine.version)
                num_started += 1
                self._start(state)
        finally:
            if group is not None and 0 < num_started < len(samples):
                group.num_expected = num_started
                if group.is_complete:  # otherwise the last of its results will complete it
                    self._events.put_nowait(group)

    def _samples_of(self, prompt: Prompt) -> range | list[int]:
        """Return the samples of a prompt to start; of a group, all or none."""
        config, samples = self._config, range(self._config.group_size)
        if not config.finished:
            return samples
        if not self._by_group:
            return [k for k in samples if f"{prompt.id}@{k}" not in config.finished]
        most = config.group_size + config.policy.groups.max_refills
        num_finished = sum(f"{prompt.id}@{k}" in config.finished for k in range(most))
        return samples if num_finished < config.group_size else []

    async def _wait_for_turn(self, *, is_unit: bool) -> None:
        """Wait until an episode may start, without taking what episodes under way may need."""
        context = self._config.context
        async with context.observers.waiting("room"), self._room:
            pass
        if is_unit and (gate := self._config.staleness) is not None:
            from anyio import move_on_after

            async with context.observers.waiting("staleness"):
                try:
                    while gate.capacity(version := context.engine.version) < 1:
                        self._changed.clear()
                        context.watchdog.want_weights(None if self._num_units else version)
                        with move_on_after(_VERSION_INTERVAL_S):
                            await self._changed.wait()
                finally:
                    context.watchdog.want_weights(None)
        async with context.observers.waiting("slot"), self._slots:
            pass
        self._num_waits += 1
        if self._num_waits % _STARTED_AT_ONCE == 0:
            await asyncio.sleep(0)

    async def _take_place(self, state: EpisodeState) -> None:
        if not state.has_place:
            await self._room.acquire()
            state.has_place = True

    async def _take_slot(self, state: EpisodeState) -> None:
        if not state.has_slot:
            await self._slots.acquire()
            state.has_slot = True

    def _leave_place(self, state: EpisodeState) -> None:
        if state.has_place:
            state.has_place = False
            self._room.release()

    def _leave_slot(self, state: EpisodeState) -> None:
        if state.has_slot:
            state.has_slot = False
            self._slots.release()

    def _start(self, state: EpisodeState) -> None:
        """Start an episode, as soon as there are a place and a slot for it."""
        assert self._tasks is not None
        self._counters.add("num_started", state.attempts == 0)
        self._tasks.start_soon(self._run_episode, state)

    async def _run_episode(self, state: EpisodeState) -> None:
        from anyio import CancelScope

        outcome: tuple[Trajectory, ...] | EpisodeError
        outcome = EpisodeCancelledError(state.qid, "it was stopped")
        with shield_from_agent_cancel(), CancelScope() as scope:
            self._scopes[state] = scope
            if self.is_cancelling:
                scope.cancel()
            try:
                outcome = await self._try(state)
            except asyncio.CancelledError:
                if state.attempts:
                    self._tell_end(state, outcome, final=True)
                raise
            finally:
                del self._scopes[state]
        self._events.put_nowait((state, state.result(outcome)))
        self._leave_slot(state)  # afterwards, so that the reader runs before the next prompt

    async def _try(self, state: EpisodeState) -> tuple[Trajectory, ...] | EpisodeError:
        """Attempt an episode until it succeeds, or must not be retried."""
        policy, context = self._config.policy, self._config.context
        await self._take_place(state)
        seed = policy.seed if state.prompt.seed is None else state.prompt.seed
        prompt = replace(state.prompt, id=state.qid, seed=derive_seed(seed, state.qid))
        count_reply = None if self._config.on_progress is None else self._count_reply
        while True:
            await self._take_slot(state)
            state.attempts += 1
            context.observers.tell("episode_started", state.qid, state.attempts - 1)
            try:
                with shield_from_agent_cancel(state.qid):
                    found = await attempt_episode(
                        context, prompt, state.prompt.id, count_reply=count_reply
                    )
            except EpisodeError as error:
                if has_engine_ended(error):
                    self.stop(drain=True)
                is_final = not self._may_retry(state, error)
                self._tell_end(state, error, final=is_final)
                if is_final:
                    return error
            else:
                self._tell_end(state, None, final=True)
                return found
            self._leave_slot(state)
            await asyncio.sleep(policy.retries.wait.seconds(state.qid, state.attempts))

    def _may_retry(self, state: EpisodeState, error: EpisodeError) -> bool:
        allows = self._config.policy.retries.allows
        return not self.is_stopping and allows(error.cause, state.attempts)

    def _tell_end(self, state: EpisodeState, error: object, *, final: bool) -> None:
        tell = self._config.context.observers.tell
        tell("episode_ended", state.qid, state.attempts - 1, error, final=final)

    def _count_reply(self, reply: Reply) -> None:
        self._counters.count_reply(reply)
        if not self._has_replied:
            self._has_replied = True
            self._events.put_nowait(None)

    def _show_progress(self) -> None:
        if self._config.on_progress is not None:
            self._config.on_progress(self._counters.progress())


async def one_by_one(prompts: Prompts) -> AsyncGenerator[Prompt, None]:
    """Yield prompts of either kind of source, which is not closed with this generator."""
    if isinstance(prompts, AsyncIterable):
        async for prompt in prompts:
            yield prompt
    else:
        for prompt in prompts:
            yield prompt
