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


class LogWriter:
    """Keeps episodes until they are on the disk; a thread of its own brings them there.

    An episode leaves the memory only when its segment is there for good, so that a failure
    loses nothing and the next attempt writes the same again. The thread keeps the log's lock
    as long as it may write, whatever becomes of those who wait for it.
    """

    def __init__(self, folder: LogFolder, options: LogOptions, lock: WriterLock) -> None:
        self._folder = folder
        self._lock = lock
        self._options = options
        self._pending: deque[tuple[float, EpisodeRow]] = deque()
        self._num_bytes = 0
        self._num_durable = 0
        self._failure: Exception | None = None
        self._unwritten: Exception | None = None
        self._closing = self._is_forgotten = False
        self._changed = threading.Condition()
        self._writing = threading.Lock()
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
                raise ValueError(f"log {self._folder.path} is closed")
            if self._failure is not None:
                failure = f"log {self._folder.path} cannot be written: {self._failure}"
                if not isinstance(self._failure, OSError):
                    raise RuntimeError(failure) from self._failure
                raise OSError(self._failure.errno, failure) from self._failure
            accept(row)
            self._pending.append((time.monotonic(), row))
            self._num_bytes += row.num_bytes
            if len(self._pending) == 1 or self._is_full():
                self._changed.notify_all()

    def flush(self) -> None:
        """Bring all that was kept before the call to the disk."""
        with self._changed:
            target = self._num_durable + len(self._pending)
        with self._writing:
            self._write_until(target)

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
        if self._unwritten is not None:
            raise self._unwritten

    def _write_until(self, target: int) -> None:
        """Write until so many episodes are durable; only who holds ``_writing`` may."""
        while self._num_durable < target:
            if not self._lock.held:
                raise ValueError(f"log {self._folder.path} is closed")
            try:
                self._write_one()
            except Exception as error:
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                raise

    def _write_one(self) -> None:
        """Write one segment; only who holds ``_writing`` may."""
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
            self._changed.notify_all()

    def _is_full(self) -> bool:
        options = self._options
        enough = min(options.segment_bytes, options.max_pending_bytes)
        return len(self._pending) >= options.segment_episodes or self._num_bytes >= enough

    def _seconds_left(self) -> float | None:
        """Return how long what waits may wait, or ``None`` where nothing does."""
        if not self._pending:
            return None
        if self._is_full() and self._failure is None:
            return 0.0
        return self._pending[0][0] + self._options.flush_seconds - time.monotonic()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closing and ((left := self._seconds_left()) is None or left > 0):
                    self._changed.wait(left)
                if self._closing:
                    break
            try:
                self.flush()
            except Exception:  # noqa: BLE001 - kept: the next append raises it
                with self._changed:  # the oldest is past its time now: it shall not spin
                    self._changed.wait_for(lambda: self._closing, self._options.flush_seconds)
        with self._writing:
            try:
                self._write_until(self._num_durable + len(self._pending))
            except Exception as error:  # kept: who closes raises it
                self._unwritten = error
                if self._is_forgotten:  # nobody does
                    raise
            finally:
                self._lock.release()


def end_writing(writer: LogWriter | None, lock: WriterLock | None) -> None:
    """Write what waits and let another writer in; a forked process has neither to do."""
    if writer is not None and lock is not None and lock.held:
        writer.close()
