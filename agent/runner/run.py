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
from trajpack.agent.runner.episode import attempt_episode, check_serving, labelled
from trajpack.agent.runner.policy import GroupPolicy, staleness_error
from trajpack.agent.runner.results import Counters, EpisodeResult, GroupResult
from trajpack.agent.seeding import derive_seed
from trajpack.packing.types import Trajectory, Turn

if TYPE_CHECKING:
    from anyio import CancelScope

    from trajpack.agent.runner.runner import RolloutRunner

Prompts: TypeAlias = Iterable[Prompt] | AsyncIterable[Prompt]
Outcome: TypeAlias = tuple[Trajectory, ...] | EpisodeError

WEIGHTS = "weights newer than those of the last results (RolloutPolicy.staleness)"
_VERSION_INTERVAL_S = 0.05
"""Seconds between looks at the engine's version, while episodes wait for newer weights."""
_END = object()
"""In place of a prompt, where there is no further one."""


@dataclass(eq=False)
class Group:
    """Samples of one prompt that are handed over together; a run by episodes has groups of one."""

    prompt: Prompt
    label: str
    """Group of its trajectories."""
    size: int
    """Number of its episodes."""
    ended: dict[int, EpisodeResult] = field(default_factory=dict)
    """Results of the episodes that have ended, by sample."""

    @property
    def is_complete(self) -> bool:
        """Whether no episode is under way."""
        return len(self.ended) == self.size

    def judge(self, policy: GroupPolicy) -> GroupResult:
        """Return the result of the group, once no episode is under way."""
        ordered = [self.ended[sample] for sample in sorted(self.ended)]
        good = [result for result in ordered if result.error is None]
        rejected: str | None = None
        if not good:
            rejected = "failed"
        elif len(good) < self.size and policy.incomplete == "drop":
            rejected = "incomplete"
        else:
            reasons = (reason_for(good) for reason_for in policy.filters)
            reason = next((reason for reason in reasons if reason is not None), None)
            rejected = None if reason is None else f"filtered: {reason}"
        return GroupResult(self.prompt, tuple(ordered), rejected)


@dataclass(eq=False)
class Episode:
    """One sample of a prompt that is under way."""

    group: Group
    sample: int
    scope: CancelScope
    """Cancels its attempts."""
    attempts: int = 0
    """Number of attempts so far."""

    @property
    def qid(self) -> str:
        """Name of the episode."""
        return f"{self.group.prompt.id}@{self.sample}"


