"""`GenerationGate`: holds requests and time limits back while the weights change."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from trajpack.agent.errors import EpisodeError

if TYPE_CHECKING:
    from anyio import CancelScope

T = TypeVar("T")


class GenerationGate:
    """Pause switch for requests to an engine, with a count of requests in flight.

    A pause also stops time limits, so that nothing is late for having waited at the gate.
    """

    def __init__(self) -> None:
        self.num_in_flight = 0
        """Requests that were sent and have no reply yet."""
        self._num_closings = 0
        self._num_standstills = 0
        self._limits: dict[CancelScope, float] = {}
        """Time limits that run; seconds left of each when they stand still."""
        self._changed = asyncio.Event()
        """Set, and replaced, whenever something changes that others wait for."""

    @property
    def is_still(self) -> bool:
        """Whether time limits stand still."""
        return self._num_standstills > 0

    @asynccontextmanager
    async def paused(self, *, drain: bool) -> AsyncIterator[None]:
        """Hold requests and time limits back, once every request has a reply if they ``drain``."""
        self._num_closings += 1
        try:
            while drain and self.num_in_flight:
                await self._changed.wait()
            self._count_standstill(1)
            try:
                yield
            finally:
                self._count_standstill(-1)
        finally:
            self._num_closings -= 1
            self._tell()

    async def wait_open(self) -> None:
        """Wait until requests may be sent."""
        while self._num_closings:
            await self._changed.wait()

    async def send(self, request: Awaitable[T], seconds: float | None, late: EpisodeError) -> T:
        """Return the reply to a request, see `in_time`, which is in flight until then."""
        self.num_in_flight += 1
        try:
            return await self.in_time(request, seconds, late)
        finally:
            self.num_in_flight -= 1
            self._tell()

    async def in_time(self, work: Awaitable[T], seconds: float | None, late: EpisodeError) -> T:
        """Return the result of ``work``, or cancel it after ``seconds`` and raise ``late``.

        The time of a standstill does not count. Work that ignores its cancellation, or turns it
        into another error, is late all the same.
        """
        from anyio import CancelScope, current_time

        if seconds is None:
            return await work
        failure: EpisodeError | None = None
        with CancelScope() as scope:
            self._limits[scope] = seconds
            if not self.is_still:
                scope.deadline = current_time() + seconds
            try:
                result = await work
                if not scope.cancel_called:
                    return result
            except EpisodeError as error:
                if not scope.cancel_called:
                    raise
                failure = error
            finally:
                del self._limits[scope]
        raise late from failure

    def _count_standstill(self, change: int) -> None:
        from anyio import current_time

        was_still, now = self.is_still, current_time()
        self._num_standstills += change
        for scope in self._limits if was_still != self.is_still else ():
            if was_still:
                scope.deadline = now + self._limits[scope]
            else:
                self._limits[scope], scope.deadline = scope.deadline - now, math.inf

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
