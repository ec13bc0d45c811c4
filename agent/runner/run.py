"""One run of a runner: takes prompts, starts and retries episodes, hands over results."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from trajpack.agent.blocking_work import wait_for_end
from trajpack.agent.errors import (
    EpisodeCancelledError,
    EpisodeError,
    StaleEpisodeError,
    has_engine_ended,
)
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.episode import attempt_episode, check_serving, labelled
from trajpack.agent.runner.policy import RolloutPolicy, refuse_stale
from trajpack.agent.runner.results import EpisodeResult, GroupResult, OutcomeLog, Progress
from trajpack.agent.seeding import derive_seed
from trajpack.packing.text import one_line
from trajpack.packing.types import Trajectory, Turn

if TYPE_CHECKING:
    from anyio import CancelScope

    from trajpack.agent.runner.runner import RolloutRunner

Prompts: TypeAlias = Iterable[Prompt] | AsyncIterable[Prompt]
Outcome: TypeAlias = tuple[tuple[Trajectory, ...], EpisodeError | None]

_logger = logging.getLogger(__name__)
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

    def judged(self, policy: RolloutPolicy, version: int) -> GroupResult:
        """Return the result of the group, in which stale episodes have failed."""
        results = [
            refuse_stale(self.ended[sample], policy.staleness, version)
            for sample in sorted(self.ended)
        ]
        good = [result for result in results if result.error is None]
        if not good:
            rejected: str | None = "failed"
        elif len(good) < self.size and policy.groups.incomplete == "drop":
            rejected = "incomplete"
        else:
            reasons = (reason_for(good) for reason_for in policy.groups.filters)
            reason = next((reason for reason in reasons if reason is not None), None)
            rejected = None if reason is None else f"filtered: {reason}"
        return GroupResult(self.prompt, tuple(results), rejected)


@dataclass(eq=False)
class Episode:
    """One sample of a prompt that is under way."""

    group: Group
    sample: int
    qid: str
    scope: CancelScope
    """Cancels its attempts."""
    attempts: int = 0
    """Number of attempts so far."""


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
        self._taking: asyncio.Task[None]
        self._events: asyncio.Queue[tuple[Group, EpisodeResult] | None] = asyncio.Queue()
        """Results of episodes; None wakes the reader, for progress or at an end."""
        self._progress, self._began = Progress(), time.monotonic()
        self._outcome = OutcomeLog()
        self._awaited = ""
        """What episodes wait for that have not begun: prompts, or newer weights."""
        self._num_groups = 0
        """Groups under way."""
        self._is_stopping = self._is_cancelling = False
        self._failure: BaseException | None = None
        """Exception that ends the run."""

    def stop(self, *, drain: bool) -> None:
        """Start no more episodes; cancel those in flight, unless they are to ``drain``."""
        self._is_stopping = True
        self._taking.cancel()
        if not drain:
            self._is_cancelling = True
            for episode in self._tasks.values():
                episode.scope.cancel()

    async def results(self) -> AsyncGenerator[GroupResult, None]:
        """Yield the result of each group as its last episode ends."""
        runner = self._runner
        check_serving(runner.engine)
        runner.runs.add(self)
        watching = asyncio.create_task(self._warn_of_silence())
        self._taking = asyncio.create_task(self._take_prompts())
        self._taking.add_done_callback(self._has_taken)
        try:
            while self._num_groups or not (self._taking.done() and self._events.empty()):
                event = await self._events.get()
                if self._failure is not None:
                    raise self._failure
                group = None if event is None else self._take(*event)
                if runner.on_progress is not None:
                    elapsed_s = time.monotonic() - self._began
                    runner.on_progress(replace(self._progress, elapsed_s=elapsed_s))
                if group is not None:
                    yield group
            if not self._is_cancelling:
                self._outcome.log()
        finally:
            self.stop(drain=False)
            watching.cancel()
            await wait_for_end(self._taking, watching, *self._tasks)
            runner.staleness.num_running -= self._num_groups
            runner.runs.discard(self)

    async def _warn_of_silence(self) -> None:
        """Log what is waited for when no observer was told anything for long, then twice as long.

        Of episodes on remote workers no sign comes. A warning ends nothing.
        """
        runner, loop = self._runner, asyncio.get_running_loop()
        patience_s = runner.policy.silence_warning_s
        runner.tell.called_at = loop.time()
        while patience_s is not None and not getattr(runner.engine, "is_remote", False):
            look_at = runner.tell.called_at + patience_s
            await asyncio.sleep(look_at - loop.time())
            now, what = loop.time(), self._awaited
            if self._tasks:
                is_waiting = runner.gate.num_in_flight or runner.num_calls
                remedy = "RolloutPolicy(episode_timeout_s=...) ends such episodes"
                what = (
                    f"episodes under way: {len(self._tasks)}, open requests to "
                    f"{type(runner.engine).__name__}: {runner.gate.num_in_flight}, open calls of "
                    f"{type(runner.environment).__name__}: {runner.num_calls}; "
                    f"{remedy if is_waiting else 'they may wait for a retry'}"
                )
            if runner.gate.is_still or not what or now - look_at > 1.0:
                runner.tell.called_at = now  # it is in order, or the event loop stood still
            elif (silent_s := now - runner.tell.called_at) > patience_s - 0.001:  # a rounding
                _logger.warning(
                    "nothing has happened for %.0f s: %s", silent_s, one_line(what, 2000)
                )
                patience_s *= 2

    def _take(self, group: Group, result: EpisodeResult) -> GroupResult | None:
        """Make room for another episode; return the result of a group that is complete."""
        self._num_open -= 1
        self._has_room.set()
        group.ended[result.sample] = result
        if len(group.ended) < group.size:
            return None
        runner, version = self._runner, self._runner.engine.version
        judged = group.judged(runner.policy, version)
        self._num_groups -= 1
        runner.staleness.end(is_accepted=judged.rejected is None)
        self._outcome.add(judged)
        for taken in judged.results:
            self._progress.count_result(taken)
            if isinstance(taken.error, StaleEpisodeError):
                attempt = taken.attempts - 1
                runner.tell("episode_ended", taken.qid, attempt, taken.error, final=True)
            elif taken.error is None and judged.rejected is None:
                runner.tell("result_accepted", taken, version)
        if self._by_group:
            runner.tell("group_ended", judged.prompt.id, judged.results, judged.rejected)
        return judged

    def _has_taken(self, taking: asyncio.Task[None]) -> None:
        """Note that there are no further prompts, or why."""
        self._awaited = ""
        if not taking.cancelled():
            self._failure = self._failure or taking.exception()
        elif not self._is_stopping:
            self._failure = RuntimeError("the task that takes the prompts was cancelled")
        self._events.put_nowait(None)

    async def _take_prompts(self) -> None:
        from anyio import CancelScope

        source: Any = self._prompts
        is_async = isinstance(source, AsyncIterable)
        prompts = aiter(source) if is_async else iter(source)
        num_occurrences = Counter[str]()
        while True:
            await self._wait_for_turn()
            self._awaited = "waiting for the next item of the iterator of prompts"
            prompt = await anext(prompts, _END) if is_async else next(prompts, _END)
            self._awaited = ""
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
                self._runner.staleness.num_running += 1
                self._num_open += len(samples)
                for sample in samples:
                    episode = Episode(group, sample, f"{prompt.id}@{sample}", CancelScope())
                    name = f"episode {episode.qid}"
                    task = asyncio.create_task(self._roll_out(episode), name=name)
                    self._tasks[task] = episode
                    task.add_done_callback(self._has_ended)
                await asyncio.sleep(0)  # they take their slots

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
        while self._num_open >= 2 * runner.concurrency:
            self._has_room.clear()
            await self._has_room.wait()
        while runner.staleness.capacity(runner.engine.version) < 1:
            self._awaited = "waiting for weights newer than those of the last results"
            await asyncio.sleep(_VERSION_INTERVAL_S)
            self._awaited = ""
        async with self._slots:
            pass

    async def _roll_out(self, episode: Episode) -> Outcome:
        """Run an episode, each attempt as soon as there is a slot for it."""
        runner, group, qid = self._runner, episode.group, episode.qid
        seed = runner.policy.seed if group.prompt.seed is None else group.prompt.seed
        prompt = replace(group.prompt, id=qid, seed=derive_seed(seed, qid))
        retries = runner.policy.retries
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
                        return labelled(sampled, group.label), None
                    except EpisodeError as error:
                        if has_engine_ended(error):
                            self.stop(drain=True)
                        if self._is_stopping or not retries.allows(error.cause, episode.attempts):
                            return (), error
                        runner.tell("episode_ended", qid, episode.attempts - 1, error, final=False)
                await asyncio.sleep(retries.wait_s(qid, episode.attempts))
        return (), EpisodeCancelledError(qid, "it was stopped")

    def _has_ended(self, task: asyncio.Task[Outcome]) -> None:
        """Give the result of an episode to the reader."""
        episode = self._tasks.pop(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:  # it ends the program
            self._failure = failure
            return self._events.put_nowait(None)
        cancelled = (), EpisodeCancelledError(episode.qid, "its task was cancelled")
        trajectories, error = cancelled if task.cancelled() else task.result()
        group, attempts = episode.group, episode.attempts
        if attempts:
            self._runner.tell("episode_ended", episode.qid, attempts - 1, error, final=True)
        result = EpisodeResult(group.prompt, trajectories, error, episode.sample, max(attempts, 1))
        self._events.put_nowait((group, result))

    def _count_turn(self, turn: Turn) -> None:
        self._progress.num_turns += 1
        self._progress.num_tokens += len(turn.completion_ids)
        if self._events.empty():
            self._events.put_nowait(None)
