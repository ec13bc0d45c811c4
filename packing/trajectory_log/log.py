"""`TrajectoryLog`: episodes of a rollout in a folder on disk."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.buffer.trajectory_arrays import TrajectoryArrays
from trajpack.packing.durable_files import LockTakenError, WriterLock, make_folder
from trajpack.packing.representation import brief_repr
from trajpack.packing.token_fields import TokenField, check_fields
from trajpack.packing.trajectory_log.database import LOG, Entry, LogFile
from trajpack.packing.trajectory_log.options import DamagedLogError, LogInUseError, LogOptions
from trajpack.packing.trajectory_log.parquet import MANIFEST, OldLog, write_parquet
from trajpack.packing.trajectory_log.records import Record, encoded
from trajpack.packing.trajectory_log.salvage import salvage
from trajpack.packing.trajectory_log.writer import EpisodeIndex, LogWriter
from trajpack.packing.types import Trajectory

LOCK = "writer.lock"
_FILLED_AT_ONCE = 256
"""Episodes added to a buffer in one call: one each takes longer, all take much memory."""
Mode: TypeAlias = Literal["append", "read"]


@dataclass(frozen=True)
class LoggedEpisode:
    """One episode of a log.

    Attributes:
        episode: Name of the episode.
        trajectories: Trajectories of the episode; empty where it failed. Arrays are int32 and
            float32.
        error: Reason of the failure, or ``None``.
    """

    episode: str
    trajectories: tuple[Trajectory, ...]
    error: str | None = None

    __repr__ = brief_repr


class TrajectoryLog:
    """An append-only log of episodes in a folder, durable across crashes of its writer.

    An episode is in the log once: one that succeeded stays as it is, one that failed may be
    appended again. One SQLite file holds each token once, and gives trajectories back bit for
    bit. `flush` makes appended episodes durable, and so does a thread at the limits of
    `LogOptions`: a process that is killed, or a machine that loses power, loses at most the
    episodes that were not flushed. Methods may be called from any thread; a signal handler may
    raise inside any of them, or use the log that it interrupts.

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

    def __init__(self, file: LogFile, options: LogOptions, lock: WriterLock | None = None) -> None:
        self._file = file
        self._folder = file.path.parent
        self._options = options
        self._index = EpisodeIndex(file, options.damaged)
        self._is_closed = False
        self._writer: LogWriter | None = None
        if lock is not None:
            self._writer = LogWriter(file, self._index, lock, options=options)
            weakref.finalize(self, self._writer.close)  # at exit, at the latest
        self.fields = file.fields
        """Extra per-token fields of every turn."""

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        mode: Mode = "append",
        fields: Sequence[TokenField] | None = None,
        options: LogOptions | None = None,
    ) -> TrajectoryLog:
        """Open the log in ``folder``.

        Args:
            folder: Folder of the log, created if missing with ``mode="append"``. A relative path
                is resolved now.
            mode: ``"append"``: as the only writer; a log that an earlier release wrote as Parquet
                segments is converted, and its files stay. ``"read"``: as one of many readers of
                the durable episodes; a writer may append meanwhile.
            fields: Extra fields of every turn; must be those of an existing log. ``None`` takes
                these, or none for a new log.
            options: Limits of a transaction, and treatment of damage.

        Raises:
            FileNotFoundError: If there is no log to read.
            LogInUseError: If another writer has the log open.
            DamagedLogError: If the log is damaged; contents of episodes are read and checked by
                `replay`.
            ValueError: If ``fields`` are not those of the log, the folder holds other files, a
                later release wrote the log, an earlier one wrote it and ``mode`` is ``"read"``,
                or ``mode`` is unknown.
            OSError: If the folder cannot be read or written.
            ImportError: If a log is to be converted and pyarrow, the extra ``[log]``, is missing.

        Cost: reads about 60 bytes an episode, and takes about 5 µs for each. With
            ``LogOptions(damaged="skip")`` it reads and checks all of the log.
        """
        place = Path(os.path.abspath(folder))
        chosen = LogOptions() if options is None else options
        declared = None if fields is None else check_fields(fields)
        if mode == "read":
            if not os.path.lexists(place / LOG):
                raise _missing(place)
            return cls(_checked(LogFile(place / LOG), declared), chosen)
        if mode != "append":
            raise ValueError(f"mode must be 'append' or 'read', got {mode!r}")
        lock = _locked(place)
        try:
            if not os.path.lexists(place / LOG):
                _create(place, declared or (), chosen)
            file = LogFile(place / LOG, to_append=True)
            return cls(_checked(file, declared), chosen, lock)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def salvage(
        cls,
        damaged: str | os.PathLike[str],
        folder: str | os.PathLike[str],
        *,
        fields: Sequence[TokenField] | None = None,
    ) -> None:
        """Write a new log with all whole episodes of a log whose file is damaged.

        Args:
            damaged: Folder of the damaged log, which is only read.
            folder: Folder of the new log, new or empty.
            fields: Extra fields of the log, if its file does not say them any more.

        Raises:
            DamagedLogError: If ``fields`` is ``None`` and the file does not say them.
            LogInUseError, OSError, ValueError: As `open`, for ``folder``.

        Warns:
            UserWarning: For each episode of which the file has a part.

        Cost: reads the file once, and the new one.
        """
        source, place = Path(os.path.abspath(damaged)) / LOG, Path(os.path.abspath(folder))
        with closing(_locked(place)):
            _check_empty(place)
            salvage(source, place / LOG, fields)

    def __enter__(self) -> TrajectoryLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        """Number of episodes, failed ones included."""
        return self._index.num_episodes

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
        return self._index.names(failed=False)

    @property
    def failed(self) -> frozenset[str]:
        """Names of the episodes that failed, and were not appended again since. A copy."""
        return self._index.names(failed=True)

    @property
    def episodes(self) -> frozenset[str]:
        """Names of all episodes, durable or not, failed or not. A copy."""
        return self.failed | self.finished  # the order in which an episode may change

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories, durable or not."""
        return self._index.num_trajectories

    @property
    def num_turns(self) -> int:
        """Number of turns, durable or not."""
        return self._index.num_turns

    @property
    def num_tokens(self) -> int:
        """Number of tokens, each counted once, however many turns repeat it."""
        return self._index.num_tokens

    @property
    def num_pending(self) -> int:
        """Number of episodes that are not durable yet."""
        return len(self._index.pending)

    def append(
        self, episode: str, trajectories: Sequence[Trajectory], *, error: str | None = None
    ) -> None:
        """Check and append an episode; `flush`, or a limit of `LogOptions`, makes it durable.

        Args:
            episode: Name; any text, never used as a path.
            trajectories: Trajectories of the episode; empty if it failed. They are copied.
            error: Reason of a failure; cut off after `LogOptions.max_error_chars`.

        Raises:
            TypeError: If a value is of the wrong kind.
            ValueError: If the episode has succeeded before, if it failed and has trajectories, if
                a buffer with the log's fields would refuse one, or if the log is closed or
                opened for reading.
            OSError: If earlier episodes could not be written, as on a full disk. They are kept
                and tried again; this one is not kept.

        Cost: that of `TrajectoryBuffer.extend`; no disk access. Waits for the disk above
            `LogOptions.max_pending_bytes`.
        """
        writer = self._opened_writer()
        if not isinstance(episode, str):
            raise TypeError(f"episode must be a str, got {type(episode).__name__}")
        if error is not None:
            if not isinstance(error, str):
                raise TypeError(f"error must be a str or None, got {type(error).__name__}")
            error = error[: self._options.max_error_chars]
        name = str.__str__(episode)  # also of a subclass that overrides methods
        given = list(trajectories)
        if error is not None and given:
            raise ValueError(
                f"episode {name!r} failed, but comes with {len(given)} trajectories; expected none"
            )
        record = Record(name, error, TrajectoryArrays.of(given, self.fields))
        content = encoded(record)
        writer.append(name, Entry.of(record, content), content)

    def flush(self) -> None:
        """Make all episodes that were appended before the call durable.

        On an event loop, call it in a thread: ``await asyncio.to_thread(log.flush)``.

        Raises:
            OSError: If they cannot be written, or the log is no longer at its path. Nothing is
                lost: pending episodes are kept, and are tried again.
            LogInUseError: If another writer has the log, since its lock was removed or replaced.
            DamagedLogError: If the file is damaged; it is left as it is.
            ValueError: If the log is closed or opened for reading.

        Cost: writes pending episodes, in transactions with five synchronisations of the disk
            each. Other threads may append meanwhile.
        """
        self._opened_writer().flush()

    def close(self) -> None:
        """Flush, and release the log for another writer. Closing twice does nothing.

        Raises:
            OSError: If pending episodes cannot be written. They are lost, and the log is closed.
        """
        self._is_closed = True
        if self._writer is not None:
            self._writer.close()

    def replay(self) -> Iterator[LoggedEpisode]:
        """Yield the episodes that are durable now, each once, in the order they were appended.

        Of an episode that failed and was appended again, the last record is yielded, in its
        place. Values equal those of a `TrajectoryBuffer.pack` and `PackedBatch.unpack`.

        Raises:
            DamagedLogError: If an episode is damaged; with ``damaged="skip"`` a `UserWarning`
                says so, and it is as if it had never been logged.
            OSError: If the file cannot be read, or is another one.

        Cost: reads and holds some megabytes at a time. A writer waits for milliseconds at most.
            Arrays are views of one piece of memory per episode.
        """
        for name, error, arrays in self._records():
            yield LoggedEpisode(name, tuple(arrays.trajectories()), error)

    def fill(self, buffer: TrajectoryBuffer) -> int:
        """Add the trajectories of all durable episodes to a buffer, in the order of `replay`.

        The buffer then holds the same bits as if it had been given the originals. Returns the
        number of added trajectories.

        Raises:
            DamagedLogError, OSError: As `replay`.
            ValueError: If the buffer's fields are not the log's, before anything is added, or
                if it is full: then it holds the first episodes that fit.
        """
        _checked(self._file, buffer.fields)
        before, records = len(buffer), self._records()
        while some := list(islice(records, _FILLED_AT_ONCE)):
            buffer.extend([one for record in some for one in record.arrays.trajectories()])
        return len(buffer) - before

    def export_parquet(self, path: str | os.PathLike[str], *, compression_level: int = 3) -> None:
        """Write the episodes that `replay` yields as one Parquet file, for other tools.

        Args:
            path: Path of the file; an existing one is replaced when the new one is whole.
            compression_level: Level of zstd, 1 to 22.

        Raises:
            DamagedLogError, OSError: As `replay`, or if the file cannot be written.
            ImportError: If pyarrow is missing: the extra ``[log]``.
            ValueError: If ``compression_level`` is out of range.

        Cost: memory for some megabytes of episodes; about 200 ns a token.
        """
        write_parquet(Path(path), self._records(), self.fields, compression_level=compression_level)

    def _records(self) -> Iterator[Record]:
        """Yield the episodes that count and are durable now."""
        num_rows, counting = self._index.counting()
        for entries, _ in self._file.entries(self._file.start, num_rows):
            for entry, record in self._file.records(e for e in entries if e.number in counting):
                if isinstance(record, Record):
                    yield record
                elif self._options.damaged == "raise":
                    raise record
                else:
                    self._index.lose(entry)
                    warnings.warn(f"1 episode skipped: {record}", stacklevel=3)

    def _opened_writer(self) -> LogWriter:
        if self._is_closed:
            raise self._index.closed_error()
        if self._writer is None:
            raise ValueError(f"log {self._folder} is opened for reading")
        if not self._writer.is_ours:
            raise ValueError(f"log {self._folder} belongs to the process that opened it")
        return self._writer


def _locked(folder: Path) -> WriterLock:
    """Create a folder if missing, and lock it."""
    make_folder(folder)
    try:
        return WriterLock(folder / LOCK)
    except LockTakenError as error:
        raise LogInUseError(
            f"log {folder} has a writer already: {error}; a log has one at a time"
        ) from None


def _checked(file: LogFile, fields: Sequence[TokenField] | None) -> LogFile:
    """Return a log file if these are its fields; ``None`` stands for any."""
    if fields is not None and [one.as_json() for one in fields] != [
        one.as_json() for one in file.fields
    ]:
        given, begun_with = ([field.name for field in some] for some in (fields, file.fields))
        raise ValueError(
            f"log {file.path.parent} was begun with fields {begun_with}, got {given}; names, "
            "dtypes, shapes, fills and order must be the same"
        )
    return file


def _missing(folder: Path) -> Exception:
    """Return the error of a folder without a log of this form."""
    if (folder / MANIFEST).exists():
        return ValueError(
            f"{folder} holds a log in the form of an earlier release; "
            f"TrajectoryLog.open({str(folder)!r}).close() converts it"
        )
    return FileNotFoundError(f"{folder} holds no trajectory log: it has no {LOG}")


def _create(folder: Path, fields: Sequence[TokenField], options: LogOptions) -> None:
    """Write a new log, or convert one of the old form."""
    if (folder / MANIFEST).exists() and not os.path.lexists(folder / f"{LOG}-journal"):
        old = OldLog(folder, options.damaged)
        LogFile.create(folder / LOG, old.fields, old.records())
    else:
        _check_empty(folder)
        LogFile.create(folder / LOG, fields)


def _check_empty(folder: Path) -> None:
    """Raise unless a log can begin in a folder."""
    if os.path.lexists(folder / f"{LOG}-journal"):
        raise DamagedLogError(
            f"{folder / LOG} is missing, but {LOG}-journal is there; without it a new log begins"
        )
    foreign = sorted(set(os.listdir(folder)) - {LOCK, f"{LOG}.tmp"})
    if foreign:
        raise ValueError(
            f"{folder} is neither empty nor a trajectory log: it has no {LOG}, "
            f"but holds {foreign[0]!r}"
        )
