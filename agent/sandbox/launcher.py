"""Launcher of the sandbox: drops the process's rights, tests that they are gone, runs one program.

`SandboxedProcess` runs this module in a new interpreter for each program. It imports no other
module of the package and few of the standard library, since every program pays for each import.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys

TYPE_CHECKING = False  # importing `typing` would add a third to the start-up time
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

READY = b"ready"
"""Status message before a program starts, followed by the names of the protections."""
OUT_OF_MEMORY = 77
"""Exit status of a program that raised MemoryError."""

_NEW_USER, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x40000000, 0x08000000
_SIGKILL = 9
_SET_DEATH_SIGNAL, _GET_DEATH_SIGNAL, _SET_SECCOMP = 1, 2, 22
_SET_NO_NEW_PRIVILEGES, _GET_NO_NEW_PRIVILEGES = 38, 39
_RESTRICT_SELF = 446
_UNUSED_USERS = 0x70000000
"""First of the user ids, up to 0x7FFFFFFF, that neither systems nor containers assign."""
_CAPABILITY_VERSION = 0x20080522

MAX_DEPTH = 100
"""Deepest nesting of collections that `canonical` distinguishes."""

_libc = ctypes.CDLL(None, use_errno=True)


def canonical(value: Any, depth: int = 0) -> str:
    """Return a text that is equal for equal values and differs for others.

    As in Python, numbers of different types can be equal, and sets and mappings have no order. A
    value that is of no built-in type becomes the name of its type.

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
        return hex(value)  # conversion to decimal is slow and limited in length
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
    """Confine this process, report success or the error on the status pipe, and run the program.

    The pipe is closed before the program starts, so that the program cannot write to it.
    """
    with open(status_descriptor, "wb", buffering=0) as status:
        try:
            result = None
            if request["expression"] is not None:  # its value is the output, and no print
                result = os.dup(1)
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 1)
                os.close(nowhere)
            protections = _confine(request)
        except Exception as error:  # noqa: BLE001 - after any error the program must not run
            status.write(f"{type(error).__name__}: {error}".encode())
            return
        status.write(READY + b" " + " ".join(protections).encode())
    os.environ.clear()
    try:
        _run(request["code"], request["expression"], result)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _confine(request: Mapping[str, Any]) -> list[str]:
    """Set up all protections and return their names; raise if a required one fails."""
    protections = []
    # The kernel counts threads by real user id and does not count root's. The process id gives a
    # user id that no other process has. The effective user id stays: it is needed to open files.
    try:  # noqa: SIM105 - importing contextlib is slow
        os.setresuid(_UNUSED_USERS + os.getpid(), -1, -1)
    except OSError:  # not permitted; `_limit_threads` tests whether threads are counted
        pass
    if _enter_namespaces():
        protections.append("namespaces")
    _drop_capabilities()
    for name, limits in request["limits"].items():
        _limit(name, *limits)
    has_thread_limit = _limit_threads(request["num_threads"])
    protections.append("thread_limit" if has_thread_limit else "no_threads")
    _prctl(_SET_DEATH_SIGNAL, _SIGKILL)
    death_signal = ctypes.c_int(0)
    _prctl(_GET_DEATH_SIGNAL, ctypes.addressof(death_signal))
    if death_signal.value != _SIGKILL or os.getppid() != request["parent"]:
        raise RuntimeError("the parent has gone, or PR_SET_PDEATHSIG does not hold")
    _prctl(_SET_NO_NEW_PRIVILEGES, 1)
    if _prctl(_GET_NO_NEW_PRIVILEGES) != 1:
        raise RuntimeError("PR_SET_NO_NEW_PRIVS does not hold")
    if (ruleset := request["ruleset"]) is not None:
        os.close(os.open(request["hidden"], os.O_RDONLY))  # readable before Landlock, not after
        checked(system_call(_RESTRICT_SELF, ruleset, 0), "landlock")
        os.close(ruleset)
        protections.append("landlock")
    _filter_system_calls(request["filters"][has_thread_limit])
    _test_protections(request)
    return [*protections, "seccomp"]


