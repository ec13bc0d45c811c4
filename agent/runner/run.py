"""One run of a runner: takes prompts, starts and retries episodes, hands over results."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from trajpack.agent.blocking_work import wait_for_end
from trajpack.agent.errors import EpisodeCancelledError, EpisodeError, has_engine_ended
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.episode import RunnerContext, attempt_episode, labelled
from trajpack.agent.runner.policy import GroupPolicy, staleness_error
from trajpack.agent.runner.results import Counters, EpisodeResult, GroupResult
from trajpack.agent.seeding import derive_seed
from trajpack.packing.types import Trajectory, Turn

if TYPE_CHECKING:
    from anyio import CancelScope

Prompts: TypeAlias = Iterable[Prompt] | AsyncIterable[Prompt]
Outcome: TypeAlias = tuple[Trajectory, ...] | EpisodeError

WEIGHTS = "weights newer than those of the last results (RolloutPolicy.staleness)"
_VERSION_INTERVAL_S = 0.05
"""Seconds between looks at the engine's version, while episodes wait for newer weights."""
_STARTED_AT_ONCE = 8
"""Episodes that start before the event loop runs other tasks."""
_END = object()
"""In place of a prompt, where there is no further one."""


@dataclass(eq=False)
class Group:
    """Samples of one prompt that are handed over together; a run by episodes has groups of one."""

    prompt: Prompt
    """Prompt as given to the runner."""
    label: str
    """Group of its trajectories."""
    first: int
    """Sample that it begins with: a prompt that comes again goes on counting."""
    size: int
    """Number of episodes that must succeed."""
    num_expected: int
    """Number of episodes that were started or are about to be."""
    num_started: int = 0
    """Number of episodes that were started, without refills."""
    ended: dict[Episode, EpisodeResult] = field(default_factory=dict)
    """Results of the episodes that have ended."""

    @property
    def is_complete(self) -> bool:
        """Whether no episode is under way."""
        return len(self.ended) >= self.num_expected

    def refill(self, policy: GroupPolicy) -> range:
        """Return the samples to start in place of failed ones; none if that is too many."""
        missing = self.size - sum(result.error is None for result in self.ended.values())
        num_refills = self.num_expected + missing - self.size
        if policy.incomplete != "refill" or num_refills > policy.max_refills:
            missing = 0
        begin = self.first + self.num_expected
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
class Episode:
    """One sample of a prompt, from its start until its group is handed over."""

    group: Group
    sample: int
    attempts: int = 0
    """Number of attempts so far."""
    has_slot: bool = False
    """Whether it holds one of the slots of the runner's concurrency."""
    scope: CancelScope | None = None
    """Cancels the attempt that is under way."""

    @property
    def qid(self) -> str:
        """Name of the episode."""
        return f"{self.group.prompt.id}@{self.sample}"


