"""Stands between SQLite and the system calls that change files, to let them fail or to die there.

SQLite's own VFS has a door for tests, `xSetSystemCall`, which is reached through its library.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

try:
    import _sqlite3
except ImportError:  # an interpreter that has SQLite built in
    _sqlite3 = None

Decide = Callable[[str], int | str | None]
"""Given the name of a call: ``None`` to let it through, an errno to fail with, ``"die"``, or
``"tear"`` to write one half and die."""

_POINTER, _SIZE, _OFFSET = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
_CALLS = {
    "open": ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, use_errno=True
    ),
    "pwrite64": ctypes.CFUNCTYPE(
        ctypes.c_ssize_t, ctypes.c_int, _POINTER, _SIZE, _OFFSET, use_errno=True
    ),
    "pwrite": ctypes.CFUNCTYPE(
        ctypes.c_ssize_t, ctypes.c_int, _POINTER, _SIZE, _OFFSET, use_errno=True
    ),
    "write": ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, _POINTER, _SIZE, use_errno=True),
    "ftruncate": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, _OFFSET, use_errno=True),
    "unlink": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, use_errno=True),
}
_SET = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.c_char_p, _POINTER)
_GET = ctypes.CFUNCTYPE(_POINTER, _POINTER, ctypes.c_char_p)


_kept: list[Any] = []
"""Functions that SQLite may call until the process ends."""


class _VFS(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_int),
        ("size", ctypes.c_int),
        ("max_path", ctypes.c_int),
        ("following", _POINTER),
        ("name", ctypes.c_char_p),
        ("own", _POINTER),
        *((f"method_{number}", _POINTER) for number in range(13)),
        ("set", _SET),
        ("get", _GET),
    ]


def _vfs() -> Any:
    try:
        library = ctypes.CDLL(getattr(_sqlite3, "__file__", None))
        library.sqlite3_vfs_find.restype = ctypes.POINTER(_VFS)
        library.sqlite3_vfs_find.argtypes = [ctypes.c_char_p]
    except (AttributeError, OSError):
        return None
    found = library.sqlite3_vfs_find(None)
    return found if found and found.contents.version >= 3 else None


needs_sqlite_calls = pytest.mark.skipif(
    _vfs() is None, reason="this interpreter's SQLite cannot be reached through ctypes"
)


class SQLiteCalls:
    """Lets ``decide`` see each call of this process until it is closed."""

    def __init__(self, decide: Decide) -> None:
        self._vfs = _vfs()
        self._before: dict[bytes, int] = {}
        for name, kind in _CALLS.items():
            original = self._vfs.contents.get(self._vfs, name.encode())
            if original:
                self._before[name.encode()] = original
                self._replace(name, kind, original, decide)

    def close(self) -> None:
        for name, original in self._before.items():
            self._vfs.contents.set(self._vfs, name, original)

    def __enter__(self) -> SQLiteCalls:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _replace(self, name: str, kind: Any, original: int, decide: Decide) -> None:
        call = kind(original)

        def decided(*arguments: Any) -> Any:
            if name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR):
                return call(*arguments)
            decision = decide(name)
            if decision is None:
                return call(*arguments)
            if isinstance(decision, int):
                ctypes.set_errno(decision)
                return -1
            if decision == "tear" and "write" in name:
                descriptor, content, size, *rest = arguments
                call(descriptor, content, size // 2, *rest)
            return os.kill(os.getpid(), signal.SIGKILL)

        replacement = kind(decided)
        _kept.append(replacement)
        pointer = ctypes.cast(replacement, _POINTER)
        self._vfs.contents.set(self._vfs, name.encode(), pointer)
