"""Durable file writes."""

from __future__ import annotations

import glob
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LEFTOVER_SECONDS = 3600
"""Age beyond which an unfinished file has no writer any more."""


def write_durably(path: Path, content: Any) -> None:
    """Write a file that is on the disk, whole and under its name, on return.

    Args:
        path: Path in a folder that exists.
        content: Bytes, or an object with a buffer of them.

    Raises:
        OSError: If it cannot be written; an earlier file of that name is unchanged.
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


def remove_leftovers(path: Path) -> None:
    """Remove hidden files and folders ``.NAME.*.tmp`` beside ``path`` that are older than an hour.

    They are what writers of ``path`` left that were killed.
    """
    for old in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > LEFTOVER_SECONDS:
                shutil.rmtree(old) if old.is_dir() else old.unlink()


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
