"""`SilenceTimer`: a warning when nothing happens in a runner for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from trajpack.packing.text import one_line

_logger = logging.getLogger(__name__)


class SilenceTimer:
    """Warns when no sign has come for ``patience_s``, next for twice as long, and so on.

    A sign is whatever happens: a request, a reply, a call of the environment, its answer, an
    episode's begin. A warning ends nothing, since a slow answer is no error.

    Args:
        patience_s: Seconds before the first warning; None never warns.
        waits_for: Returns what the runner waits for; an empty text if the silence is in order.
    """

    def __init__(self, patience_s: float | None, waits_for: Callable[[], str]) -> None:
        self._patience_s = patience_s
        self._waits_for = waits_for
        self._next_s = self._sign_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to watch, within an event loop."""
        if self._patience_s is not None:
            self._loop, self._next_s = asyncio.get_running_loop(), self._patience_s
            self.sign()
            self._plan_look(self._loop, self._next_s)

    def stop(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop = self._timer = None

    def sign(self) -> None:
        """Note that something has happened."""
        if self._loop is not None:
            self._sign_at = self._loop.time()

    def _plan_look(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        planned = loop.time() + seconds
        self._timer = loop.call_at(planned, self._look, loop, planned)

    def _look(self, loop: asyncio.AbstractEventLoop, planned: float) -> None:
        now, what = loop.time(), self._waits_for()
        if not what or now - planned > 1.0:  # in order, or the event loop stood still
            self._sign_at = now
        silent_s = now - self._sign_at
        if silent_s >= self._next_s - 0.001:  # a rounding
            _logger.warning("nothing has happened for %.0f s: %s", silent_s, one_line(what, 2000))
            self._next_s *= 2
        self._plan_look(loop, self._next_s - silent_s)
