"""A gate that requests to an engine pass, so that a weight update finds it quiet."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyio import CancelScope

_LOOK_INTERVAL_S = 0.01
"""An engine does not tell that a reply has come; while it is waited for, this often it is asked."""


class GenerationGate:
    """Open, or closed by as many as want it closed; counts the requests beyond it.

    Those who keep it closed may also have time limits stand still: what waits at the gate is not to
    blame for it.
    """

    def __init__(self) -> None:
        self.num_in_flight = 0
        """Requests that have passed and whose replies no agent has taken."""
        self.untaken: set[Callable[[], int]] = set()
        """Say, each for an episode, how many replies to them have come all the same."""
        self._num_closings = 0
        self._num_standstills = 0
        self._limits: set[CancelScope] = set()
        self._left_s: dict[CancelScope, float] = {}
        # events belong to the event loop that first waits for them, and a runner may see several
        self._opened: asyncio.Event | None = None
        self._drained: asyncio.Event | None = None

    @property
    def is_closed(self) -> bool:
        """Whether requests have to wait."""
        return self._num_closings > 0

    @property
    def is_still(self) -> bool:
        """Whether time limits stand still."""
        return self._num_standstills > 0

    def close(self) -> None:
        """Let no request pass, until it was opened as often as closed."""
        self._num_closings += 1
        if self._opened is None:
            self._opened = asyncio.Event()

    def open(self) -> None:
        """Undo one `close`."""
        self._num_closings -= 1
        if not self._num_closings and self._opened is not None:
            self._opened.set()
            self._opened = None

    async def wait_open(self) -> None:
        """Wait until requests may pass."""
        while self._opened is not None:
            await self._opened.wait()

    async def wait_drained(self) -> None:
        """Wait until every request was answered, whether its agent has taken the reply or not.

        One that asks for several at once may be held up at the gate before it takes the first.
        """
        from anyio import move_on_after

        while self.num_in_flight > sum(num_untaken() for num_untaken in self.untaken):
            if self._drained is None:
                self._drained = asyncio.Event()
            with move_on_after(_LOOK_INTERVAL_S):
                await self._drained.wait()

    def land(self, count: int = 1) -> None:
        """Count requests as answered, or as given up."""
        self.num_in_flight -= count
        if not self.num_in_flight and self._drained is not None:
            self._drained.set()
            self._drained = None

    @contextmanager
    def limit(self, seconds: float) -> Iterator[CancelScope]:
        """Cancel what is within after so many seconds, not counting any `standstill`."""
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

    @contextmanager
    def standstill(self) -> Iterator[None]:
        """Let no time limit run while the context lasts."""
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

    def _stop(self, scope: CancelScope) -> None:
        from anyio import current_time

        self._left_s[scope] = scope.deadline - current_time()
        scope.deadline = math.inf