class Run:
    """One call of `RolloutRunner.run` or `RolloutRunner.run_groups`.

    One task takes prompts and starts episodes; each attempt at an episode is a task, too. What
    becomes of them is decided where a task ends, and by the reader of `results`.
    """

    def __init__(self, context: RunnerContext, prompts: Prompts, *, by_group: bool) -> None:
        self._context = context
        self._prompts = prompts
        self._by_group = by_group
        self._slots = asyncio.Semaphore(context.concurrency)
        # An episode is open until its result is taken, so that results that are not taken, and
        # failed episodes that wait for their retry, stop new ones.
        self._num_open = 0
        self._tasks: dict[asyncio.Task[Outcome], Episode] = {}
        self._taking: asyncio.Task[None] | None = None
        # None wakes the reader, for progress or at an end; a group without an episode was cut
        # short after its last episode had ended.
        self._events: asyncio.Queue[tuple[Group, Episode | None, EpisodeResult | None] | None]
        self._events = asyncio.Queue()
        self._changed = asyncio.Event()
        self._counters = Counters()
        self._num_occurrences: Counter[str] = Counter()
        self._num_groups = 0  # under way
        self._num_waits = 0
        self._has_replied = False
        self._is_stopping = False
        self._is_cancelling = False
        self._failure: BaseException | None = None

    def stop(self, *, drain: bool) -> None:
        """Start no more episodes; cancel those in flight, unless they are to ``drain``."""
        self._is_stopping = True
        if self._taking is not None:
            self._taking.cancel()
        if not drain:
            self._is_cancelling = True
            for episode in self._tasks.values():
                if episode.scope is not None:
                    episode.scope.cancel()

    def wake(self) -> None:
        """Check again whether an episode may start."""
        self._changed.set()

    async def results(self) -> AsyncGenerator[GroupResult, None]:
        """Yield the result of each group as its last episode ends."""
        policy = self._context.policy.groups
        self._taking = asyncio.create_task(self._take_prompts())
        self._taking.add_done_callback(self._has_taken)
        if self._is_stopping:
            self._taking.cancel()
        try:
            while self._num_groups or not (self._taking.done() and self._events.empty()):
                event = await self._events.get()
                if event is None:
                    self._look()
                    continue
                group, episode, result = event
                if episode is not None and result is not None:
                    self._take(episode, result)
                if group.is_complete and not self._is_stopping:
                    for sample in group.refill(policy):
                        self._open(Episode(group, sample))
                if group.is_complete:
                    judged = group.judge(policy)
                    self._hand_over(judged)
                    yield judged
        finally:
            is_cancelled = self._is_cancelling
            self.stop(drain=False)
            await wait_for_end(self._taking, *self._tasks)
            if self._context.staleness is not None:
                self._context.staleness.give_back(self._num_groups)
        if not is_cancelled:
            self._counters.log_outcome()

    def _look(self) -> None:
        """Show progress, and raise what ended the run."""
        if self._failure is not None:
            raise self._failure
        if self._has_replied:
            self._has_replied = False
            self._show_progress()

    def _take(self, episode: Episode, result: EpisodeResult) -> None:
        """Make room for another episode, and count a result in its group."""
        self._num_open -= 1
        self.wake()
        episode.group.ended[episode] = result
        self._counters.count_result(result)
        self._refuse_stale(episode.group)
        self._show_progress()

    def _has_taken(self, taking: asyncio.Task[None]) -> None:
        """Note that there are no further prompts, or why."""
        if not taking.cancelled():
            self._failure = self._failure or taking.exception()
        elif not self._is_stopping:
            self._failure = RuntimeError("the task that takes the prompts was cancelled")
        self._events.put_nowait(None)

    def _refuse_stale(self, group: Group) -> None:
        """Retry the episodes of a group whose results are stale now, or make them failures."""
        context = self._context
        for episode, result in list(group.ended.items()):
            error = staleness_error(result, context.policy.staleness, context.engine.version)
            if error is None:
                continue
            is_final = not self._may_retry(episode, error)
            self._tell_end(episode, error, final=is_final)
            self._counters.count_result(result, -1)
            if is_final:
                group.ended[episode] = replace(result, trajectories=(), error=error)
                self._counters.count_result(group.ended[episode])
            else:
                del group.ended[episode]
                self._open(episode)

    def _hand_over(self, judged: GroupResult) -> None:
        """Count a group as handed over, and tell observers."""
        self._num_groups -= 1
        if (gate := self._context.staleness) is not None:
            gate.accept() if judged.rejected is None else gate.give_back()
        self.wake()
        self._counters.count_group(judged)
        tell, version = self._context.tell, self._context.engine.version
        for result in judged.results:
            if judged.rejected is None and result.error is None:
                tell("result_accepted", result, version)
        if self._by_group:
            tell("group_ended", judged.prompt.id, judged.results, judged.rejected)

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
        occurrence = self._num_occurrences[prompt.id]
        self._num_occurrences[prompt.id] += 1
        label = f"{prompt.id}#{occurrence}" if occurrence else prompt.id
        samples = self._samples_of(prompt, occurrence)
        size = len(samples) if self._by_group else 1
        group = Group(prompt, label, 0, size, size)
        try:
            for place, sample in enumerate(samples):
                begins_group = place % size == 0
                if place:
                    await self._wait_for_turn(begins_group=begins_group)
                await self._slots.acquire()
                if begins_group:
                    group = Group(prompt, label, sample, size, size)
                    self._num_groups += 1
                    if self._context.staleness is not None:
                        self._context.staleness.begin(self._context.engine.version)
                group.num_started += 1
                self._open(Episode(group, sample, has_slot=True))
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
        with context.tell.waiting("room"):
            while self._num_open >= 2 * context.concurrency:
                self._changed.clear()
                await self._changed.wait()
        if begins_group and (gate := context.staleness) is not None:
            from anyio import move_on_after

            with context.tell.waiting("staleness"):
                while gate.capacity(context.engine.version) < 1:
                    self._changed.clear()
                    with context.awaiting(WEIGHTS), move_on_after(_VERSION_INTERVAL_S):
                        await self._changed.wait()
        with context.tell.waiting("slot"):
            async with self._slots:
                pass
        self._num_waits += 1
        if self._num_waits % _STARTED_AT_ONCE == 0:
            await asyncio.sleep(0)

    def _open(self, episode: Episode) -> None:
        """Start an episode whose result will be taken."""
        self._num_open += 1
        self._counters.counts["num_started"] += episode.attempts == 0
        self._start(episode)

    def _start(self, episode: Episode, wait_s: float = 0.0) -> None:
        task = asyncio.create_task(self._attempt(episode, wait_s), name=f"episode {episode.qid}")
        self._tasks[task] = episode
        task.add_done_callback(self._attempt_ended)

    async def _attempt(self, episode: Episode, wait_s: float) -> Outcome:
        """Run the next attempt at an episode after a wait, as soon as there is a slot for it."""
        from anyio import CancelScope

        context, given = self._context, episode.group.prompt
        seed = context.policy.seed if given.seed is None else given.seed
        prompt = replace(given, id=episode.qid, seed=derive_seed(seed, episode.qid))
        count_turn = None if context.on_progress is None else self._count_turn
        with CancelScope() as episode.scope:
            if self._is_cancelling:
                episode.scope.cancel()
            if wait_s or self._is_cancelling:
                await asyncio.sleep(wait_s)
            if not episode.has_slot:
                await self._slots.acquire()
                episode.has_slot = True
            episode.attempts += 1
            context.tell("episode_started", episode.qid, episode.attempts - 1)
            try:
                found = await attempt_episode(context, prompt, count_turn=count_turn)
            except EpisodeError as error:
                return error
            return labelled(found, episode.group.label)
        return EpisodeCancelledError(episode.qid, "it was stopped")

    def _attempt_ended(self, task: asyncio.Task[Outcome]) -> None:
        """Retry an episode, or give its result to the reader."""
        episode = self._tasks.pop(task)
        outcome: Outcome
        if task.cancelled():
            outcome = EpisodeCancelledError(episode.qid, "its task was cancelled")
        elif (failure := task.exception()) is not None:  # it ends the program
            self._failure = failure
            return self._events.put_nowait(None)
        else:
            outcome = task.result()
        error = outcome if isinstance(outcome, EpisodeError) else None
        if has_engine_ended(error):
            self.stop(drain=True)
        is_final = error is None or not self._may_retry(episode, error)
        if episode.attempts:
            self._tell_end(episode, error, final=is_final)
        if is_final:
            found = () if isinstance(outcome, EpisodeError) else outcome
            attempts = max(episode.attempts, 1)
            result = EpisodeResult(episode.group.prompt, found, error, episode.sample, attempts)
            self._events.put_nowait((episode.group, episode, result))
        if episode.has_slot:  # afterwards, so that the reader runs before the next prompt
            episode.has_slot = False
            self._slots.release()
        if not is_final:
            wait = self._context.policy.retries.wait
            self._start(episode, wait.seconds(episode.qid, episode.attempts))

    def _may_retry(self, episode: Episode, error: EpisodeError) -> bool:
        allows = self._context.policy.retries.allows
        return not self._is_stopping and allows(error.cause, episode.attempts)

    def _tell_end(self, episode: Episode, error: object, *, final: bool) -> None:
        tell, number = self._context.tell, episode.attempts - 1
        tell("episode_ended", episode.qid, number, error, final=final)

    def _count_turn(self, turn: Turn) -> None:
        self._counters.count_turn(turn)
        if not self._has_replied:
            self._has_replied = True
            self._events.put_nowait(None)

    def _show_progress(self) -> None:
        if self._context.on_progress is not None:
            self._context.on_progress(self._counters.progress())
