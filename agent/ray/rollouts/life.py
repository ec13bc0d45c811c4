"""One rollout worker from its start to its end, as the coordinator sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

from trajpack.agent.errors import reason_of
from trajpack.agent.ray.rollouts.options import MakeWorker, WorkerOptions
from trajpack.agent.ray.rollouts.worker import RolloutWorker, WorkerPulse, WorkerStatus
from trajpack.packing.text import one_line

_logger = logging.getLogger(__name__)
_STOP_TIMEOUT_S = 10.0
_EARLY_STOP_TIMEOUT_S = 2.0
"""For one that has not started: it may be no more than a place in a queue."""
_KILL_TIMEOUT_S = 3.0
_CONTROL_CALLS = 8


class WorkerLostError(RuntimeError):
    """A worker died, hung, or failed in a way that only a new one mends."""


def told_by(error: BaseException) -> str:
    """Return the kind of an exception and what it says: of one in Ray's wrapping, the inner one's.

    Example:
        >>> told_by(KeyError("answer"))
        "KeyError: 'answer'"
    """
    inner = getattr(error, "cause", None)
    return reason_of(inner if isinstance(inner, BaseException) else error)


def is_loss(error: Exception) -> bool:
    """Return whether an exception is Ray's, about an actor, and not the actor's own.

    Its process, its node, its memory, or what it sent is lost then: each has a type of its own.
    """
    from ray.exceptions import RayError, RayTaskError

    return isinstance(error, RayError) and not isinstance(error, RayTaskError)


class WorkerLife:
    """An actor's life: it starts, serves, and is lost or ended. There is no way back.

    Args:
        make_worker: Makes what the worker holds.
        number: Of the worker, from 0.
        options: How it is run.
    """

    def __init__(self, make_worker: MakeWorker, number: int, options: WorkerOptions) -> None:
        import ray

        actor = ray.remote(
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            max_concurrency=options.concurrency + _CONTROL_CALLS,
            max_restarts=0,  # Ray's own restart has no weights
            max_task_retries=0,
        )(RolloutWorker)
        self._actor = actor.remote(make_worker, number, options)
        self._number = number
        self._options = options
        self._calls: set[asyncio.Future[Any]] = set()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done with the reason once the worker is lost."""
        self.status: WorkerStatus | None = None
        """What it said when it had started."""
        self.version = -1
        """Of its weights, as far as is known."""
        self.num_running = 0
        """Episodes that are on it."""
        self.num_finished = 0
        """Episodes that it has brought to an end."""
        self.has_died = False
        """Whether it is lost because its process, or what that runs on, has ended."""

    @property
    def num_free(self) -> int:
        """Episodes that it may still take."""
        return self._options.concurrency - self.num_running

    def lose(self, reason: str) -> None:
        """Give the worker up: all that wait for it get a `WorkerLostError`."""
        if not self.lost.done():
            self.lost.set_result(reason)

    async def start(self, weights: Any) -> None:
        """Start it with the weights that a reference stands for, or with its own."""
        self.status = await self.call("start", weights, timeout_s=self._options.start_timeout_s)
        assert self.status is not None
        self.version = self.status.version

    async def set_weights(self, weights: Any) -> None:
        """Give it the weights that a reference stands for."""
        timeout_s = self._options.start_timeout_s
        self.version = await self.call("set_weights", weights, timeout_s=timeout_s)

    async def ping(self) -> None:
        """Make sure that it lives, and log its warnings."""
        assert self.status is not None
        pulse: WorkerPulse = await self.call("ping", timeout_s=self._options.hang_timeout_s)
        self.version = pulse.version
        for text in pulse.warnings:
            _logger.warning(
                "rollout worker %d (pid %d): %s",
                self._number,
                self.status.pid,
                one_line(text, 2000),
            )

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the actor and wait for what it returns.

        Cancelling the wait cancels the call on the worker.

        Raises:
            WorkerLostError: If the worker is lost before, or does not answer in time.
            Exception: What the method raised.
        """
        import ray

        ref = getattr(self._actor, method).remote(*args)
        reply: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
        self._calls.add(reply)
        reply.add_done_callback(self._forget)
        try:
            await asyncio.wait(
                {reply, self.lost}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        try:
            if reply.done():
                return reply.result()
            self.lose(f"no answer to {method!r} within {timeout_s} s")
        except Exception as error:
            if not is_loss(error):
                raise
            self.has_died = True
            self.lose(" ".join(told_by(error).split()))
        raise WorkerLostError(self.lost.result())

    def _forget(self, reply: asyncio.Future[Any]) -> None:
        self._calls.discard(reply)
        if not reply.cancelled():
            reply.exception()  # nobody may be left to look at it

    async def end(self) -> None:
        """Let it leave its engine and environment if it still can, and end its process."""
        import ray

        try:
            if not self.lost.done():
                timeout_s = _EARLY_STOP_TIMEOUT_S if self.status is None else _STOP_TIMEOUT_S
                with contextlib.suppress(Exception):
                    await self.call("stop", timeout_s=timeout_s)
        finally:  # also when the event loop ends, and with it all of its tasks
            self.lose("it was ended")
            ray.kill(self._actor, no_restart=True)
        if self._calls:  # their callbacks come from another thread, and need this event loop
            await asyncio.wait(self._calls, timeout=_KILL_TIMEOUT_S)
        for reply in self._calls:
            reply.cancel()


async def finished(work: Coroutine[Any, Any, None]) -> None:
    """Wait until some work is done, also when cancelled meanwhile."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
