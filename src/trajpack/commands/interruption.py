"""Handling of Ctrl-C and SIGTERM while a command has results to keep."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from types import FrameType
from typing import Any

from trajpack.commands.terminal import say


class Interruption:
    """Turns the first Ctrl-C or SIGTERM into a request to stop; the second one ends the command.

    Use it as a context manager. Outside `run` and before `save`, the first signal raises
    `KeyboardInterrupt` too. A signal that the program was started to ignore stays ignored.
    Outside the main thread signals are not handled.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        """Exit status of the first signal; None before it."""
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

    def save(self, text: str) -> None:
        """Print ``text`` on the first signal, and let the command finish."""
        self._stop = partial(say, text)

    def check(self) -> None:
        """Raise a KeyboardInterrupt if a signal came.

        The one that the signal raised may be lost: Python ignores exceptions in finalizers, and
        some packages catch all of them while they are imported.
        """
        if self.status is not None:
            raise KeyboardInterrupt

    async def run(
        self, work: Coroutine[Any, Any, None], *, on_stop: Callable[[], None], saving: str
    ) -> None:
        """Await ``work``; the first signal calls ``on_stop`` and cancels it, later ones `save`.

        Raises:
            KeyboardInterrupt: A signal came before, see `check`; ``work`` does not begin.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop() -> None:
            on_stop()
            task.cancel()

        self._stop = partial(loop.call_soon_threadsafe, stop)
        try:
            self.check()
            await work
        except asyncio.CancelledError:
            pass  # by the signal
        finally:
            work.close()
            self.save(saving)

    def _take(self, number: int, frame: FrameType | None) -> None:
        is_first, self.status = self.status is None, self.status or 128 + number
        if not is_first or self._stop is None:
            raise KeyboardInterrupt
        self._stop()
