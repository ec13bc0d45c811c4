"""Programs in bubblewrap, begun by root and by another user."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).parents[3] / "src" / "trajpack"
USERS = ("root", "nobody")

# It imports the runner alone, so that only the interpreter need be readable for everybody.
_RUN = """
import asyncio, json, sys, types
request = json.load(sys.stdin)
package = sys.modules["trajpack"] = types.ModuleType("trajpack")
package.__path__ = [request["sources"]]
from trajpack.agent.environments.program_runner import BubblewrapRunner
try:
    runner = BubblewrapRunner(**request["limits"])
except ValueError as error:
    sys.exit(f"{type(error).__name__}: {error}")
idle = asyncio.Semaphore(request["at_once"])

async def run(program):
    try:
        async with idle, asyncio.timeout(request["cancel_s"]):
            return await runner(program, request["stdin"])
    except (RuntimeError, TimeoutError) as error:
        return [type(error).__name__, str(error)]

async def run_all():
    return await asyncio.gather(*map(run, request["programs"]))

print(json.dumps(asyncio.run(run_all())))
"""


@functools.cache
def command_of(user: str) -> tuple[list[str], dict[str, Any]]:
    """Return an interpreter and the options to start it as a user; skip where there is none."""
    if user == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    options: dict[str, Any] = {"cwd": "/"}
    interpreters = [sys.executable]
    if user == "nobody" and os.geteuid() == 0:
        options |= {"user": 65534, "group": 65534, "extra_groups": []}
        interpreters += ["/usr/bin/python3"]
    sandbox = ["bwrap", "--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "true"]
    try:
        plain = subprocess.run(sandbox, check=False, capture_output=True, **options)
    except FileNotFoundError:
        pytest.skip("bwrap is not installed")
    if plain.returncode != 0:
        pytest.skip(f"{user} may not use bwrap here: {plain.stderr.decode().strip()}")
    is_new = "import sys; sys.exit(sys.version_info < (3, 11))"
    for interpreter in interpreters:
        command = [interpreter, "-I", "-S", "-B", "-c"]
        try:
            if subprocess.run([*command, is_new], check=False, **options).returncode == 0:
                return command, options
        except PermissionError:
            continue
    pytest.skip("no Python of 3.11 or later can be run by another user than root")


def start_as(
    user: str,
    programs: Sequence[str],
    *,
    stdin: str = "",
    at_once: int = 2,
    cancel_s: float | None = None,
    **limits: Any,
) -> subprocess.Popen[bytes]:
    """Start a process of a user that runs programs and prints their results.

    Args:
        user: Of `USERS`.
        programs: To be run, each with ``stdin`` and within ``limits``.
        at_once: Programs at the same time.
        cancel_s: Seconds after which each program is cancelled.
    """
    command, options = command_of(user)
    request = {"sources": str(SOURCES), "programs": list(programs), "stdin": stdin}
    request |= {"at_once": at_once, "cancel_s": cancel_s, "limits": limits}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*command, _RUN], **pipes, **options)
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode())
    process.stdin.close()
    process.stdin = None
    return process


def run_as(user: str, programs: Sequence[str], **options: Any) -> list[tuple[str, str]]:
    """Return the outcome and output of each program; options as `start_as` takes them."""
    output, errors = start_as(user, programs, **options).communicate()
    assert not errors, errors.decode()
    return [(outcome, text) for outcome, text in json.loads(output)]


def processes(limits: dict[str, Any]) -> set[int]:
    """Return the processes of programs that have these limits, by their command lines."""
    mark = f"({limits['memory_bytes']}, ".encode()
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


def assert_none_left(limits: dict[str, Any]) -> None:
    """Wait for the end of all processes of programs that have these limits."""
    deadline = time.monotonic() + 60
    while left := processes(limits):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
