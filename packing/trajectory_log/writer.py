"""The thread that writes what was appended to a log, and what waits for it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import TypeAlias

from trajpack.packing.durable_files import LockTakenError, WriterLock
from trajpack.packing.trajectory_log.database import Entry, LogFile
from trajpack.packing.trajectory_log.index import EpisodeIndex, PendingEpisode
from trajpack.packing.trajectory_log.options import DamagedLogError, LogInUseError, LogOptions

_NAP_S = 5.0
"""Seconds that the thread sleeps at most: an interrupted `LogWriter.append` may not wake it."""
_POLL_S = 1.0
"""Seconds after which a caller looks whether the thread still runs."""


Reply: TypeAlias = "SimpleQueue[Exception | None]"


class LogWriter:
    """Keeps episodes until they are on the disk; a thread of its own brings them there.

    Signal handlers run in the main thread, between any two steps, and may raise there. So one
    step adds an episode to the index, which both names it and hands it over; the thread does all
    else; and a caller waits on a queue of its own, which it may leave at any moment. An episode
    is pending until its transaction is complete: a failure loses nothing.
    """

    def __init__(
        self, file: LogFile, index: EpisodeIndex, lock: WriterLock, *, options: LogOptions
    ) -> None:
        self._file = file
        self._index = index
        self._lock = lock
        self._options = options
        self._folder = file.path.parent
        self._state = file.state
        self._process = os.getpid()
        self._order = count()
        self._batch: list[PendingEpisode] = []
        self._failure: Exception | None = None
        self._retry_at = 0.0
        self._has_ended = False
        self._inbox: SimpleQueue[tuple[Reply | None, bool] | None] = SimpleQueue()
        self.transaction = threading.RLock()
        """Held while the file is written: this process does not fork meanwhile."""
        _writers.add(self)
        self._thread = threading.Thread(target=self._run, name="trajectory log", daemon=True)
        self._thread.start()

    @property
    def is_ours(self) -> bool:
        """Whether this process opened the log, and is not a forked child of it."""
        return self._process == os.getpid()

    def append(self, name: str, entry: Entry, content: bytes) -> None:
        """Keep an episode to be written soon.

        Raises:
            OSError: If what was kept before cannot be written; then the episode is not kept.
            ValueError: If it is in the log already, or the log is closed.
        """
        index, most = self._index, self._options.max_pending_bytes
        while index.num_pending_bytes >= most and self._failure is None:
            self._ask()
        if not index.is_closed:
            self._raise(self._failure)
        was_empty = not index.pending
        index.take(PendingEpisode(next(self._order), time.monotonic(), name, entry, content))
        if was_empty or self._is_full():
            self._inbox.put(None)

    def flush(self) -> None:
        """Have the thread write all that was kept before the call, and wait for it.

        Raises:
            OSError: If it cannot be written.
            ValueError: If `close` was called meanwhile, and it could not.
        """
        if self._index.pending:
            self._raise(self._ask())

    def close(self) -> None:
        """Have the thread write what waits, release the lock and end; wait for it.

        It does so even if this wait is interrupted.

        Raises:
            OSError: If what waits cannot be written; it is lost then.
        """
        if self._has_ended or not self.is_ours:
            return
        if threading.get_ident() in {*_forking, self._thread.ident}:
            self._inbox.put((None, True))  # the garbage collector calls, and may not wait
            return
        self._raise(self._ask(close=True))

    def _raise(self, failure: Exception | None) -> None:
        """Raise an error of the thread as one of the caller's."""
        if isinstance(failure, OSError):
            why = failure.strerror or str(failure)
            raise OSError(failure.errno, why, str(self._folder)) from failure
        if isinstance(failure, (DamagedLogError, LogInUseError)):
            raise type(failure)(str(failure)) from failure
        if failure is not None:
            raise RuntimeError(f"log {self._folder} cannot be written: {failure}") from failure

    def _ask(self, *, close: bool = False) -> Exception | None:
        """Have all that waits written now; return why it failed, if it did."""
        if threading.get_ident() in _forking:  # a signal handler calls
            raise RuntimeError(f"log {self._folder} cannot be written while this process forks")
        reply: Reply = SimpleQueue()
        self._inbox.put((reply, close))
        while True:
            try:
                return reply.get(timeout=0.0 if self._has_ended else _POLL_S)
            except Empty:
                if self._has_ended:
                    return self._failure or (
                        self._index.closed_error() if self._index.pending else None
                    )

    def _run(self) -> None:
        asked: list[Reply] = []
        closing = False
        try:
            while not closing:
                closing = self._wait(asked) or not self._lock.held  # an interrupted `open` let go
                if closing:
                    self._index.close()
                if asked or closing or self._seconds_left() <= 0:
                    self._write_all()
                while asked and not closing:
                    asked.pop().put(self._failure)
        finally:
            self._end(asked)

    def _end(self, asked: list[Reply]) -> None:
        """Give up what could not be written, release the lock and answer all who wait."""
        self._index.close()
        failure = self._failure if self._index.pending else None
        self._index.give_up()
        self._lock.close()
        self._has_ended = True
        self._wait(asked)
        for reply in asked:
            reply.put(failure)
        if failure is not None and not asked:
            raise failure  # to threading.excepthook, since no caller waits

    def _wait(self, asked: list[Reply]) -> bool:
        """Sleep until there may be something to do; return whether to close."""
        closing, timeout = False, 0.0 if self._has_ended else max(0.0, self._seconds_left())
        with suppress(Empty):
            while True:
                message = self._inbox.get(timeout=timeout)
                timeout = 0.0
                reply, is_close = message or (None, False)
                closing |= is_close
                if reply is not None:
                    asked.append(reply)
        return closing

    def _seconds_left(self) -> float:
        """Return how long there is nothing to write."""
        waiting = list(self._index.pending.values())
        if not waiting:
            return _NAP_S
        if self._failure is None and self._is_full():
            return 0.0
        since = min(one.since for one in waiting) + self._options.flush_seconds
        return min(_NAP_S, (since if self._failure is None else self._retry_at) - time.monotonic())

    def _is_full(self) -> bool:
        options = self._options
        enough = min(options.segment_bytes, options.max_pending_bytes)
        index = self._index
        return len(index.pending) >= options.segment_episodes or index.num_pending_bytes >= enough

    def _write_all(self) -> None:
        """Write all that waits now; what fails is kept for the next attempt."""
        waiting = sorted(self._index.pending.values())
        try:
            if self._batch:  # the very batch that failed: a part of it may be on the disk
                self._write(self._batch)
            for batch in self._batches(waiting):
                self._batch = batch
                self._write(batch)
            self._failure = None
        except Exception as error:  # noqa: BLE001 - kept: the next append raises it
            self._failure = error
            self._retry_at = time.monotonic() + self._options.flush_seconds

    def _batches(self, waiting: list[PendingEpisode]) -> Iterator[list[PendingEpisode]]:
        """Yield what still waits in pieces of one transaction each."""
        options, batch, size = self._options, list[PendingEpisode](), 0
        for one in waiting:
            if self._index.pending.get(one.name) is not one:
                continue  # written with the batch that had failed, or appended again
            if (
                len(batch) == options.segment_episodes
                or size + len(one.content) > options.segment_bytes
            ):
                if batch:
                    yield batch
                batch, size = [], 0
            batch.append(one)
            size += len(one.content)
        if batch:
            yield batch

    def _write(self, batch: list[PendingEpisode]) -> None:
        """Write a batch in one transaction."""
        with self.transaction:
            try:
                self._lock.check()
            except LockTakenError as error:
                raise LogInUseError(
                    f"log {self._folder} may have another writer: {error}"
                ) from error
            written = [(one.entry, one.content) for one in batch]
            state, entries = self._file.append(self._state, written)
            self._index.move(batch, entries)
            self._state, self._batch = state, []  # together: else it would be written twice


_writers: weakref.WeakSet[LogWriter] = weakref.WeakSet()
_forking: dict[int, list[LogWriter]] = {}
"""Writers that may not write, by the thread that forks this process."""


def _before_fork() -> None:
    """Wait for transactions: a child takes locks that its parent holds in SQLite for its own."""
    held = _forking[threading.get_ident()] = sorted(_writers, key=id)  # all threads in one order
    for writer in held:
        writer.transaction.acquire()


def _after_fork() -> None:
    for writer in _forking.get(threading.get_ident(), ()):
        with suppress(RuntimeError):  # not acquired: the wait was interrupted
            writer.transaction.release()
    _forking.pop(threading.get_ident(), None)


def _after_fork_in_child() -> None:
    _after_fork()
    _forking.clear()  # of threads that are not here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )
