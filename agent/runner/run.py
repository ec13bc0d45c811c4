"""One run of a runner: takes prompts, starts and retries episodes, hands over results."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from trajpack.agent.blocking_work import cancel_and_wait
from trajpack.agent.errors import EpisodeCancelledError, EpisodeError, has_engine_ended
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.episode import WEIGHTS, RunnerContext, attempt_episode, labelled
from trajpack.agent.runner.policy import GroupPolicy, staleness_error
from trajpack.agent.runner.results import Counters, EpisodeResult, GroupResult, RunOutcome
from trajpack.agent.seeding import derive_seed
from trajpack.packing.types import Trajectory, Turn

if TYPE_CHECKING:
    from anyio import CancelScope
    from anyio.abc import TaskGroup

Prompts: TypeAlias = Iterable[Prompt] | AsyncIterable[Prompt]

_VERSION_INTERVAL_S = 0.05
"""Seconds between looks at the engine's version, while episodes wait for newer weights."""
_END = object()
"""In place of a prompt, where there is no further one."""
_STARTED_AT_ONCE = 8
"""Episodes that start before the event loop runs other tasks."""


@dataclass(eq=False)
class OpenGroup:
    """Samples of one prompt that are handed over together, some of which are under way."""

    prompt: Prompt
    """Prompt as given to the runner."""
    first: int
    """Sample that it begins with: a prompt that comes again goes on counting."""
    label: str
    """Group of its trajectories."""
    size: int
    """Number of episodes that must succeed."""
    num_expected: int
    """Number of episodes that were started or are about to be."""
    num_started: int = 0
    """Number of episodes that were started, without refills."""
    ended: dict[EpisodeState, EpisodeResult] = field(default_factory=dict)
    """Results of the episodes that have ended."""

    @property
    def is_complete(self) -> bool:
        """Whether no episode is under way."""
        return len(self.ended) >= self.num_expected

    def refill(self, policy: GroupPolicy) -> range:
        """Return the samples to start in place of failed ones; none if that is too many."""
        begin = self.first + self.num_expected
        missing = self.size - sum(result.error is None for result in self.ended.values())
        num_refills = self.num_expected + missing - self.size
        if policy.incomplete != "refill" or num_refills > policy.max_refills:
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
    """One sample of a prompt that has started and whose result was not handed over yet."""

    group: OpenGroup
    """Group that its result belongs to."""
    sample: int
    """Index among the samples of the prompt."""
    attempts: int = 0
    """Number of attempts so far."""
    held: set[asyncio.Semaphore] = field(default_factory=set)
    """Semaphores that it holds: the slots during an attempt, and the room from its start until
    its result is taken."""

    @property
    def qid(self) -> str:
        """Name of the episode."""
        return f"{self.group.prompt.id}@{self.sample}"

    async def acquire(self, semaphore: asyncio.Semaphore) -> None:
        """Acquire a semaphore, unless the episode holds it."""
        if semaphore not in self.held:
            await semaphore.acquire()
            self.held.add(semaphore)

    def release(self, semaphore: asyncio.Semaphore) -> None:
        """Release a semaphore, if the episode holds it."""
        if semaphore in self.held:
            self.held.remove(semaphore)
            semaphore.release()


