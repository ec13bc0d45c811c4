"""Replaces the system calls of SQLite that change files, so that they fail or kill the process.

SQLite's VFS has a method for tests, `xSetSystemCall`, which is reached through its library.
"""

import ctypes
import os
import signal

import pytest

try:
    import _sqlite3
except ImportError:  # an interpreter that has SQLite built in
    _sqlite3 = None

_INT, _POINTER, _SIZE, _OFFSET = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
_TEXT, _COUNT = ctypes.c_char_p, ctypes.c_ssize_t
_CALLS = {
    "open": (_INT, _TEXT, _INT, _INT),
    "pwrite64": (_COUNT, _INT, _POINTER, _SIZE, _OFFSET),
    "pwrite": (_COUNT, _INT, _POINTER, _SIZE, _OFFSET),
    "write": (_COUNT, _INT, _POINTER, _SIZE),
    "ftruncate": (_INT, _INT, _OFFSET),
    "unlink": (_INT, _TEXT),
}
"""Types of the result and of the arguments."""
_kept = []
"""Functions that SQLite may call until the process ends."""


class _VFS(ctypes.Structure):
    _fields_ = [
        ("version", _INT),
        ("size", _INT),
        ("max_path", _INT),
        ("following", _POINTER),
        ("name", _TEXT),
        ("own", _POINTER),
        *((f"method_{number}", _POINTER) for number in range(13)),
        ("set", ctypes.CFUNCTYPE(_INT, _POINTER, _TEXT, _POINTER)),
        ("get", ctypes.CFUNCTYPE(_POINTER, _POINTER, _TEXT)),
    ]


def _vfs():
    try:
        library = ctypes.CDLL(getattr(_sqlite3, "__file__", None))
        library.sqlite3_vfs_find.restype = ctypes.POINTER(_VFS)
        library.sqlite3_vfs_find.argtypes = [_TEXT]
    except (AttributeError, OSError):
        return None
    found = library.sqlite3_vfs_find(None)
    return found if found and found.contents.version >= 3 else None


needs_sqlite_calls = pytest.mark.skipif(
    _vfs() is None, reason="this interpreter's SQLite cannot be reached through ctypes"
)


class SQLiteCalls:
    """Passes the name of each call to ``decide``, in a context or until the process ends.

    ``decide`` returns ``None`` to let the call through, an errno to fail with, ``"die"``, or
    ``"tear"`` to write one half and die.
    """

    def __init__(self, decide):
        self._vfs, self._before = _vfs(), {}
        for name, types in _CALLS.items():
            kind = ctypes.CFUNCTYPE(*types, use_errno=True)
            if original := self._vfs.contents.get(self._vfs, name.encode()):
                self._before[name] = original
                _kept.append(kind(self._decided(name, kind(original), decide)))
                self._set(name, ctypes.cast(_kept[-1], _POINTER))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name, original in self._before.items():
            self._set(name, original)

    def _set(self, name, call):
        self._vfs.contents.set(self._vfs, name.encode(), call)

    def _decided(self, name, call, decide):
        def decided(*arguments):
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

        return decided
