"""Sandboxes of root and of nobody, with user namespaces and without."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).with_name("sandbox_child.py")
PACKAGE = Path(__file__).parents[3] / "src" / "trajpack"

Rule = tuple[int, Sequence[tuple[int, str, int]], int]
"""Number of a system call; tests of its arguments; error that it fails with, or 0 for a lie."""

EPERM, EAGAIN, EINVAL, ENOSYS, EOPNOTSUPP = 1, 11, 22, 38, 95
UNSHARE, NEW_USER, NEW_NETWORK = 272, 0x10000000, 0x40000000
NO_USER_NAMESPACES: Rule = (UNSHARE, [(0, "&", NEW_USER)], EPERM)

USERS: dict[str, tuple[str, tuple[Rule, ...]]] = {
    "root": ("root", ()),
    "root without user namespaces": ("root", (NO_USER_NAMESPACES,)),
    "nobody": ("nobody", ()),
    "nobody without user namespaces": ("nobody", (NO_USER_NAMESPACES,)),
}
"""Name of the user, and what the kernel refuses."""


@dataclass(frozen=True)
class Report:
    """Of a process that made a sandbox."""

    error: str | None
    """Text of the SetupError that came in place of a sandbox."""
    protections: tuple[str, ...]
    results: list[tuple[str, str]]
    """Outcome and output of each program."""
    messages: list[str]
    """Lines of the log."""
    has_children: bool
    """Whether it left a process behind."""
    num_files: int
    """Descriptors that it left open."""
    num_forks: int = 0
    """Processes that it could begin while programs ran, up to 20."""


@functools.cache
def interpreter(user: str) -> str:
    """Return a Python that ``user`` may run; skip the test where there is none."""
    if user == "root" or os.geteuid() != 0:
        if user == "root" and os.geteuid() != 0:
            pytest.skip("needs root")
        return sys.executable
    is_new = "import sys; sys.exit(sys.version_info < (3, 11))"
    for candidate in (sys.executable, "/usr/bin/python3"):
        try:
            tried = subprocess.run(
                [candidate, "-I", "-c", is_new],
                user=65534,
                group=65534,
                extra_groups=[],
                cwd="/",
                check=False,
                capture_output=True,
            )
        except OSError:
            continue
        if tried.returncode == 0:
            return candidate
    pytest.skip("no Python of 3.11 or later can be run by another user than root")


def run_as(user: str, programs: Sequence[str] = (), **options: Any) -> Report:
    """Run programs in a sandbox that a process of one of `USERS` makes.

    Args:
        user: Of `USERS`.
        programs: To be run.
        options: As `start_as` takes them.
    """
    with start_as(user, programs, **options) as process:
        assert process.stdout is not None
        report = json.load(process.stdout)
    assert process.returncode == 0
    report["results"] = [tuple(result) for result in report["results"]]
    report["protections"] = tuple(report["protections"])
    return Report(**report)


def start_as(
    user: str,
    programs: Sequence[str],
    *,
    shim: Sequence[Rule] = (),
    at_once: int = 1,
    allow_file_reads: bool = False,
    close_early: bool = False,
    is_killed: bool = False,
    **limits: Any,
) -> subprocess.Popen[bytes]:
    """Start a process that runs programs in a sandbox, and writes a report.

    Args:
        user: Of `USERS`.
        programs: To be run.
        shim: What else the kernel refuses, or lies about.
        at_once: Programs at the same time.
        allow_file_reads: As the sandbox takes it.
        close_early: Close the sandbox when ``at_once`` programs have written "ready".
        is_killed: Write the numbers of their processes then, and wait to be killed.
        limits: Of each program.
    """
    if shim or USERS[user][1]:
        require_x86_64()
    name, refused = USERS[user]
    request = {
        "package": str(PACKAGE),
        "user": name,
        "shim": [*refused, *shim],
        "programs": list(programs),
        "at_once": at_once,
        "allow_file_reads": allow_file_reads,
        "close_early": close_early,
        "is_killed": is_killed,
        "limits": limits,
    }
    process = subprocess.Popen(
        [interpreter(name), "-I", "-S", "-B", str(CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode())
    process.stdin.close()
    return process


@functools.cache
def has_namespaces(user: str) -> bool:
    """Say whether one of `USERS` may have namespaces here: in many containers nobody may."""
    name, refused = USERS[user]
    if NO_USER_NAMESPACES in refused:
        return False
    is_other = name == "nobody" and os.geteuid() == 0
    options: Any = {"user": 65534, "group": 65534, "extra_groups": []} if is_other else {}
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x58000000) != 0)"
    command = [interpreter(name), "-I", "-S", "-c", code]
    return subprocess.run(command, cwd="/", check=False, **options).returncode == 0


def can_count_threads(user: str) -> bool:
    return user.startswith("root") or has_namespaces(user)


def require_x86_64() -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of system calls are those of x86-64")
