"""System call filter of untrusted code: a classic BPF program for ``seccomp(2)``.

It allows the calls that a Python interpreter needs to compute, to read files and to write to open
descriptors. All others fail: sockets, new processes and programs, signals to other processes, and
changes to a file system.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_ALLOWED = """
read:0:63 write:1:64 close:3:57 fstat:5:80 newfstatat:262:79 lseek:8:62 mmap:9:222 mprotect:10:226
munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
rt_sigpending:127:136 rt_sigsuspend:130:133 rt_sigtimedwait:128:137 sigaltstack:131:132
pread64:17:67 readv:19:65 writev:20:66 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59
sched_yield:24:124 mremap:25:216 madvise:28:233 nanosleep:35:101 clock_nanosleep:230:115
getpid:39:172 getppid:110:173 gettid:186:178 exit:60:93 exit_group:231:94 uname:63:160 getcwd:79:17
readlink:89:- readlinkat:267:78 getdents64:217:61 futex:202:98 sched_getaffinity:204:123
clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:- times:100:153
getrusage:98:165 getrlimit:97:163 sysinfo:99:179 getuid:102:174 geteuid:107:175 getgid:104:176
getegid:108:177 set_tid_address:218:96 set_robust_list:273:99 rseq:334:293 getrandom:318:278
membarrier:324:283 access:21:- faccessat:269:48 faccessat2:439:439 stat:4:- lstat:6:- statx:332:291
poll:7:- ppoll:271:73 select:23:- pselect6:270:72 setitimer:38:103 getitimer:36:102 alarm:37:-
pause:34:- restart_syscall:219:128
"""
"""Calls allowed with any arguments: name, number on x86-64, number on AArch64."""

_NUMBERS = {
    "openat": (257, 56),
    "open": (2, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "ioctl": (16, 29),
    "prlimit64": (302, 261),
    "fcntl": (72, 25),
}
"""Calls that `_RULES` checks: numbers on x86-64 and on AArch64."""

_MACHINES = {"x86_64": 0, "aarch64": 1}
_AUDIT_ARCHITECTURES = (0xC000003E, 0xC00000B7)

_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NEWER = 440
"""Calls of this number and above came with Linux 5.10 or later, on both machines."""

_WRITES = 0x1 | 0x2 | 0x40 | 0x200 | 0x400
"""``O_WRONLY``, ``O_RDWR``, ``O_CREAT``, ``O_TRUNC``, ``O_APPEND``, the same on both machines."""
_THREAD = 0x00010000
_NEW_NAMESPACES = 0x7E020080
_TERMINAL_QUERIES = (0x5401, 0x5413, 0x5450, 0x5451)
"""``TCGETS``, ``TIOCGWINSZ`` and close-on-exec: the requests made when a file is opened."""
_DESCRIPTOR_COMMANDS = (0, 1, 2, 3, 4, 1030)
"""Duplication and flags. ``F_SETOWN`` is excluded: it would send signals to other processes."""

_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

_Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""


def system_call_filter(machine: str, *, with_threads: bool = True) -> bytes:
    """Return the filter as an array of ``struct sock_filter``.

    Args:
        machine: Value of ``platform.machine()``: ``"x86_64"`` or ``"aarch64"``.
        with_threads: Whether threads may be started.

    Raises:
        ValueError: On any other machine.

    Example:
        >>> len(system_call_filter("x86_64")) % 8
        0
    """
    if machine not in _MACHINES:
        known = ", ".join(_MACHINES)
        raise ValueError(f"system_call_filter: expected a machine of {known}, got {machine!r}")
    column = _MACHINES[machine]
    # On x86-64, numbers from 2**30 on select the x32 call table.
    program: list[_Instruction] = [
        (_LOAD, 0, 0, 4),
        (_IF_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[column]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_IF_AT_LEAST, 0, 1, 0x40000000),
        (_RETURN, 0, 0, _KILL),
    ]
    for entry in _ALLOWED.split():
        number = entry.split(":")[1 + column]
        if number != "-":
            program += [(_IF_EQUAL, 0, 1, int(number)), (_RETURN, 0, 0, _ALLOW)]
    for name, rule in _RULES.items():
        if name == "clone" and not with_threads:
            continue
        conditional = _NUMBERS[name][column]
        if conditional is not None:
            program += [(_IF_EQUAL, 0, len(rule), conditional), *rule]
    # ENOSYS makes a C library fall back to the calls of older kernels.
    program += [(_IF_AT_LEAST, 0, 1, _NEWER), _fail(_ENOSYS), _fail(_EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _fail(error: int) -> _Instruction:
    return (_RETURN, 0, 0, _FAIL | error)


def _argument(index: int, *, high: bool = False) -> _Instruction:
    return (_LOAD, 0, 0, 16 + 8 * index + 4 * high)


def _without_bits(index: int, bits: int) -> list[_Instruction]:
    return [
        _argument(index),
        (_IF_ANY_BIT, 0, 1, bits),
        _fail(_EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _one_of(index: int, values: Sequence[int]) -> list[_Instruction]:
    tests = [(_IF_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_argument(index), *tests, _fail(_EPERM), (_RETURN, 0, 0, _ALLOW)]


_RULES: dict[str, list[_Instruction]] = {
    "openat": _without_bits(2, _WRITES),
    "open": _without_bits(1, _WRITES),
    "clone": [
        _argument(0),
        (_IF_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        _fail(_EPERM),
        (_IF_ANY_BIT, 1, 0, _THREAD),
        _fail(_EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ],
    # A filter cannot read the flags, which are in memory; the C library falls back to clone.
    "clone3": [_fail(_ENOSYS)],
    "ioctl": _one_of(1, _TERMINAL_QUERIES),
    "prlimit64": [
        _argument(0),
        (_IF_EQUAL, 0, 4, 0),
        _argument(2),
        (_IF_EQUAL, 0, 2, 0),
        _argument(2, high=True),
        (_IF_EQUAL, 1, 0, 0),
        _fail(_EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ],
    "fcntl": _one_of(1, _DESCRIPTOR_COMMANDS),
}
