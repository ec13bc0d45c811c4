"""Gives up every right that a program does not need to compute, then runs one of them.

`SandboxedProcess` hands this module's code to a fresh interpreter for each program, where nothing
else of the package is imported. Little else is, either: each import is paid for by every program.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys

TYPE_CHECKING = False  # importing `typing` takes a third of the time that all the rest does
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

READY = b"ready"
"""What is said on the status pipe before a program begins, followed by the protections' names."""
OUT_OF_MEMORY = 77
"""Exit status of a program that ended by a MemoryError."""

_NAMESPACES = 0x10000000 | 0x40000000 | 0x08000000  # user, network, inter-process communication
_SIGKILL = 9
_SET_DEATH_SIGNAL, _SET_SECCOMP, _SET_NO_NEW_PRIVILEGES = 1, 22, 38
_RESTRICT_SELF = 446
_CAPABILITY_VERSION = 0x20080522

MAX_DEPTH = 100
"""Of collections in each other whose values `canonical` tells apart."""

_libc = ctypes.CDLL(None, use_errno=True)


def canonical(value: Any, depth: int = 0) -> str:
    """Return a text that is the same for values that are equal, and tells others apart.

    Numbers are equal across their types, sets and mappings in any order, as Python has it. Only
    built-in types count: anything else is nothing but the name of its type.

    Example:
        >>> canonical([1, 2.0, True]), canonical({"b": None, "a": (1.5,)})
        ('[0x1, 0x2, 0x1]', "{'a': (1.5), 'b': None}")
        >>> canonical([1]) == canonical((1,)), canonical({2, 1}) == canonical(frozenset({1, 2}))
        (False, True)
    """
    if depth > MAX_DEPTH:
        return "..."
    if isinstance(value, list | tuple | set | frozenset | dict):
        return _canonical_collection(value, depth + 1)
    if isinstance(value, complex) and value.imag == 0:
        value = value.real
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return hex(value)  # decimal digits are limited in number, and slow
    kinds: tuple[Any, ...] = (float, complex, str, bytes, type(None))
    for kind in kinds:
        if isinstance(value, kind):
            text: str = kind.__repr__(value)
            return text
    return f"<{type(value).__name__}>"


def _canonical_collection(value: Any, depth: int) -> str:
    if isinstance(value, dict):
        pairs = [f"{canonical(key, depth)}: {canonical(value[key], depth)}" for key in value]
        return f"{{{', '.join(sorted(pairs))}}}"
    items = [canonical(item, depth) for item in value]
    if isinstance(value, set | frozenset):
        return f"set({', '.join(sorted(items))})"
    return f"[{', '.join(items)}]" if isinstance(value, list) else f"({', '.join(items)})"


def main(request: Mapping[str, Any], status_descriptor: int) -> None:
    """Lock this process up, say so or what went wrong, and run the program that is asked for.

    The pipe is closed before the program begins: nothing can be said on it in its name.
    """
    with open(status_descriptor, "wb", buffering=0) as status:
        try:
            result = None if request["expression"] is None else _take_output()
            protections = _lock_up(request)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing may be run then
            status.write(f"{type(error).__name__}: {error}".encode())
            return
        status.write(READY + b" " + " ".join(protections).encode())
    os.environ.clear()
    try:
        _run(request["code"], request["expression"], result)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _take_output() -> int:
    """Keep the output for a value; what the program prints goes nowhere."""
    result = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return result


def _lock_up(request: Mapping[str, Any]) -> list[str]:
    """Return the names of the protections in force; raise where one that must be is not."""
    protections = []
    if _libc.unshare(_NAMESPACES) == 0:
        # A namespace of users counts their processes afresh; outside, all of the user's count.
        request["limits"]["RLIMIT_NPROC"] = (request["num_threads"],) * 2
        protections.append("namespaces")
    _drop_capabilities()
    for name, limits in request["limits"].items():
        kind = getattr(resource, name)
        most = resource.getrlimit(kind)[1]
        bounded = [n if most == resource.RLIM_INFINITY else min(n, most) for n in limits]
        resource.setrlimit(kind, (bounded[0], bounded[1]))
    _prctl(_SET_DEATH_SIGNAL, _SIGKILL)
    if os.getppid() != request["parent"]:
        raise RuntimeError("the parent has gone")
    _prctl(_SET_NO_NEW_PRIVILEGES, 1)
    if (ruleset := request["ruleset"]) is not None:
        checked(system_call(_RESTRICT_SELF, ruleset, 0), "landlock")
        os.close(ruleset)
        protections.append("landlock")
    _filter_system_calls(request["filter"])
    return [*protections, "seccomp"]


def checked(result: int, name: str) -> int:
    """Return what a system call has returned, or raise an OSError that names it."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name} failed: {os.strerror(error)}")
    return result


def system_call(number: int, *values: int | bytes | None) -> int:
    """Make a system call that the C library has no function for."""
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in values]
    result: int = _libc.syscall(ctypes.c_long(number), *wide)
    return result


def _prctl(option: int, *values: int) -> None:
    # Its arguments are as wide as an address; what ctypes makes of integers by itself is not.
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    checked(_libc.prctl(ctypes.c_int(option), *padded), f"prctl({option})")


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    checked(_libc.capset(header, bytes(24)), "capset")


def _filter_system_calls(program: bytes) -> None:
    instructions = ctypes.create_string_buffer(program, len(program))
    address = ctypes.addressof(instructions)
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, address))
    _prctl(_SET_SECCOMP, 2, ctypes.addressof(header))
    for family in (1, 2, 10):
        if _libc.socket(family, 1, 0) >= 0 or ctypes.get_errno() != errno.EPERM:
            raise RuntimeError("the network can still be reached")


def _run(code: bytes, expression: str | None, result: int | None) -> None:
    name = "__main__" if expression is None else "answer"
    module = sys.modules[name] = type(sys)(name)
    sys.argv = [name]
    exec(compile(code, "<answer>", "exec", dont_inherit=True), module.__dict__)
    if expression is None or result is None:
        return
    text = memoryview(canonical(eval(expression, module.__dict__)).encode("utf-8", "replace"))
    while text:
        text = text[os.write(result, text) :]
