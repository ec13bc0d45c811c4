"""`GenerationGate`: holds requests and time limits back while the weights change."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeVar

from trajpack.agent.errors import EpisodeError

if TYPE_CHECKING:
    from anyio import CancelScope

T = TypeVar("T")


class GenerationGate:
    """Re-entrant pause switch for requests to an engine, with a count of requests in flight.

    A pause also stops time limits, so that nothing is late for having waited at the gate.
    """

    def __init__(self) -> None:
        self.num_in_flight = 0
        """Requests that were sent and have no reply yet."""
        self._num_closings = 0
        self._num_standstills = 0
        self._limits: set[CancelScope] = set()
        self._left_s: dict[CancelScope, float] = {}
        # An event belongs to the event loop that first waits for it; a runner may see several.
        self._changed: asyncio.Event | None = None

    @property
    def is_closed(self) -> bool:
        """Whether requests have to wait."""
        return self._num_closings > 0

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
                await self._change()
            with self.standstill():
                yield
        finally:
            self._num_closings -= 1
            self._wake(self._num_closings)

    async def wait_open(self) -> None:
        """Wait until requests may be sent."""
        while self._num_closings:
            await self._change()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Count a request as in flight while the context lasts."""
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
            self._wake(self.num_in_flight)

    async def in_time(self, work: Awaitable[T], seconds: float | None, late: EpisodeError) -> T:
        """Return the result of ``work``, or cancel it after ``seconds`` and raise ``late``.

        The time of a `standstill` does not count. Work that ignores its cancellation, or turns it
        into another error, is late all the same.
        """
        if seconds is None:
            return await work
        failure: EpisodeError | None = None
        with self._limit(seconds) as scope:
            try:
                result = await work
                if not scope.cancel_called:
                    return result
            except EpisodeError as error:
                if not scope.cancel_called:
                    raise
                failure = error
        raise late from failure

    @contextmanager
    def standstill(self) -> Iterator[None]:
        """Stop all time limits while the context lasts."""
        from anyio import current_time

        self._num_standstills += 1
        if self._num_standstills == 1:
            for scope in self._limits:
                self._stop(scope)
        try:
            yield
        finally:
            self._num_standstills -= 1
            if not self._num_standstills:
                while self._left_s:
                    scope, left_s = self._left_s.popitem()
                    scope.deadline = current_time() + left_s

    @contextmanager
    def _limit(self, seconds: float) -> Iterator[CancelScope]:
        from anyio import CancelScope, current_time

        with CancelScope(deadline=current_time() + seconds) as scope:
            self._limits.add(scope)
            if self._num_standstills:
                self._stop(scope)
            try:
                yield scope
            finally:
                self._limits.discard(scope)
                self._left_s.pop(scope, None)

    def _stop(self, scope: CancelScope) -> None:
        from anyio import current_time

        self._left_s[scope] = scope.deadline - current_time()
        scope.deadline = math.inf

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    def _wake(self, num_left: int) -> None:
        if not num_left and self._changed is not None:
            self._changed.set()
            self._changed = None
