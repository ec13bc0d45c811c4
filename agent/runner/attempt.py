"""One attempt at an episode: what the agent makes of it, or what kind of failure it was."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from trajpack.agent.errors import (
    EnvironmentFailedError,
    EpisodeCancelledError,
    EpisodeError,
    EpisodeTimeoutError,
    causes_of,
    reason_of,
)
from trajpack.agent.protocols import Agent, Engine, Environment, Prompt, Reply
from trajpack.agent.runner.gate import GenerationGate
from trajpack.agent.runner.trajectory_check import check_trajectories
from trajpack.agent.runner.watch import (
    Audience,
    EpisodeWatch,
    WatchedEnvironment,
    WatchedReplies,
    WatchedRequests,
)
from trajpack.agent.runner.watchdog import Watchdog
from trajpack.packing.types import Trajectory


@dataclass(frozen=True, eq=False)
class Stage:
    """What all episodes of a runner share."""

    engine: Engine
    """Has been entered."""
    agent: Agent
    """Leads the conversations."""
    environment: Environment
    """Judges them."""
    audience: Audience
    """Told of what happens."""
    gate: GenerationGate
    """Every request to the engine passes it."""
    timeout_s: float | None
    """Seconds of an attempt at most."""
    watchdog: Watchdog | None = None
    """Warns where attempts wait for long."""


def check_serving(engine: Engine) -> None:
    """Raise what an engine raises that knows that it does not serve."""
    check = getattr(engine, "check_serving", None)
    if check is not None:
        check()


async def attempt_episode(
    stage: Stage, prompt: Prompt, group: str, count_reply: Callable[[Reply], None] | None
) -> tuple[Trajectory, ...]:
    """Run the episode ``prompt.id`` once and return its trajectories, whole and checked.

    Trajectories without a group get ``group``.

    Raises:
        EpisodeError: Whatever went wrong, with the original exception as its cause.
        asyncio.CancelledError: If the task is being cancelled.
    """
    watch = EpisodeWatch(
        prompt.id, stage.audience, stage.gate, count_reply, watchdog=stage.watchdog
    )
    if stage.timeout_s is None:
        return await _collect(stage, prompt, group, watch)
    failure: EpisodeError | None = None
    with stage.gate.limit(stage.timeout_s) as scope:
        try:
            trajectories = await _collect(stage, prompt, group, watch)
            if not scope.cancel_called:  # else the agent went on although it was told to end
                return trajectories
        except EpisodeError as error:
            if not scope.cancel_called:  # else this is what the agent made of being told so
                raise
            failure = error
    raise EpisodeTimeoutError(prompt.id, f"not finished within {stage.timeout_s:g} s") from failure


@contextmanager
def surviving_cancel(qid: str | None = None) -> Iterator[None]:
    """Keep a cancellation that was meant for this task alone from those who wait for it.

    It is swallowed, or raised as the failure of an episode where one is named; only what a scope
    around the task asks for, such as the end of a run, goes through. Without this, whoever
    cancels the task of one episode would end all others silently.

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


async def _collect(
    stage: Stage, prompt: Prompt, group: str, watch: EpisodeWatch
) -> tuple[Trajectory, ...]:
    task = asyncio.current_task()
    try:
        replies = WatchedReplies(stage.engine.open_episode(prompt.id), watch)
        try:
            given = await stage.agent.collect_trajectory(
                prompt,
                WatchedEnvironment(stage.environment, watch),
                WatchedRequests(stage.engine.obs_queue, watch),
                replies,
            )
        finally:
            watch.close()
            stage.engine.close_episode(prompt.id)
        await check_trajectories(given)
        return tuple(
            replace(trajectory, group=group) if trajectory.group is None else trajectory
            for trajectory in given
        )
    except asyncio.CancelledError as error:
        if task is None or task.cancelling():
            raise
        reason = "something the agent awaited was cancelled"
        raise EpisodeCancelledError(prompt.id, reason) from error
    except BaseException as error:  # of any kind: it must not end the other episodes
        if _ends_the_program(error) or (isinstance(error, EpisodeError) and error.qid == prompt.id):
            raise
        if isinstance(error, GeneratorExit) and not _is_running(task):
            raise  # the interpreter closes this coroutine
        raise _kind_of(error, watch)(prompt.id, reason_of(error)) from error


def _ends_the_program(error: BaseException) -> bool:
    """Return whether this is no failure: signals raise the first two wherever the program is."""
    ends = (KeyboardInterrupt, SystemExit)
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(ends) is not None
    return isinstance(error, ends)


def _is_running(task: asyncio.Task[Any] | None) -> bool:
    """Return whether this is a step of the task, and not the end of its coroutine's memory."""
    try:
        return task is not None and asyncio.current_task() is task
    except RuntimeError:  # no event loop runs
        return False


def _kind_of(error: BaseException, watch: EpisodeWatch) -> type[EpisodeError]:
    if watch.environment_errors:
        known = set(map(id, watch.environment_errors))
        if any(id(one) in known for one in causes_of(error)):
            return EnvironmentFailedError
    return EpisodeTimeoutError if isinstance(error, TimeoutError) else EpisodeError