class Run:
    """One call of `RolloutRunner.run` or `RolloutRunner.run_groups`.

    One task takes prompts; each episode is a task, too, with all of its attempts. The reader of
    `results` gathers what they return.
    """

    def __init__(self, runner: RolloutRunner, prompts: Prompts, *, by_group: bool) -> None:
        self._runner = runner
        self._prompts = prompts
        self._by_group = by_group
        self._slots = asyncio.Semaphore(runner.concurrency)
        self._num_open = 0
        """Episodes whose result was not taken: they stop new ones."""
        self._has_room = asyncio.Event()
        self._tasks: dict[asyncio.Task[Outcome], Episode] = {}
        self._taking: asyncio.Task[None] | None = None
        self._events: asyncio.Queue[tuple[Group, EpisodeResult] | None] = asyncio.Queue()
        """Results of episodes; None wakes the reader, for progress or at an end."""
        self._counters = Counters()
        self._num_groups = 0
        """Groups under way."""
        self._is_stopping = self._is_cancelling = False
        self._failure: BaseException | None = None
        """Exception that ends the run."""

    def stop(self, *, drain: bool) -> None:
        """Start no more episodes; cancel those in flight, unless they are to ``drain``."""
        self._is_stopping = True
        if self._taking is not None:
            self._taking.cancel()
        if not drain:
            self._is_cancelling = True
            for episode in self._tasks.values():
                episode.scope.cancel()

    async def results(self) -> AsyncGenerator[GroupResult, None]:
        """Yield the result of each group as its last episode ends."""
        runner = self._runner
        check_serving(runner.engine)
        runner.begin_run(self)
        self._taking = asyncio.create_task(self._take_prompts())
        self._taking.add_done_callback(self._has_taken)
        try:
            while self._num_groups or not (self._taking.done() and self._events.empty()):
                event = await self._events.get()
                if self._failure is not None:
                    raise self._failure
                group = None if event is None else self._take(*event)
                if runner.on_progress is not None:
                    runner.on_progress(self._counters.progress())
                if group is not None and group.is_complete:
                    yield self._hand_over(group)
            if not self._is_cancelling:
                self._counters.log_outcome()
        finally:
            self.stop(drain=False)
            await wait_for_end(self._taking, *self._tasks)
            if runner.staleness is not None:
                runner.staleness.num_running -= self._num_groups
            runner.end_run(self)

    def _take(self, group: Group, result: EpisodeResult) -> Group:
        """Make room for another episode, and add a result to its group."""
        self._num_open -= 1
        self._has_room.set()
        group.ended[result.sample] = result
        self._counters.count_result(result)
        if group.is_complete:
            self._refuse_stale(group)
        return group

    def _has_taken(self, taking: asyncio.Task[None]) -> None:
        """Note that there are no further prompts, or why."""
        if not taking.cancelled():
            self._failure = self._failure or taking.exception()
        elif not self._is_stopping:
            self._failure = RuntimeError("the task that takes the prompts was cancelled")
        self._events.put_nowait(None)

    def _refuse_stale(self, group: Group) -> None:
        """Retry the episodes of a group whose results are stale now, or make them failures."""
        staleness, version = self._runner.policy.staleness, self._runner.engine.version
        for sample, result in list(group.ended.items()):
            error = staleness_error(result, staleness, version)
            if error is None:
                continue
            self._counters.count_result(result, -1)
            is_final = not self._may_retry(error, result.attempts)
            self._tell_end(result.qid, result.attempts, error, final=is_final)
            if is_final:
                group.ended[sample] = replace(result, trajectories=(), error=error)
                self._counters.count_result(group.ended[sample])
            else:
                del group.ended[sample]
                self._open(group, sample, result.attempts)

    def _hand_over(self, group: Group) -> GroupResult:
        """Judge a group, count it as handed over, and tell observers."""
        runner = self._runner
        judged = group.judge(runner.policy.groups)
        self._num_groups -= 1
        if runner.staleness is not None:
            runner.staleness.end(is_accepted=judged.rejected is None)
        self._counters.count_group(judged)
        if judged.rejected is None:
            for result in judged.results:
                if result.error is None:
                    runner.tell("result_accepted", result, runner.engine.version)
        if self._by_group:
            runner.tell("group_ended", judged.prompt.id, judged.results, judged.rejected)
        return judged

    async def _take_prompts(self) -> None:
        source: Any = self._prompts
        is_async = isinstance(source, AsyncIterable)
        prompts = aiter(source) if is_async else iter(source)
        num_occurrences = Counter[str]()
        while True:
            await self._wait_for_turn()
            with self._runner.awaiting("the next item of the iterator of prompts"):
                prompt = await anext(prompts, _END) if is_async else next(prompts, _END)
            if prompt is _END:
                return
            if not isinstance(prompt, Prompt):
                raise TypeError(f"prompts must be Prompts, got {type(prompt).__name__}")
            occurrence = num_occurrences[prompt.id]
            num_occurrences[prompt.id] += 1
            label = f"{prompt.id}#{occurrence}" if occurrence else prompt.id
            for samples in self._groups_of(prompt, occurrence):
                await self._wait_for_turn()
                group = Group(prompt, label, len(samples))
                self._num_groups += 1
                if self._runner.staleness is not None:
                    self._runner.staleness.num_running += 1
                for sample in samples:
                    self._open(group, sample)

    def _groups_of(self, prompt: Prompt, occurrence: int) -> Sequence[Sequence[int]]:
        """Return the samples of a prompt to start, by group; of a group, all or none."""
        size, finished = self._runner.group_size, self._runner.finished
        samples = range(occurrence * size, (occurrence + 1) * size)
        missing = [k for k in samples if f"{prompt.id}@{k}" not in finished]
        if self._by_group:
            return [samples] if missing else []
        return [[sample] for sample in missing]

    async def _wait_for_turn(self) -> None:
        """Wait until a group may begin, without taking what episodes under way may need."""
        runner = self._runner
        await asyncio.sleep(0)  # the last episode takes its slot
        while self._num_open >= 2 * runner.concurrency:
            self._has_room.clear()
            await self._has_room.wait()
        while (gate := runner.staleness) is not None and gate.capacity(runner.engine.version) < 1:
            with runner.awaiting(WEIGHTS):
                await asyncio.sleep(_VERSION_INTERVAL_S)
        async with self._slots:
            pass

    def _open(self, group: Group, sample: int, attempts: int = 0) -> None:
        """Start an episode, after ``attempts`` if they gave a stale result."""
        from anyio import CancelScope

        episode = Episode(group, sample, CancelScope(), attempts)
        self._num_open += 1
        self._counters.counts["num_started"] += attempts == 0
        task = asyncio.create_task(self._roll_out(episode), name=f"episode {episode.qid}")
        self._tasks[task] = episode
        task.add_done_callback(self._has_ended)

    async def _roll_out(self, episode: Episode) -> Outcome:
        """Run an episode, each attempt as soon as there is a slot for it."""
        runner, group, qid = self._runner, episode.group, episode.qid
        seed = runner.policy.seed if group.prompt.seed is None else group.prompt.seed
        prompt = replace(group.prompt, id=qid, seed=derive_seed(seed, qid))
        count_turn = None if runner.on_progress is None else self._count_turn
        with episode.scope:
            while True:
                async with self._slots:
                    if self._is_stopping and not episode.attempts:
                        break
                    episode.attempts += 1
                    runner.tell("episode_started", qid, episode.attempts - 1)
                    try:
                        sampled = await attempt_episode(runner, prompt, count_turn=count_turn)
                        return labelled(sampled, group.label)
                    except EpisodeError as error:
                        if has_engine_ended(error):
                            self.stop(drain=True)
                        if not self._may_retry(error, episode.attempts):
                            return error
                        self._tell_end(qid, episode.attempts, error, final=False)
                await asyncio.sleep(runner.policy.retries.wait.seconds(qid, episode.attempts))
        return EpisodeCancelledError(qid, "it was stopped")

    def _has_ended(self, task: asyncio.Task[Outcome]) -> None:
        """Give the result of an episode to the reader."""
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
        trajectories = () if isinstance(outcome, EpisodeError) else outcome
        if episode.attempts:
            self._tell_end(episode.qid, episode.attempts, error, final=True)
        prompt, attempts = episode.group.prompt, max(episode.attempts, 1)
        result = EpisodeResult(prompt, trajectories, error, episode.sample, attempts)
        self._events.put_nowait((episode.group, result))

    def _may_retry(self, error: EpisodeError, attempts: int) -> bool:
        return not self._is_stopping and self._runner.policy.retries.allows(error.cause, attempts)

    def _tell_end(
        self, qid: str, attempts: int, error: EpisodeError | None, *, final: bool
    ) -> None:
        self._runner.tell("episode_ended", qid, attempts - 1, error, final=final)

    def _count_turn(self, turn: Turn) -> None:
        self._counters.count_turn(turn)
        if self._events.empty():
            self._events.put_nowait(None)
