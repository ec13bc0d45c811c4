"""The log of trajectories: what a rollout made, kept on disk whatever happens to the rollout."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

from trajpack.packing.buffer import TrajectoryBuffer
from trajpack.packing.log_contents import LogContents
from trajpack.packing.log_files import WriterLock, make_folder
from trajpack.packing.log_folder import LogFolder
from trajpack.packing.log_options import LogOptions
from trajpack.packing.log_rows import row_of_episode, trajectories_of_row
from trajpack.packing.log_segments import load_parquet
from trajpack.packing.log_writer import LogWriter, end_writing
from trajpack.packing.token_fields import TokenField, check_fields
from trajpack.packing.types import Trajectory

Mode: TypeAlias = Literal["append", "read"]


@dataclass(frozen=True)
class LoggedEpisode:
    """One episode of a log."""

    episode: str
    """Its name."""
    trajectories: tuple[Trajectory, ...]
    """What it made; empty where it failed. Arrays are int32 and float32."""
    error: str | None = None
    """Why it failed, or ``None``."""


class TrajectoryLog:
    """A folder of episodes, appended and never changed, that survives the death of its writer.

    An episode is in the log once: one that succeeded stays as it is, one that failed may be
    appended again. Trajectories are stored as a buffer stores them, each token once, in
    Parquet files, and come back bit for bit. `flush` makes what was appended durable; a thread
    does the same whenever a limit of `LogOptions` is reached. Whoever kills the process, or
    pulls the plug, loses at most what was not flushed. Methods may be called from any thread.

    Made by `open`. Needs pyarrow: the extra ``[log]``.

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
        self, folder: LogFolder, options: LogOptions, lock: WriterLock | None = None
    ) -> None:
        self._folder = folder
        self._options = options
        self._lock = lock
        self._contents = LogContents(folder.entries)
        self._writer = LogWriter(folder, options, lock) if lock is not None else None
        self._end = weakref.finalize(
            self, end_writing, self._writer, lock
        )  # at exit, at the latest
        self.fields = folder.fields
        """Extra per-token fields that every turn brings."""

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
            folder: Made if need be, with ``mode="append"``.
            mode: ``"append"``: as the only writer. ``"read"``: as one of many readers, of what
                is durable now; a writer may be at work meanwhile. Nothing is changed then.
            fields: Extra fields of every turn, see `TokenField`. A new log without them has
                none; one that is there has those it was begun with.
            options: When to write, and what to do about damage.

        Raises:
            FileNotFoundError: If there is no log to read.
            LogInUseError: If another writer has the log open.
            DamagedLogError: If the manifest or a segment is not as it was written.
            ValueError: If ``fields`` are not those of the log, the folder holds something else,
                a later release wrote the log, or ``mode`` is unknown.
            OSError: If the folder cannot be read or written.

        Cost: reads the manifest, about 40 bytes an episode, and no segment.
        """
        place = Path(folder)
        chosen = LogOptions() if options is None else options
        declared = None if fields is None else check_fields(fields)
        if mode == "read":
            opened = LogFolder(place, chosen.damaged)
            opened.check_fields(declared)
            return cls(opened, chosen)
        if mode != "append":
            raise ValueError(f"mode must be 'append' or 'read', got {mode!r}")
        load_parquet()
        make_folder(place)
        lock = WriterLock(place)
        try:
            opened = LogFolder.make(place, declared or (), chosen.damaged)
            opened.check_fields(declared)
            opened.adopt()
            return cls(opened, chosen, lock)
        except BaseException:
            lock.release()
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

    def __len__(self) -> int:
        """Episodes in it, failed ones too."""
        return len(self._contents)

    def __contains__(self, episode: object) -> bool:
        """Tell whether an episode is in it, durable or not, failed or not."""
        return episode in self._contents

    def __repr__(self) -> str:
        return (
            f"TrajectoryLog({len(self)} episodes, {len(self.failed)} of them failed; "
            f"{self.num_trajectories} trajectories, {self.num_tokens:,} tokens)"
        )

    @property
    def finished(self) -> frozenset[str]:
        """Names of the episodes that succeeded: what a rollout that goes on need not do again.

        Cost: a copy; ``name in log`` looks one up.
        """
        return self._contents.finished

    @property
    def failed(self) -> frozenset[str]:
        """Names of the episodes that failed, and were not appended again since. A copy."""
        return self._contents.failed

    @property
    def episodes(self) -> frozenset[str]:
        """Names of all episodes, durable or not, failed or not. A copy."""
        return self.finished | self.failed

    @property
    def num_trajectories(self) -> int:
        """Trajectories in it."""
        return self._contents.num_trajectories

    @property
    def num_turns(self) -> int:
        """Turns in it."""
        return self._contents.num_turns

    @property
    def num_tokens(self) -> int:
        """Tokens in it, each counted once, however many turns repeat it."""
        return self._contents.num_tokens

    @property
    def num_pending(self) -> int:
        """Episodes that are not durable yet."""
        return 0 if self._writer is None else self._writer.num_pending

    def append(
        self, episode: str, trajectories: Sequence[Trajectory], *, error: str | None = None
    ) -> None:
        """Check an episode and keep it; `flush`, or a limit of `LogOptions`, makes it durable.

        Args:
            episode: Its name; any text, the log makes no path of it.
            trajectories: What it made; none where it failed. They are copied.
            error: Why it failed; cut off after `LogOptions.max_error_chars`.

        Raises:
            TypeError: If a value is of the wrong kind.
            ValueError: If the episode is in the log already and did not fail, if one that
                failed comes with trajectories, if a trajectory is not what a buffer with the
                log's fields takes, or if the log is closed or opened for reading.
            OSError: If what was appended before could not be written, as on a full disk. The
                episode is not kept then; what was appended before is, and is tried again.

        Cost: that of `TrajectoryBuffer.extend`; never touches the disk. Waits for it where
            `LogOptions.max_pending_bytes` wait.
        """
        writer = self._opened_writer()
        if not isinstance(episode, str):
            raise TypeError(f"episode must be a str, got {type(episode).__name__}")
        if error is not None:
            if not isinstance(error, str):
                raise TypeError(f"error must be a str or None, got {type(error).__name__}")
            error = error[: self._options.max_error_chars]
        given = list(trajectories)
        if error is not None and given:
            raise ValueError(
                f"episode {episode!r} failed, but comes with {len(given)} trajectories; "
                "expected none"
            )
        self._contents.check_new(episode)  # and again below: another thread may be faster
        writer.append(row_of_episode(episode, given, error, self.fields), self._contents.add)

    def flush(self) -> None:
        """Make all that was appended before the call durable: it survives whatever comes.

        On an event loop, call it in a thread: ``await asyncio.to_thread(log.flush)``.

        Raises:
            OSError: If it cannot be written. Nothing is lost: what is durable stays so, the
                rest is kept, and is tried again.
            ValueError: If the log is closed or opened for reading.

        Cost: compresses and writes what waits, in segments, with three synchronisations of the
            disk each. Other threads may append meanwhile.
        """
        self._opened_writer().flush()

    def close(self) -> None:
        """Flush, and let another writer have the log. Closing twice does nothing.

        Raises:
            OSError: If what waits cannot be written. It is lost, then; the log is closed.
        """
        self._end()

    def replay(self) -> Iterator[LoggedEpisode]:
        """Yield the episodes that are durable now, each once, in the order they were appended.

        Of one that failed and was appended again, the last is yielded, in its place. Values
        are those that `TrajectoryBuffer.pack` and `PackedBatch.unpack` would have given back.

        Raises:
            DamagedLogError: If a segment is not as it was written; with ``damaged="skip"`` a
                `UserWarning` says so, and its episodes are left out.

        Cost: reads a segment at a time, and holds no other. Arrays are views of their
            episode's own.
        """
        for _, row in self._folder.episodes():
            trajectories = trajectories_of_row(row, self.fields)
            yield LoggedEpisode(row.episode, tuple(trajectories), row.error)

    def fill(self, buffer: TrajectoryBuffer) -> int:
        """Add the trajectories of all durable episodes to a buffer, in the order of `replay`.

        The buffer then holds, bit for bit, what it would had it been given the originals.

        Returns:
            How many trajectories were added.

        Raises:
            DamagedLogError: As `replay`.
            ValueError: If the buffer's fields are not the log's, before anything is added, or
                if it is full: then it holds what fitted of the segments before.
        """
        self._folder.check_fields(buffer.fields)
        before, waiting, segment = len(buffer), list[Trajectory](), -1
        for number, row in self._folder.episodes():
            if number != segment:
                buffer.extend(waiting)
                waiting, segment = [], number
            waiting += trajectories_of_row(row, self.fields)
        buffer.extend(waiting)
        return len(buffer) - before

    def _opened_writer(self) -> LogWriter:
        if not self._end.alive:
            raise ValueError(f"log {self._folder.path} is closed")
        if self._writer is None or self._lock is None:
            raise ValueError(f"log {self._folder.path} is opened for reading")
        if not self._lock.held:
            raise ValueError(f"log {self._folder.path} belongs to the process that opened it")
        return self._writer
