"""The index of a log's episodes, and the thread that writes pending ones."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeAlias

from trajpack.packing.durable_files import LockTakenError, WriterLock
from trajpack.packing.trajectory_log.database import Entry, LogFile
from trajpack.packing.trajectory_log.options import (
    Damaged,
    DamagedLogError,
    LogInUseError,
    LogOptions,
)

_NAP_S = 5.0
"""Maximum sleep of the thread, seconds: an interrupted `LogWriter.append` may not wake it."""
_POLL_S = 1.0
"""Seconds between a waiting caller's checks that the thread still runs."""


class PendingEpisode(NamedTuple):
    """An episode that is not on the disk yet."""

    order: int
    """Position among all appended episodes."""
    since: float
    """Time of the append, monotonic clock, seconds."""
    name: str
    entry: Entry
    """Its row in the table ``episodes``, without number and session."""
    content: bytes
    """Its record."""


class EpisodeIndex:
    """Names and counts of the episodes in a log.

    Of several rows with one name the last one counts, but a failure never replaces a success.

    Signal handlers may use the log that they interrupt, or raise. So no method waits for another
    thread while it holds the lock, and a method that any thread may call has no call and no loop
    while it holds it: the interpreter runs handlers after calls and between iterations.

    Args:
        file: File of the log.
        damaged: ``"skip"`` reads all contents, warns of each damaged one, and leaves its row out;
            ``"raise"`` reads none.

    Raises:
        DamagedLogError: If the table ``episodes`` is damaged.
    """

    def __init__(self, file: LogFile, damaged: Damaged) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._written: dict[str, Entry] = {}
        self._num_rows = 0
        self.pending: dict[str, PendingEpisode] = {}
        """Pending episodes by name; one that is appended again replaces its predecessor."""
        self.num_pending_bytes = 0
        self.is_closed = False
        self.num_episodes = 0
        """Number of episodes; all counts include pending ones."""
        self.num_trajectories = 0
        self.num_turns = 0
        self.num_tokens = 0
        state, faults = file.start, dict[int, DamagedLogError]()
        for entries, state in file.entries(file.start, file.state.num_episodes):  # noqa: B007
            for entry, record in file.records(entries if damaged == "skip" else ()):
                if isinstance(record, DamagedLogError):
                    faults[entry.number] = record
            for entry in entries:
                replaced = self._written.get(entry.text)
                if entry.number in faults or (replaced and entry.failed and not replaced.failed):
                    continue
                self._add(entry.text, entry)
        file.check_end(state)
        self._num_rows = state.num_episodes
        self.num_episodes = len(self._written)
        for written in self._written.values():
            self._count(written, 1)
        for fault in faults.values():
            warnings.warn(f"1 episode skipped: {fault}", stacklevel=4)

    def __contains__(self, name: object) -> bool:
        return name in self.pending or name in self._written  # the order in which it moves

    def names(self, *, failed: bool) -> frozenset[str]:
        """Return the names of the episodes that failed, or of those that succeeded."""
        waiting = self.pending.copy()  # before the others: an episode moves from here to there
        outcomes = {name: row.failed for name, row in self._written.copy().items()}
        for name, one in waiting.items():
            if outcomes.get(name, 1):
                outcomes[name] = one.entry.failed
        return frozenset(name for name, outcome in outcomes.items() if outcome == failed)

    def take(self, episode: PendingEpisode) -> None:
        """Add a pending episode, unless it has succeeded before or the log is closed."""
        name, entry = episode.name, episode.entry
        with self._lock:
            waits, is_written = name in self.pending, name in self._written
            is_known = (waits and not self.pending[name].entry.failed) or (
                is_written and not self._written[name].failed
            )
            if not is_known and not self.is_closed:
                if waits:
                    self.num_pending_bytes -= self.pending[name].entry.num_bytes
                elif not is_written:
                    self.num_episodes += 1
                self.num_trajectories += entry.num_trajectories
                self.num_turns += entry.num_turns
                self.num_tokens += entry.num_tokens
                self.num_pending_bytes += entry.num_bytes
                self.pending[name] = episode
                return
        if is_known:
            raise ValueError(f"episode {name!r} is in the log already")
        raise self.closed_error()

    def move(self, batch: Sequence[PendingEpisode], entries: Sequence[Entry]) -> None:
        """Mark episodes as written, with their rows; idempotent.

        Only the writer's thread, which runs no signal handlers, may call it.
        """
        with self._lock:
            for one, entry in zip(batch, entries, strict=True):
                self._add(one.name, entry)  # before it leaves `pending`: it is always in one
                if self.pending.get(one.name) is one:
                    del self.pending[one.name]
                    self.num_pending_bytes -= entry.num_bytes
                self._num_rows = entry.number + 1

    def close(self) -> None:
        """Refuse episodes from now on."""
        with self._lock:  # an episode that is being added is added
            self.is_closed = True

    def give_up(self) -> None:
        """Remove the pending episodes."""
        with self._lock:
            lost, self.pending, self.num_pending_bytes = self.pending, {}, 0
        for one in lost.values():
            self._count(one.entry, -1)
            self.num_episodes -= one.name not in self._written

    def lose(self, entry: Entry) -> None:
        """Remove a row whose content is damaged."""
        name, number = entry.text, entry.number
        with self._lock:
            if name not in self._written or self._written[name].number != number:
                return
            del self._written[name]
            self.num_episodes -= name not in self.pending
        self._count(entry, -1)

    def counting(self) -> tuple[int, set[int]]:
        """Return the number of rows of the log, and the numbers of those that count."""
        with self._lock:
            num_rows, written = self._num_rows, {**self._written}
        return num_rows, {row.number for row in written.values()}

    def closed_error(self) -> ValueError:
        """Return the error of a closed log."""
        return ValueError(f"log {self._file.path.parent} is closed")

    def _add(self, name: str, entry: Entry) -> None:
        self._written[name] = entry

    def _count(self, entry: Entry, sign: int) -> None:
        self.num_trajectories += sign * entry.num_trajectories
        self.num_turns += sign * entry.num_turns
        self.num_tokens += sign * entry.num_tokens


