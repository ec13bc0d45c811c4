"""Files that are whole or not there, and the lock that one writer holds."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from trajpack.packing.log_options import LogInUseError

LOCK = "writer.lock"


def write_durably(path: Path, content: Any) -> None:
    """Write a file so that it is on the disk, under its name and whole, when this returns.

    Raises:
        OSError: If it cannot be; what was under the name before is still there.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, so that they are on the disk when this returns."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names of a folder's files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_durably(path: Path, size: int, line: bytes) -> None:
    """Append to a file of which ``size`` bytes count; what stands behind them is cut off first.

    Raises:
        OSError: If it cannot be; then ``size`` bytes still count.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        written = 0
        while written < len(line):
            written += os.pwrite(descriptor, line[written:], size + written)
        os.fsync(descriptor)
    except BaseException:
        with suppress(OSError):  # else the next to append, or to open the log, cuts it off
            os.ftruncate(descriptor, size)
        raise
    finally:
        os.close(descriptor)


class WriterLock:
    """Says that this process writes a log. The system lets go of it when the process ends.

    Raises:
        LogInUseError: If another writer holds it, in this process or in another one.
        OSError: If the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        import fcntl  # systems without it can read logs

        self._descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 20, 0).decode("ascii", "replace")
            os.close(self._descriptor)
            number = holder if holder.isdecimal() else "of unknown number"
            raise LogInUseError(
                f"log {folder} has a writer already: process {number}; a log has one at a time"
            ) from None
        except BaseException:
            os.close(self._descriptor)
            raise
        with suppress(OSError):  # the number is for people; a full disk must not matter
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)
        self.held = True
        _held.add(self)

    def release(self) -> None:
        """Let another writer have the log. Releasing twice does nothing."""
        if self.held:
            self.held = False
            os.close(self._descriptor)


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close what a forked process inherited: it is no writer, and must not outlive one as such."""
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
