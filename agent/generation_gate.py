"""A gate that requests to an engine pass, so that a weight update finds it quiet."""

from __future__ import annotations

import asyncio


class GenerationGate:
    """Open, or closed by as many as want it closed; counts the requests beyond it."""

    def __init__(self) -> None:
        self.num_in_flight = 0
        """Requests that have passed and were not answered."""
        self._num_closings = 0
        # events belong to the event loop that first waits for them, and a runner may see several
        self._opened: asyncio.Event | None = None
        self._drained: asyncio.Event | None = None

    @property
    def is_closed(self) -> bool:
        """Whether requests have to wait."""
        return self._num_closings > 0

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
        """Wait until no request is in flight."""
        while self.num_in_flight:
            if self._drained is None:
                self._drained = asyncio.Event()
            await self._drained.wait()

    def land(self, count: int = 1) -> None:
        """Count requests as answered, or as given up."""
        self.num_in_flight -= count
        if not self.num_in_flight and self._drained is not None:
            self._drained.set()
            self._drained = None
