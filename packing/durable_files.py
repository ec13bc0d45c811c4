"""Durable file writes, and an exclusive lock for the writer of a folder."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class LockTakenError(RuntimeError):
    """Another writer holds the lock, or the lock's file was replaced by another."""


def write_durably(path: Path, content: Any) -> None:
    """Write a file that is on the disk, whole and under its name, on return.

    Args:
        path: Path in a folder that exists.
        content: Bytes, or an object with a buffer of them.

    Raises:
        OSError: If it cannot be written; an earlier file of that name is unchanged.

    Cost: two synchronisations of the disk, of the file and of its folder.
    """
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        file.write(content)


@contextmanager
def replacing(path: Path, unfinished: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path; the file written there durably replaces ``path`` on exit.

    After an error it is removed, and ``path`` is unchanged.

    Args:
        path: Path in a folder that exists.
        unfinished: Temporary path in the same folder; ``path`` with ``.tmp`` appended by default.
    """
    unfinished = path.with_name(f"{path.name}.tmp") if unfinished is None else unfinished
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, durably."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Synchronise the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class WriterLock:
    """Exclusive file lock (``flock``), released by the system when the process ends.

    The file holds the process id. A forked child does not inherit the lock.

    Args:
        path: Lock file, created if missing.

    Raises:
        LockTakenError: If another writer holds it, in this process or in another one.
        OSError: If the file cannot be opened, or the file system has no locks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _locked(path)
        self._folder = path.parent.stat()
        self.held = True
        """Whether this process holds the lock."""
        _held.add(self)

    def check(self) -> None:
        """Check that the locked file is still the one at its path; a removed one is made anew.

        Raises:
            LockTakenError: If another file or another folder is there, or another writer locks
                the file.
            OSError: If there is no folder, or the file cannot be opened.
        """
        if not os.path.samestat(self._path.parent.stat(), self._folder):
            raise LockTakenError(f"{self._path.parent} is another folder than the one locked")
        try:
            there = self._path.stat()
        except FileNotFoundError:
            removed, self._file = self._file, _locked(self._path)
            removed.close()
            return
        if not os.path.samestat(there, os.fstat(self._file.fileno())):
            raise LockTakenError(f"{self._path} is another file than the one locked")

    def close(self) -> None:
        """Release the lock. Closing twice does nothing."""
        self.held = False
        self._file.close()


def _locked(path: Path) -> Any:
    import fcntl  # systems without it can read

    while True:
        file = path.open("a+b", buffering=0)  # a file object: one that is dropped is closed
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(file, path):  # removed in between: its lock is void
                file.close()
                continue
        except BlockingIOError:
            holder = os.pread(file.fileno(), 20, 0).decode("ascii", "replace")
            file.close()
            number = holder if holder.isdecimal() else "of unknown number"
            raise LockTakenError(f"process {number} holds {path}") from None
        except BaseException:
            file.close()
            raise
        with suppress(OSError):  # the process id is a hint: a full disk must not matter
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        return file


def _is_at(file: Any, path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close inherited lock files: they would keep the lock after its holder's end."""
    for lock in list(_held):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
