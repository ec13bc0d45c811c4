"""System call filter (seccomp) and Landlock ruleset of untrusted code.

The filter is a classic BPF program. It allows the calls that a Python interpreter needs to compute,
to read files and to write to open descriptors. All others fail: sockets, new processes and
programs, signals to other processes, and changes to a file system. The ruleset limits the files
that may be read; it is created once, and each program's process can only restrict it more.
"""

from __future__ import annotations

import os
import struct
import sys
import sysconfig
from collections.abc import Mapping, Sequence

from trajpack.agent.sandbox.launcher import checked, system_call

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
    for name, (*numbers, rule) in _RULES.items():
        checked_number = numbers[column]
        if checked_number is not None and (with_threads or name != "clone"):
            program += [(_IF_EQUAL, 0, len(rule), checked_number), *rule]
    # ENOSYS makes a C library fall back to the calls of older kernels.
    program += [(_IF_AT_LEAST, 0, 1, _NEWER), _fail(_ENOSYS), _fail(_EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _fail(error: int) -> _Instruction:
    return (_RETURN, 0, 0, _FAIL | error)


def _argument(index: int, *, high: bool = False) -> _Instruction:
    return (_LOAD, 0, 0, 16 + 8 * index + 4 * high)


_ALLOWED_CALL = (_RETURN, 0, 0, _ALLOW)


def _without_bits(index: int, bits: int) -> list[_Instruction]:
    return [_argument(index), (_IF_ANY_BIT, 0, 1, bits), _fail(_EPERM), _ALLOWED_CALL]


def _one_of(index: int, values: Sequence[int]) -> list[_Instruction]:
    tests = [(_IF_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_argument(index), *tests, _fail(_EPERM), _ALLOWED_CALL]


_RULES: dict[str, tuple[int, int | None, list[_Instruction]]] = {
    "openat": (257, 56, _without_bits(2, _WRITES)),
    "open": (2, None, _without_bits(1, _WRITES)),
    "clone": (
        56,
        220,
        [
            _argument(0),
            (_IF_ANY_BIT, 0, 1, _NEW_NAMESPACES),
            _fail(_EPERM),
            (_IF_ANY_BIT, 1, 0, _THREAD),
            _fail(_EPERM),
            _ALLOWED_CALL,
        ],
    ),
    # A filter cannot read the flags, which are in memory; the C library falls back to clone.
    "clone3": (435, 435, [_fail(_ENOSYS)]),
    "ioctl": (16, 29, _one_of(1, _TERMINAL_QUERIES)),
    "prlimit64": (
        302,
        261,
        [
            _argument(0),
            (_IF_EQUAL, 0, 4, 0),
            _argument(2),
            (_IF_EQUAL, 0, 2, 0),
            _argument(2, high=True),
            (_IF_EQUAL, 1, 0, 0),
            _fail(_EPERM),
            _ALLOWED_CALL,
        ],
    ),
    "fcntl": (72, 25, _one_of(1, _DESCRIPTOR_COMMANDS)),
}
"""Calls whose arguments are checked: number on x86-64, number on AArch64, instructions."""

_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
_INSTALLED = ("site-packages", "dist-packages")

_CREATE_RULESET, _ADD_RULE = 444, 445
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_READ = _READ_FILE | _READ_FOLDER


def landlock_ruleset(working_folder: str) -> int | None:
    """Create the ruleset and return its descriptor, which the caller closes; None without Landlock.

    It allows reading the files that `readable` returns and no other access to the file system.

    Raises:
        OSError: If the kernel has Landlock but refuses the ruleset.
    """
    abi = system_call(_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return None
    file_rights = (1 << (13, 14, 15, 15)[abi - 1]) - 1 if abi <= 4 else (1 << 16) - 1
    attributes = struct.pack("=QQQ", file_rights, 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = checked(system_call(_CREATE_RULESET, attributes[:size], size, 0), "landlock")
    try:
        for path, rights in readable(working_folder).items():
            _allow(ruleset, path, rights)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def readable(working_folder: str) -> Mapping[str, int]:
    """Return the readable paths with their Landlock rights: standard and system libraries.

    Installed packages are excluded, since data sets with answers are distributed as packages too.
    """
    rights = dict.fromkeys([working_folder, *_SYSTEM_FILES], _READ)
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    base |= {"installed_base": sys.base_prefix, "installed_platbase": sys.base_exec_prefix}
    for name in ("stdlib", "platstdlib"):
        folder = sysconfig.get_path(name, vars=base)
        rights[folder] = _READ_FOLDER  # imports list the folder
        rights |= {entry.path: _READ for entry in _entries(folder) if entry.name not in _INSTALLED}
    for folder in _SYSTEM_LIBRARIES:
        rights |= {
            entry.path: _READ
            for entry in _entries(folder)
            if not entry.name.startswith("python") and not entry.is_symlink()
        }
    for name in {"lib", sys.platlibdir}:
        for entry in _entries(os.path.join(sys.base_prefix, name)):
            if ".so" in entry.name and entry.is_file():
                rights[entry.path] = _READ_FILE
    return rights


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return the files and sub-folders of a folder, without linked folders."""
    if not os.path.isdir(folder):
        return []
    with os.scandir(folder) as entries:
        return [one for one in entries if one.is_file() or one.is_dir(follow_symlinks=False)]


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # missing or unreadable paths need no rule
    try:
        if not os.path.isdir(path):
            rights &= _READ_FILE
        rule = struct.pack("=Qi", rights, descriptor)
        checked(system_call(_ADD_RULE, ruleset, 1, rule, 0), "landlock")
    finally:
        os.close(descriptor)
