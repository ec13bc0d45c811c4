"""What waits to be written to a log, and the thread that writes it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from trajpack.packing.log_files import WriterLock
from trajpack.packing.log_folder import LogFolder
from trajpack.packing.log_options import LogOptions
from trajpack.packing.log_rows import EpisodeRow

_LONGEST_NAP_S = 5.0
"""The thread looks that often, for it may be the one that collects a forgotten log, and closes
it: nobody wakes it then."""


class LogWriter:
    """Keeps episodes until they are on the disk; a thread of its own brings them there.

    An episode leaves the memory only when its segment is there for good, so that a failure
    loses nothing and the next attempt writes the same again. The thread alone writes, since no
    signal interrupts it, and keeps the log's lock until it ends.
    """

    def __init__(self, folder: LogFolder, options: LogOptions, lock: WriterLock) -> None:
        self._folder = folder
        self._lock = lock
        self._options = options
        self._pending: deque[tuple[float, EpisodeRow]] = deque()
        self._num_bytes = 0
        self._num_durable = 0
        self._attempt = self._asked = self._failed = 0  # attempts to write all, by number
        self._failure: Exception | None = None
        self._retry_at = 0.0
        self._closing = self._is_forgotten = self._has_ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="trajectory log", daemon=True)
        self._thread.start()

    @property
    def num_pending(self) -> int:
        """Episodes that are not on the disk yet."""
        return len(self._pending)

    def append(self, row: EpisodeRow, accept: Callable[[EpisodeRow], None]) -> None:
        """Keep an episode to be written soon, unless ``accept`` raises.

        Raises:
            OSError: If what was kept before cannot be written; then the episode is not kept.
            ValueError: If `close` was called meanwhile.
        """
        with self._changed:
            while self._num_bytes >= self._options.max_pending_bytes and not self._failure:
                self._changed.wait()
            if self._closing:
                raise self._closed()
            self._raise_failure()
            accept(row)
            self._pending.append((time.monotonic(), row))
            self._num_bytes += row.num_bytes
            if len(self._pending) == 1 or self._is_full():
                self._changed.notify_all()

    def flush(self) -> None:
        """Have the thread write all that was kept before the call, and wait for it.

        Raises:
            OSError: If it cannot be written.
            ValueError: If `close` was called meanwhile, and it could not.
        """
        with self._changed:
            target = self._num_durable + len(self._pending)
            asked = self._attempt + 1
            if self._pending:
                self._asked = asked
                self._changed.notify_all()
            while self._num_durable < target:
                if self._failed >= asked:
                    self._raise_failure()  # unless another attempt is under way, and goes well
                if self._has_ended:
                    raise self._closed()
                self._changed.wait()

    def close(self) -> None:
        """Have the thread write what waits, let go of the lock and end; wait for it.

        It does so even if this wait is interrupted.

        Raises:
            OSError: If what waits cannot be written.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is self._thread:  # it collects garbage: a forgotten log
            self._is_forgotten = True
            return
        self._thread.join()
        if self._pending:
            self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise what the last attempt failed for, if it did."""
        failure = self._failure
        if isinstance(failure, OSError):
            why = failure.strerror or str(failure)
            raise OSError(failure.errno, why, str(self._folder.path)) from failure
        if failure is not None:
            raise RuntimeError(f"log {self._folder.path} cannot be written: {failure}") from failure

    def _closed(self) -> ValueError:
        return ValueError(f"log {self._folder.path} is closed")

    def _run(self) -> None:
        is_last = False
        while not is_last:
            with self._changed:
                while not self._closing and (left := self._seconds_left()) > 0:
                    self._changed.wait(min(left, _LONGEST_NAP_S))
                is_last = self._closing
                self._attempt += 1
                target = self._num_durable + len(self._pending)
            try:
                while self._num_durable < target:
                    self._write_one()
            except Exception as error:  # kept: the next append raises it
                with self._changed:
                    self._failure, self._failed = error, self._attempt
                    self._retry_at = time.monotonic() + self._options.flush_seconds
                    self._changed.notify_all()
                if is_last and self._is_forgotten:  # nobody appends
                    raise
            finally:
                if is_last:
                    with self._changed:
                        self._has_ended = True
                        self._lock.release()
                        self._changed.notify_all()

    def _write_one(self) -> None:
        """Write one segment."""
        options, rows, size = self._options, list[EpisodeRow](), 0
        with self._changed:  # for a moment: who appends must not wait
            waiting = list(islice(self._pending, options.segment_episodes))
        for _, row in waiting:
            if rows and size + row.num_bytes > options.segment_bytes:
                break
            rows.append(row)
            size += row.num_bytes
        self._folder.add(rows, options)
        with self._changed:
            for _ in rows:
                self._pending.popleft()
            self._num_durable += len(rows)
            self._num_bytes -= size
            self._failure = None
            if not self._pending:
                self._asked = 0
            self._changed.notify_all()

    def _is_full(self) -> bool:
        options = self._options
        enough = min(options.segment_bytes, options.max_pending_bytes)
        return len(self._pending) >= options.segment_episodes or self._num_bytes >= enough

    def _seconds_left(self) -> float:
        """Return how long there is nothing to do."""
        if not self._pending:
            return _LONGEST_NAP_S
        if self._asked > self._attempt or (self._is_full() and self._failure is None):
            return 0.0
        since = self._pending[0][0] + self._options.flush_seconds
        return (since if self._failure is None else self._retry_at) - time.monotonic()


def end_writing(writer: LogWriter | None, lock: WriterLock | None) -> None:
    """Write what waits and let another writer in; a forked process has neither to do."""
    if writer is not None and lock is not None and lock.held:
        writer.close()