class Run:
    """One call of `RolloutRunner.run` or `RolloutRunner.run_groups`.

    A run by episodes has one group for each sample.
    """

    def __init__(self, context: RunnerContext, prompts: Prompts, *, by_group: bool) -> None:
        self._context = context
        self._prompts = prompts
        self._by_group = by_group
        # The room is left when the result is taken, so that failed episodes that wait for their
        # retry, and results that are not taken, stop new episodes.
        self._slots = asyncio.Semaphore(context.concurrency)
        self._room = asyncio.Semaphore(2 * context.concurrency)
        # None wakes the reader, for progress or at the end; a group without an episode is one that
        # was cut short after its last episode had ended.
        self._events: asyncio.Queue[
            tuple[OpenGroup, EpisodeState | None, EpisodeResult | None] | None
        ]
        self._events = asyncio.Queue()
        self._changed = asyncio.Event()
        self._counters = Counters()
        self._outcome = RunOutcome()
        self._has_replied = False
        self._tasks: TaskGroup | None = None
        self._taking: CancelScope | None = None
        self._scopes: dict[EpisodeState, CancelScope] = {}
        self._num_occurrences: Counter[str] = Counter()
        self._num_waits = 0
        self._num_groups = 0  # under way
        self._is_stopping = False
        self._is_cancelling = False

    def stop(self, *, drain: bool) -> None:
        """Start no more episodes; cancel those in flight, unless they are to ``drain``."""
        self._is_stopping = True
        if self._taking is not None:
            self._taking.cancel()
        if not drain:
            self._is_cancelling = True
            for scope in list(self._scopes.values()):
                scope.cancel()

    def wake(self) -> None:
        """Check again whether an episode may start."""
        self._changed.set()

    async def results(self) -> AsyncGenerator[GroupResult, None]:
        """Yield the result of each group as its last episode ends."""
        # The task group lives in its own task: its scope must not span a yield.
        driver = asyncio.create_task(self._drive())
        driver.add_done_callback(lambda _: self._events.put_nowait(None))
        policy = self._context.policy.groups
        try:
            while not (driver.done() and self._events.empty()):
                event = await self._events.get()
                if event is None:
                    if self._has_replied:
                        self._has_replied = False
                        self._show_progress()
                    continue
                group, state, result = event
                if state is not None and result is not None:
                    state.release(self._room)
                    group.ended[state] = result
                    self._counters.count_result(result)
                    self._refuse_stale(group)
                    self._show_progress()
                if group.is_complete and not self._is_stopping:
                    for sample in group.refill(policy):
                        self._start(EpisodeState(group, sample))
                if group.is_complete:
                    judged = group.judge(policy)
                    self._hand_over(judged)
                    yield judged
            await driver
        finally:
            await cancel_and_wait(driver)
            if self._context.staleness is not None:
                self._context.staleness.give_back(self._num_groups)
        if not self._is_cancelling:
            self._outcome.log()

    def _refuse_stale(self, group: OpenGroup) -> None:
        """Retry the episodes of a group whose results are stale now, or make them failures."""
        context = self._context
        for state, result in list(group.ended.items()):
            error = staleness_error(result, context.policy.staleness, context.engine.version)
            if error is None:
                continue
            is_final = not self._may_retry(state, error)
            self._tell_end(state, error, final=is_final)
            self._counters.count_result(result, -1)
            if is_final:
                group.ended[state] = replace(result, trajectories=(), error=error)
                self._counters.count_result(group.ended[state])
            else:
                del group.ended[state]
                self._start(state)

    def _hand_over(self, judged: GroupResult) -> None:
        """Count a group as handed over, and tell observers."""
        self._num_groups -= 1
        if (gate := self._context.staleness) is not None:
            gate.accept() if judged.rejected is None else gate.give_back()
        self.wake()
        self._outcome.count(judged)
        tell, version = self._context.observers.tell, self._context.engine.version
        for result in judged.results:
            if judged.rejected is None and result.error is None:
                tell("result_accepted", result, version)
        if self._by_group:
            tell("group_ended", judged.prompt.id, judged.results, judged.rejected)

    async def _drive(self) -> None:
        from anyio import CancelScope, create_task_group

        try:
            async with create_task_group() as self._tasks:
                with CancelScope() as self._taking:
                    if not self._is_stopping:
                        await self._take_prompts()
                while self._num_groups:
                    self._changed.clear()
                    await self._changed.wait()
            if self._tasks.cancel_scope.cancel_called:
                raise RuntimeError("an episode's task was cancelled before it began")
        except BaseExceptionGroup as errors:
            self._is_stopping = True
            # Episodes raise nothing, so this comes from the iterator of prompts.
            raise errors.exceptions[0] from None

    async def _take_prompts(self) -> None:
        source: Any = self._prompts
        is_async = isinstance(source, AsyncIterable)
        prompts = aiter(source) if is_async else iter(source)
        while True:
            await self._wait_for_turn(begins_group=True)
            with self._context.awaiting("the next item of the iterator of prompts"):
                prompt = await anext(prompts, _END) if is_async else next(prompts, _END)
            if prompt is _END:
                return
            if not isinstance(prompt, Prompt):
                raise TypeError(f"prompts must be Prompts, got {type(prompt).__name__}")
            self._counters.counts["num_prompts"] += 1
            await self._start_samples(prompt)

    async def _start_samples(self, prompt: Prompt) -> None:
        """Start the samples of a prompt, the first of them without waiting for its turn."""
        number = self._num_occurrences[prompt.id]
        self._num_occurrences[prompt.id] += 1
        label = f"{prompt.id}#{number}" if number else prompt.id
        samples = self._samples_of(prompt, number)
        size = len(samples) if self._by_group else 1
        group = OpenGroup(prompt, 0, label, size, size)
        try:
            for place, sample in enumerate(samples):
                begins_group = place % size == 0
                if place:
                    await self._wait_for_turn(begins_group=begins_group)
                if begins_group:
                    group = OpenGroup(prompt, sample, label, size, size)
                state = EpisodeState(group, sample)
                try:
                    await state.acquire(self._room)
                    await state.acquire(self._slots)
                finally:
                    if self._is_stopping:
                        state.release(self._slots)
                        state.release(self._room)
                if self._is_stopping:
                    return
                if begins_group:
                    self._num_groups += 1
                    if self._context.staleness is not None:
                        self._context.staleness.begin(self._context.engine.version)
                group.num_started += 1
                self._start(state)
        finally:
            if 0 < group.num_started < size:
                group.num_expected = group.num_started
                if group.is_complete:  # otherwise the last of its results will complete it
                    self._events.put_nowait((group, None, None))

    def _samples_of(self, prompt: Prompt, occurrence: int) -> Sequence[int]:
        """Return the samples of a prompt to start; of a group, all or none."""
        context, size = self._context, self._context.group_size
        groups = context.policy.groups
        most = size + groups.max_refills if groups.incomplete == "refill" else size
        first = occurrence * most
        samples = range(first, first + size)
        if not context.finished:
            return samples
        if not self._by_group:
            return [k for k in samples if f"{prompt.id}@{k}" not in context.finished]
        known = range(first, first + most)
        num_finished = sum(f"{prompt.id}@{k}" in context.finished for k in known)
        return samples if num_finished < size else []

    async def _wait_for_turn(self, *, begins_group: bool) -> None:
        """Wait until an episode may start, without taking what episodes under way may need."""
        context = self._context
        with context.observers.waiting("room"):
            async with self._room:
                pass
        if begins_group and (gate := context.staleness) is not None:
            from anyio import move_on_after

            with context.observers.waiting("staleness"):
                while gate.capacity(context.engine.version) < 1:
                    self._changed.clear()
                    with context.awaiting(WEIGHTS), move_on_after(_VERSION_INTERVAL_S):
                        await self._changed.wait()
        with context.observers.waiting("slot"):
            async with self._slots:
                pass
        self._num_waits += 1
        if self._num_waits % _STARTED_AT_ONCE == 0:
            await asyncio.sleep(0)

    def _start(self, state: EpisodeState) -> None:
        """Start an episode, as soon as there are room and a slot for it."""
        assert self._tasks is not None
        self._counters.counts["num_started"] += state.attempts == 0
        self._tasks.start_soon(self._run_episode, state)

    async def _run_episode(self, state: EpisodeState) -> None:
        from anyio import CancelScope

        outcome: tuple[Trajectory, ...] | EpisodeError
        outcome = EpisodeCancelledError(state.qid, "it was stopped")
        with _shielded_from_agent_cancel(), CancelScope() as scope:
            self._scopes[state] = scope
            if self._is_cancelling:
                scope.cancel()
            try:
                outcome = await self._try(state)
            except asyncio.CancelledError:
                if state.attempts:
                    self._tell_end(state, outcome, final=True)
                raise
            finally:
                del self._scopes[state]
        error = outcome if isinstance(outcome, EpisodeError) else None
        trajectories = () if isinstance(outcome, EpisodeError) else outcome
        result = EpisodeResult(
            state.group.prompt, trajectories, error, state.sample, max(state.attempts, 1)
        )
        self._events.put_nowait((state.group, state, result))
        state.release(self._slots)  # afterwards, so that the reader runs before the next prompt

    async def _try(self, state: EpisodeState) -> tuple[Trajectory, ...] | EpisodeError:
        """Attempt an episode until it succeeds, or must not be retried."""
        policy, context, given = self._context.policy, self._context, state.group.prompt
        await state.acquire(self._room)
        seed = policy.seed if given.seed is None else given.seed
        prompt = replace(given, id=state.qid, seed=derive_seed(seed, state.qid))
        count_turn = None if context.on_progress is None else self._count_turn
        while True:
            await state.acquire(self._slots)
            state.attempts += 1
            context.observers.tell("episode_started", state.qid, state.attempts - 1)
            try:
                with _shielded_from_agent_cancel(state.qid):
                    found = await attempt_episode(context, prompt, count_turn=count_turn)
            except EpisodeError as error:
                if has_engine_ended(error):
                    self.stop(drain=True)
                is_final = not self._may_retry(state, error)
                self._tell_end(state, error, final=is_final)
                if is_final:
                    return error
            else:
                self._tell_end(state, None, final=True)
                return labelled(found, state.group.label)
            state.release(self._slots)
            await asyncio.sleep(policy.retries.wait.seconds(state.qid, state.attempts))

    def _may_retry(self, state: EpisodeState, error: EpisodeError) -> bool:
        allows = self._context.policy.retries.allows
        return not self._is_stopping and allows(error.cause, state.attempts)

    def _tell_end(self, state: EpisodeState, error: object, *, final: bool) -> None:
        tell = self._context.observers.tell
        tell("episode_ended", state.qid, state.attempts - 1, error, final=final)

    def _count_turn(self, turn: Turn) -> None:
        self._counters.count_turn(turn)
        if not self._has_replied:
            self._has_replied = True
            self._events.put_nowait(None)

    def _show_progress(self) -> None:
        if self._context.on_progress is not None:
            self._context.on_progress(self._counters.progress())


@contextmanager
def _shielded_from_agent_cancel(qid: str | None = None) -> Iterator[None]:
    """Contain a cancellation of this task alone; that of a scope around it goes through.

    Otherwise a cancelled task of one episode would end all other episodes silently. The
    cancellation is swallowed, or raised as the failure of the episode ``qid``.

    Raises:
        EpisodeCancelledError: If the task was cancelled, and ``qid`` is given.
        asyncio.CancelledError: If a scope that the task is in was cancelled.
    """
    from anyio import current_effective_deadline

    try:
        yield
    except asyncio.CancelledError as error:
        if current_effective_deadline() == -math.inf:
            raise
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()
        if qid is not None:
            raise EpisodeCancelledError(qid, "its task was cancelled") from error
