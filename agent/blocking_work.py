"""Blocking work in threads, awaited to its end in spite of cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def contained(work: Callable[[], _T]) -> Callable[[], _T]:
    """Wrap ``work`` for a thread so that it raises only exceptions that an event loop can pass on.

    A future cannot hold a `StopIteration`, and a `SystemExit` would end the program. Both become a
    `RuntimeError`, as does anything else that is not an `Exception`.
    """

    def call() -> _T:
        try:
            return work()
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            raise RuntimeError(f"{type(error).__name__} was raised") from error

    return call


async def run_to_end(work: Callable[[], _T]) -> _T:
    """Run blocking ``work`` in a thread and wait for it, also when cancelled meanwhile."""
    future = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        future.exception()
        raise cancelled
    return future.result()


async def cancel_and_wait(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has ended, also when cancelled meanwhile."""
    from anyio import CancelScope

    cancelled: asyncio.CancelledError | None = None
    task.cancel()
    with CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
    if not task.cancelled():
        task.exception()  # retrieved, so that it is not logged
    if cancelled is not None:
        raise cancelled
