"""Work that is waited for to its end, whoever is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


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
    """Cancel a task and wait until it has ended, whoever is cancelled meanwhile."""
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
        task.exception()  # whoever leaves early does not want it
    if cancelled is not None:
        raise cancelled