Reply: TypeAlias = "SimpleQueue[Exception | None]"


class LogWriter:
    """The thread that writes pending episodes.

    Signal handlers run in the main thread, between any two steps, and may raise there. So one
    step adds an episode to the index, the thread does the rest, and each caller waits on its own
    queue, which it may leave at any moment. An episode is pending until its transaction is
    complete, so that a failure loses none.
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
        """Held while the file is written, to keep this process from forking."""
        _writers.add(self)
        self._thread = threading.Thread(target=self._run, name="trajectory log", daemon=True)
        self._thread.start()

    @property
    def is_ours(self) -> bool:
        """Whether this process opened the log, and is not a forked child of it."""
        return self._process == os.getpid()

    def append(self, name: str, entry: Entry, content: bytes) -> None:
        """Add a pending episode; after an error of earlier ones it is not added."""
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
        """Have the thread write all pending episodes, and wait for it."""
        if self._index.pending:
            self._raise(self._ask())

    def close(self) -> None:
        """Have the thread write pending episodes, release the lock and end; wait for it.

        The thread does so even if this wait is interrupted.
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
        """Have all pending episodes written now; return the error, if any."""
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
            # give up episodes that could not be written, release the lock and answer all callers
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
        """Sleep until there may be work; return whether to close."""
        closing, timeout = False, 0.0 if self._has_ended else max(0.0, self._seconds_left())
        with suppress(Empty):
            while True:
                reply, is_close = self._inbox.get(timeout=timeout) or (None, False)
                timeout = 0.0
                closing |= is_close
                if reply is not None:
                    asked.append(reply)
        return closing

    def _seconds_left(self) -> float:
        """Return the seconds until pending episodes are due."""
        waiting = list(self._index.pending.values())
        if not waiting:
            return _NAP_S
        if self._failure is None and self._is_full():
            return 0.0
        since = min(one.since for one in waiting) + self._options.flush_seconds
        return min(_NAP_S, (since if self._failure is None else self._retry_at) - time.monotonic())

    def _is_full(self) -> bool:
        options, index = self._options, self._index
        enough = min(options.segment_bytes, options.max_pending_bytes)
        return len(index.pending) >= options.segment_episodes or index.num_pending_bytes >= enough

    def _write_all(self) -> None:
        """Write all pending episodes; an error is kept, and they are tried again later."""
        waiting = sorted(self._index.pending.values())
        try:
            if self._batch:  # the batch that failed, unchanged: a part of it may be on the disk
                self._write(self._batch)
            for batch in self._batches(waiting):
                self._batch = batch
                self._write(batch)
            self._failure = None
        except Exception as error:  # noqa: BLE001 - kept: the next append raises it
            self._failure = error
            self._retry_at = time.monotonic() + self._options.flush_seconds

    def _batches(self, waiting: list[PendingEpisode]) -> Iterator[list[PendingEpisode]]:
        """Yield episodes that are still pending in pieces of one transaction each."""
        options, batch, size = self._options, list[PendingEpisode](), 0
        for one in waiting:
            if self._index.pending.get(one.name) is not one:
                continue  # written with the batch that had failed, or appended again
            too_large = size + len(one.content) > options.segment_bytes
            if batch and (len(batch) == options.segment_episodes or too_large):
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
            self._state, self._batch = state, []  # in one step: else it would be written twice


_writers: weakref.WeakSet[LogWriter] = weakref.WeakSet()
_forking: dict[int, list[LogWriter]] = {}
"""Writers that may not write, by the id of the thread that forks this process."""


def _before_fork() -> None:
    """Wait for transactions: a child takes its parent's locks in SQLite for its own."""
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
    _forking.clear()  # entries of threads that do not exist in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )
