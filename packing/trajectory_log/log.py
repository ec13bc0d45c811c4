"""`TrajectoryLog`: episodes of a rollout in a folder on disk."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Literal

from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.buffer.trajectory_arrays import TrajectoryArrays
from trajpack.packing.conversion import as_integer, as_number, several
from trajpack.packing.durable_files import make_folder
from trajpack.packing.representation import brief_repr
from trajpack.packing.token_fields import TokenField, check_fields
from trajpack.packing.trajectory_log.database import LOG, LogFile, Row, locked
from trajpack.packing.trajectory_log.records import DamagedLogError, Record, decoded_text, encoded
from trajpack.packing.types import Trajectory

_FLUSH_BYTES = 16 << 20
"""Pending bytes after which `TrajectoryLog.append` flushes."""
_APPEND_WAIT_S, _FLUSH_WAIT_S = 1.0, 60.0
"""Seconds that `TrajectoryLog.append` and `TrajectoryLog.flush` wait for readers, at most."""
_MAX_ERROR_CHARS = 2000
"""Characters kept of an episode's error."""
_FILLED_AT_ONCE = 256
"""Episodes added to a buffer in one call: one each takes longer, all take much memory."""


@dataclass(frozen=True)
class LoggedEpisode:
    """One episode of a log."""

    episode: str
    """Name of the episode."""
    trajectories: tuple[Trajectory, ...]
    """Its trajectories; empty where it failed. Arrays are int32 and float32."""
    error: str | None = None
    """Reason of its failure, or ``None``."""

    __repr__ = brief_repr


class TrajectoryLog:
    """An append-only log of episodes in a folder, durable across crashes of its writer.

    An episode is in the log once: one that succeeded stays as it is, one that failed may be
    appended again. Trajectories come back bit for bit. A process that is killed, or a machine that
    loses power, loses at most the episodes that were not flushed. Methods may be called from any
    thread of the process that opened the log.

    Made by `open`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from trajpack import Trajectory, Turn
        >>> trajectory = Trajectory("q0@0", [Turn([1, 2], [3], [-0.5], reward=1.0)])
        >>> with TemporaryDirectory() as folder:
        ...     with TrajectoryLog.open(folder) as log:
        ...         log.append("q0@0", [trajectory])
        ...         log.append("q0@1", [], error="timed out")
        ...     with TrajectoryLog.open(folder, mode="read") as log:
        ...         print(log)
        ...         [episode.error for episode in log.replay()]
        TrajectoryLog(2 episodes, 1 of them failed; 1 trajectories, 3 tokens)
        [None, 'timed out']
    """

    def __init__(
        self,
        file: LogFile,
        lock: sqlite3.Connection | None,
        *,
        damaged: str,
        flush_episodes: int,
        flush_seconds: float,
    ) -> None:
        self._file = file
        self._folder = file.path.parent
        self._lock = lock
        self._flush_episodes = flush_episodes
        self._flush_seconds = flush_seconds
        self._process = os.getpid()
        self._is_closed = False
        self._writing = threading.RLock()
        self._guard = threading.RLock()
        self._next = file.next_number
        self._pending: dict[int, tuple[Row, bytes]] = {}
        self._due = time.monotonic() + flush_seconds
        self._failure: Exception | None = None
        self._index = _index_of(file, damaged)
        self.fields = file.fields
        """Extra per-token fields of every turn."""

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        mode: Literal["append", "read"] = "append",
        fields: Sequence[TokenField] | None = None,
        damaged: Literal["raise", "skip"] = "raise",
        flush_episodes: int = 1024,
        flush_seconds: float = 5.0,
    ) -> TrajectoryLog:
        """Open the log in ``folder``.

        Args:
            folder: Folder of the log, created if missing with ``mode="append"``. A relative path
                is resolved now.
            mode: ``"append"``: as the only writer. ``"read"``: as one of many readers of the
                episodes that are durable now; a writer may append meanwhile.
            fields: Extra fields of every turn; must be those of an existing log. ``None`` takes
                these, or none for a new log.
            damaged: ``"raise"`` raises `DamagedLogError` when a damaged episode is read.
                ``"skip"`` reads all episodes now, warns of each that is damaged or missing, and
                goes on as if it had never been logged.
            flush_episodes: `append` flushes when so many episodes are pending (or 16 MiB).
            flush_seconds: `append` flushes when the last flush was so many seconds ago.

        Raises:
            FileNotFoundError: If there is no log to read.
            DamagedLogError: If the log is damaged; contents of episodes are checked by `replay`.
            TypeError, ValueError: If ``fields`` are not those of the log, the folder of a new log
                holds other files, a limit is no positive number, or ``mode`` or ``damaged`` is
                unknown.
            OSError: If another writer has the log open (``EBUSY``), or the folder cannot be read
                or written.
        """
        if mode not in ("append", "read"):
            raise ValueError(f"mode must be 'append' or 'read', got {mode!r}")
        if damaged not in ("raise", "skip"):
            raise ValueError(f"damaged must be 'raise' or 'skip', got {damaged!r}")
        if as_integer("flush_episodes", flush_episodes) < 1:
            raise ValueError(f"flush_episodes must be at least 1, got {flush_episodes}")
        if not as_number("flush_seconds", flush_seconds) > 0:
            raise ValueError(f"flush_seconds must be more than 0, got {flush_seconds}")
        place = Path(os.path.abspath(folder))
        declared = None if fields is None else check_fields(fields)
        if mode == "read" and not os.path.lexists(place / LOG):
            raise FileNotFoundError(f"{place} holds no trajectory log: it has no {LOG}")
        lock = None
        if mode == "append":
            make_folder(place)
            lock = locked(place)
        try:
            if not os.path.lexists(place / LOG):
                LogFile.create(place / LOG, declared or ())
            file = LogFile(place / LOG, to_append=lock is not None)
            _check_fields_of(file, declared)
            return cls(
                file,
                lock,
                damaged=damaged,
                flush_episodes=flush_episodes,
                flush_seconds=flush_seconds,
            )
        except BaseException:
            if lock is not None:
                lock.close()
            raise

    def __enter__(self) -> TrajectoryLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # also where `__init__` has failed
            self.close()

    def __len__(self) -> int:
        """Number of episodes, failed ones included."""
        return len(self._index)

    def __contains__(self, episode: object) -> bool:
        """Return whether an episode is in the log, durable or not, failed or not."""
        return episode in self._index

    def __repr__(self) -> str:
        return (
            f"TrajectoryLog({len(self)} episodes, {len(self.failed)} of them failed; "
            f"{self.num_trajectories} trajectories, {self.num_tokens:,} tokens)"
        )

    @property
    def finished(self) -> frozenset[str]:
        """Names of the episodes that succeeded. A copy; ``name in log`` looks one up."""
        return frozenset(name for name, row in self._rows() if not row.failed)

    @property
    def failed(self) -> frozenset[str]:
        """Names of the episodes that failed, and were not appended again since. A copy."""
        return frozenset(name for name, row in self._rows() if row.failed)

    @property
    def episodes(self) -> frozenset[str]:
        """Names of all episodes, durable or not, failed or not. A copy."""
        return frozenset(name for name, _ in self._rows())

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories, durable or not."""
        return sum(row.num_trajectories for _, row in self._rows())

    @property
    def num_turns(self) -> int:
        """Number of turns, durable or not."""
        return sum(row.num_turns for _, row in self._rows())

    @property
    def num_tokens(self) -> int:
        """Number of tokens, each counted once, however many turns repeat it."""
        return sum(row.num_tokens for _, row in self._rows())

    @property
    def num_pending(self) -> int:
        """Number of records that are not durable yet."""
        return len(self._pending)

    def append(
        self, episode: str, trajectories: Sequence[Trajectory], *, error: str | None = None
    ) -> None:
        """Check an episode and keep it in memory; at the limits of `open`, flush all of them.

        Args:
            episode: Name; any text, never used as a path.
            trajectories: Trajectories of the episode; empty if it failed. They are copied.
            error: Reason of a failure; cut off after 2,000 characters.

        Raises:
            TypeError, ValueError: If the episode has succeeded before, if it failed and has
                trajectories, if a buffer with the log's fields would refuse one, or if the log is
                closed, opened for reading or by another process.
            DamagedLogError, OSError: If earlier episodes could not be written, as on a full disk.
                They are kept and tried again; this one is not kept. A reader that holds the file
                is no such error.
        """
        self._check_writable()
        if not isinstance(episode, str):
            raise TypeError(f"episode must be a str, got {type(episode).__name__}")
        if error is not None and not isinstance(error, str):
            raise TypeError(f"error must be a str or None, got {type(error).__name__}")
        expected = f"episode {episode!r}: trajectories must be a sequence of Trajectory"
        paths = several(expected, trajectories)
        if error is not None and paths:
            raise ValueError(
                f"episode {episode!r} failed, but comes with {len(paths)} trajectories; "
                "expected none"
            )
        reason = None if error is None else error[:_MAX_ERROR_CHARS]
        record = Record(episode, reason, TrajectoryArrays.of(paths, self.fields))
        content, row = encoded(record), Row.of(0, record)
        if self._failure is not None and getattr(self._failure, "errno", None) != errno.EBUSY:
            self.flush()
        with self._guard:
            self._check_writable()
            before = self._index.get(episode)
            if before is not None and not before.failed:
                raise ValueError(f"episode {episode!r} is in the log already")
            row = row._replace(number=self._next)
            self._pending[self._next] = (row, content)
            self._next += 1
            self._index[episode] = row
            size = sum(len(content) for _, content in self._pending.values())
            is_full = len(self._pending) >= self._flush_episodes or size >= _FLUSH_BYTES
        if (is_full and self._failure is None) or time.monotonic() >= self._due:
            with suppress(OSError, DamagedLogError):  # the next call raises it
                self._write(_APPEND_WAIT_S)

    def flush(self) -> None:
        """Make all episodes that were appended before the call durable, in one transaction.

        On an event loop, call it in a thread: ``await asyncio.to_thread(log.flush)``.

        Raises:
            DamagedLogError, OSError: If they cannot be written: the disk is full, the file is
                damaged or no longer at its path, or a reader has held it for a minute
                (``EBUSY``). They are kept and tried again.
            ValueError: If the log is closed, opened for reading or by another process.
        """
        self._check_writable()
        self._write(_FLUSH_WAIT_S)

    def close(self) -> None:
        """Flush, and release the log for another writer. Closing twice does nothing.

        Raises:
            DamagedLogError, OSError: As `flush`. The log is still open then, with all pending
                episodes, and may be closed again.
        """
        if self._process != os.getpid():
            return
        with self._writing:
            while not self._is_closed:
                self._write(_FLUSH_WAIT_S)
                with self._guard:
                    self._is_closed = not self._pending
            if self._lock is not None:
                self._lock.close()

    def replay(self) -> Iterator[LoggedEpisode]:
        """Yield the episodes that were durable when the log was opened, and those flushed since.

        Each is yielded once, in the order in which they were appended; an episode that failed and
        was appended again in the place of its last record. Episodes that another process has
        appended since `open` are not yielded. Arrays are views of one piece of memory per episode.

        Raises:
            DamagedLogError: If an episode is damaged.
            OSError: If the file cannot be read.
            ValueError: If another process opened the log.
        """
        for name, error, arrays in self._records():
            yield LoggedEpisode(name, tuple(arrays.trajectories()), error)

    def fill(self, buffer: TrajectoryBuffer) -> int:
        """Add the trajectories of all episodes that `replay` yields; return their number.

        Raises:
            DamagedLogError, OSError: As `replay`.
            ValueError: As `replay`, if the buffer's fields are not the log's, before anything is
                added, or if it is full: then it holds the first episodes that fit.
        """
        _check_fields_of(self._file, buffer.fields)
        before, records = len(buffer), self._records()
        while some := list(islice(records, _FILLED_AT_ONCE)):
            buffer.extend([path for record in some for path in record.arrays.trajectories()])
        return len(buffer) - before

    def _rows(self) -> list[tuple[str, Row]]:
        with self._guard:
            return list(self._index.items())

    def _records(self) -> Iterator[Record]:
        """Yield the episodes that count and are durable now."""
        self._check_process()
        rows = sorted(row for _, row in self._rows() if row.number not in self._pending)
        for _, record in self._file.records(rows):
            if isinstance(record, DamagedLogError):
                raise record
            yield record

    def _write(self, wait_s: float) -> None:
        """Write what is pending in one transaction; after an error it is pending as before."""
        with self._writing:
            with self._guard:
                batch = list(self._pending.values())
            try:
                if batch:
                    self._file.append(batch, wait_s)
                self._failure = None
            except Exception as error:
                self._failure = error
                raise
            finally:
                self._due = time.monotonic() + self._flush_seconds
            with self._guard:
                for row, _ in batch:
                    del self._pending[row.number]

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise ValueError(f"log {self._folder} belongs to the process that opened it")

    def _check_writable(self) -> None:
        self._check_process()
        if self._is_closed:
            raise ValueError(f"log {self._folder} is closed")
        if self._lock is None:
            raise ValueError(f"log {self._folder} is opened for reading")


def _index_of(file: LogFile, damaged: str) -> dict[str, Row]:
    """Return the last row of each episode; no failure takes the place of a success."""
    rows, faults = file.rows, [] if file.fault is None else [file.fault]
    if faults and (damaged == "raise" or not rows):
        raise faults[0]
    if damaged == "skip":
        rows = []
        for row, record in file.records(file.rows):
            if isinstance(record, Record):
                rows.append(row)
            else:
                faults.append(record)
        for fault in faults:
            warnings.warn(f"skipped: {fault}", stacklevel=4)
    index: dict[str, Row] = {}
    for row in rows:
        name = decoded_text(row.name)
        if not (row.failed and name in index and not index[name].failed):
            index[name] = row
    return index


def _check_fields_of(file: LogFile, fields: Sequence[TokenField] | None) -> None:
    """Raise a `ValueError` unless these are a log's fields; ``None`` stands for any."""
    if fields is None or [field.as_json() for field in fields] == [
        field.as_json() for field in file.fields
    ]:
        return
    wanted, begun_with = ([field.name for field in some] for some in (fields, file.fields))
    raise ValueError(
        f"log {file.path.parent} was begun with fields {begun_with}, got {wanted}; names, "
        "dtypes, shapes, fills and order must be the same"
    )
