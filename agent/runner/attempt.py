"""One attempt at an episode: its trajectories, or the kind of its failure."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from trajpack.agent.engines.queues import coroutine_of
from trajpack.agent.errors import (
    EnvironmentFailedError,
    EpisodeCancelledError,
    EpisodeError,
    EpisodeTimeoutError,
    causes_of,
    reason_of,
)
from trajpack.agent.protocols import Engine, Prompt, Reply
from trajpack.agent.runner.bridge import Attempt, RecordingEnvironment, RunnerContext
from trajpack.agent.runner.trajectory_check import check_trajectories
from trajpack.packing.types import Trajectory


def check_serving(engine: Engine) -> None:
    """Call the engine's `check_serving`, if it has one."""
    check = getattr(engine, "check_serving", None)
    if check is not None:
        check()


async def attempt_episode(
    context: RunnerContext,
    prompt: Prompt,
    group: str,
    *,
    count_reply: Callable[[Reply], None] | None = None,
) -> tuple[Trajectory, ...]:
    """Run the episode ``prompt.id`` once and return its trajectories, complete and checked.

    Args:
        context: Parts of the runner.
        prompt: Opening of the episode.
        group: Group of trajectories that have none.
        count_reply: Called with each reply of the engine, if given.

    Raises:
        EpisodeError: On any failure, with the original exception as its cause.
        asyncio.CancelledError: If the task is being cancelled.
    """
    if context.timeout_s is None:
        return await _collect(context, prompt, group, count_reply)
    failure: EpisodeError | None = None
    with context.gate.limit(context.timeout_s) as scope:
        try:
            trajectories = await _collect(context, prompt, group, count_reply)
            if not scope.cancel_called:  # otherwise the agent ignored its cancellation
                return trajectories
        except EpisodeError as error:
            if not scope.cancel_called:  # otherwise the agent turned its cancellation into this
                raise
            failure = error
    reason = f"not finished within {context.timeout_s:g} s"
    raise EpisodeTimeoutError(prompt.id, reason) from failure


@contextmanager
def shield_from_agent_cancel(qid: str | None = None) -> Iterator[None]:
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


async def _collect(
    context: RunnerContext,
    prompt: Prompt,
    group: str,
    count_reply: Callable[[Reply], None] | None,
) -> tuple[Trajectory, ...]:
    task = asyncio.current_task()
    attempt: Attempt | None = None
    try:
        generate = coroutine_of(context.engine, context.engine.open_episode(prompt.id))
        try:
            attempt = Attempt(prompt.id, context, generate, count_reply=count_reply)
            given = await context.agent.collect_trajectory(
                prompt, RecordingEnvironment(attempt), attempt.requests, attempt.replies
            )
        finally:
            if attempt is not None:
                attempt.close()
            context.engine.close_episode(prompt.id)
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
        raise _kind_of(error, attempt)(prompt.id, reason_of(error)) from error


def _ends_the_program(error: BaseException) -> bool:
    """Return whether an exception is that of a signal or an exit, which is no failure."""
    ends = (KeyboardInterrupt, SystemExit)
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(ends) is not None
    return isinstance(error, ends)


def _is_running(task: asyncio.Task[Any] | None) -> bool:
    """Return whether an event loop runs the task now."""
    try:
        return task is not None and asyncio.current_task() is task
    except RuntimeError:  # no event loop runs
        return False


def _kind_of(error: BaseException, attempt: Attempt | None) -> type[EpisodeError]:
    if attempt is not None and attempt.environment_errors:
        known = set(map(id, attempt.environment_errors))
        if any(id(one) in known for one in causes_of(error)):
            return EnvironmentFailedError
    return EpisodeTimeoutError if isinstance(error, TimeoutError) else EpisodeError
