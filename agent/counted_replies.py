"""A queue of replies that tells of each one taken from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trajpack.agent.protocols import Reply


class CountedReplies(asyncio.Queue[Reply]):
    """Stands before an engine's queue of replies; its contents are that queue's.

    Args:
        replies: The engine's queue.
        count: Called with each reply before the agent gets it.
    """

    def __init__(self, replies: asyncio.Queue[Reply], count: Callable[[Reply], None]) -> None:
        super().__init__()
        self._replies = replies
        self._count = count

    async def get(self) -> Reply:
        """Wait for the next reply."""
        reply = await self._replies.get()
        self._count(reply)
        return reply

    def get_nowait(self) -> Reply:
        """Return the next reply if it is there."""
        reply = self._replies.get_nowait()
        self._count(reply)
        return reply

    async def put(self, item: Reply) -> None:
        """Put a reply as the engine does."""
        await self._replies.put(item)

    def put_nowait(self, item: Reply) -> None:
        """Put a reply as the engine does."""
        self._replies.put_nowait(item)

    def qsize(self) -> int:
        """Return how many replies wait."""
        return self._replies.qsize()

    def empty(self) -> bool:
        """Return whether no reply waits."""
        return self._replies.empty()

    def full(self) -> bool:
        """Return whether no reply can be put."""
        return self._replies.full()

    def task_done(self) -> None:
        """Tell the engine's queue that a reply was dealt with."""
        self._replies.task_done()

    async def join(self) -> None:
        """Wait until every reply was dealt with."""
        await self._replies.join()
