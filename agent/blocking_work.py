"""Blocking work in threads, awaited to its end in spite of cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


def contained(work: Callable[[], _T]) -> Callable[[], _T]:
    """Wrap ``work`` so that it raises a `RuntimeError` for what an event loop cannot pass on.

    A future cannot hold a `StopIteration`, and a `SystemExit` would end the program.
    """

    def call() -> _T:
        try:
            return work()
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            raise RuntimeError(f"{type(error).__name__} was raised") from error

    return call


async def to_end(future: asyncio.Future[_T]) -> _T:
    """Wait for the end of a future or task, also when cancelled meanwhile; return its result."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return future.result()
    if not future.cancelled():
        future.exception()  # retrieved, so that it is not logged
    raise cancelled


async def run_to_end(work: Callable[[], _T]) -> _T:
    """Run blocking ``work`` in a thread and wait for it, also when cancelled meanwhile."""
    return await to_end(asyncio.get_running_loop().run_in_executor(None, work))


async def wait_for_end(*tasks: asyncio.Task[Any]) -> None:
    """Wait until tasks have ended, also when cancelled meanwhile."""
    from anyio import CancelScope

    with CancelScope(shield=True):
        await to_end(asyncio.ensure_future(asyncio.wait(tasks)))
