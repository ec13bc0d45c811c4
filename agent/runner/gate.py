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
        self._still_since = self._still_s = 0.0
        self._limits: dict[CancelScope, float] = {}
        """Ends of time limits, without the standstills before."""
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
            now = self._still_since if self.is_still else current_time()
            self._limits[scope] = now - self._still_s + seconds
            self._set_deadline(scope)
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

        if not self.is_still:
            self._still_since = current_time()
        self._num_standstills += change
        if not self.is_still:
            self._still_s += current_time() - self._still_since
        for scope in self._limits:
            self._set_deadline(scope)

    def _set_deadline(self, scope: CancelScope) -> None:
        scope.deadline = math.inf if self.is_still else self._limits[scope] + self._still_s

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