def _enter_namespaces() -> bool:
    """Enter new network and IPC namespaces; return whether that succeeded."""
    before = _namespaces()
    if _libc.unshare(_NEW_USER | _NEW_NETWORK | _NEW_IPC) != 0:
        # A user namespace alone may be permitted; it has its own count of threads.
        _libc.unshare(_NEW_USER)
        return False
    return all(old != new for old, new in zip(before, _namespaces(), strict=True))


def _namespaces() -> tuple[int, int]:
    """Return the inodes of the network and IPC namespaces; 0 without ``/proc``."""
    try:
        return os.stat("/proc/self/ns/net").st_ino, os.stat("/proc/self/ns/ipc").st_ino
    except OSError:
        return 0, 0


def _limit(name: str, soft: int, hard: int) -> None:
    kind = getattr(resource, name)
    most = resource.getrlimit(kind)[1]
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    try:
        resource.setrlimit(kind, (soft, hard))
    except (ValueError, OSError) as error:
        raise RuntimeError(f"setrlimit failed: {name}: {error}") from error
    if resource.getrlimit(kind) != (soft, hard):
        raise RuntimeError(f"setrlimit does not hold: {name} is {resource.getrlimit(kind)}")


def _limit_threads(num_threads: int) -> bool:
    """Set the limit; return whether the kernel enforces it for this process alone.

    The test: a fork fails under a limit of one and succeeds under a limit of two. Processes and
    threads count alike.
    """
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    can_fork = []
    for most in (1, 2):
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
        can_fork.append(_can_fork())
    _limit("RLIMIT_NPROC", num_threads, num_threads)
    return can_fork == [False, True]


def _can_fork() -> bool:
    try:
        child = os.fork()
    except OSError:
        return False
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


def checked(result: int, name: str) -> int:
    """Return the result of a system call, or raise an OSError that names the call."""
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name} failed: {os.strerror(error)}")
    return result


def system_call(number: int, *values: int | bytes | None) -> int:
    """Make a system call that has no function in the C library."""
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in values]
    result: int = _libc.syscall(ctypes.c_long(number), *wide)
    return result


def _prctl(option: int, *values: int) -> int:
    # The arguments are of pointer width; ctypes converts integers to C int by default.
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    return checked(_libc.prctl(ctypes.c_int(option), *padded), f"prctl({option})")


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    checked(_libc.capset(header, bytes(24)), "capset")
    left = ctypes.create_string_buffer(b"\xff" * 24, 24)
    checked(_libc.capget(header, left), "capget")
    if any(left.raw):
        raise RuntimeError("capset does not hold: capabilities are left")


def _filter_system_calls(program: bytes) -> None:
    instructions = ctypes.create_string_buffer(program, len(program))
    address = ctypes.addressof(instructions)
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, address))
    _prctl(_SET_SECCOMP, 2, ctypes.addressof(header))


def _test_protections(request: Mapping[str, Any]) -> None:
    """Try forbidden operations; raise if one succeeds."""
    for family in (1, 2, 10):
        if _libc.socket(family, 1, 0) >= 0 or ctypes.get_errno() != errno.EPERM:
            raise RuntimeError("seccomp does not hold: the network can be reached")
    hidden = request["hidden"]
    if request["ruleset"] is not None and _error_of(os.open, hidden, os.O_RDONLY) != errno.EACCES:
        raise RuntimeError("Landlock does not hold: files can be read")
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
        if _error_of(os.open, hidden, flags) != errno.EPERM:
            raise RuntimeError("seccomp does not hold: files can be written")
    if _error_of(os.mkdir, hidden + ".new") != errno.EPERM:
        raise RuntimeError("seccomp does not hold: folders can be made")
    if _error_of(os.kill, request["parent"], 0) != errno.EPERM:
        raise RuntimeError("seccomp does not hold: signals can be sent")
    if _can_fork():
        raise RuntimeError("seccomp does not hold: processes can be begun")


def _error_of(call: Callable[..., object], *arguments: object) -> int | None:
    try:
        call(*arguments)
    except OSError as error:
        return error.errno
    return None


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
