"""Ctrl-C and SIGTERM while there is work worth keeping."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interruption:
    """Makes the first Ctrl-C or SIGTERM a request to stop, and the second one an end at once.

    Use it as a context manager. Until `stop_by` is called there is nothing to keep, and the
    first one is a `KeyboardInterrupt` too. A signal that the program was started to ignore
    stays ignored. Outside the main thread signals are left alone.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        self._stop: Callable[[], object] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stop_by(self, stop: Callable[[], object]) -> None:
        """From now on answer the first signal with ``stop``, called between two instructions."""
        self._stop = stop

    def _take(self, number: int, frame: FrameType | None) -> None:
        is_first, self.status = self.status is None, self.status or 128 + number
        if not is_first or self._stop is None:
            raise KeyboardInterrupt
        self._stop()
