"""Programs in bubblewrap that try to get out, to take all there is, and to outlive it."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.environments.bubblewrapped import (
    SOURCES,
    USERS,
    assert_none_left,
    processes,
    run_as,
    start_as,
)
from trajpack.agent.environments.program_runner import BubblewrapRunner

for_each_user = pytest.mark.parametrize("user", USERS)


@pytest.fixture
def limits() -> dict[str, Any]:
    """Limits that no other test has, so that processes are found by them."""
    return {"memory_bytes": (256 << 20) + random.SystemRandom().randrange(1 << 20), "wall_s": 120}


LIBRARY = """
import bisect, collections, ctypes, dataclasses, decimal, fractions, json, math, random, re
import sqlite3, ssl, statistics, threading, zlib, zoneinfo
@dataclasses.dataclass
class Point:
    x: int
done = []
threads = [threading.Thread(target=done.append, args=(Point(i),)) for i in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(__name__, len(done), decimal.Decimal(1) / 8, zoneinfo.ZoneInfo("UTC"))
"""
RESULTS = {
    "import sys\nprint(sys.stdin.read().upper() * 2)": ("exited", "AÉ\nAÉ\n\n"),
    "print(input() + input('?'))": ("crashed", "?"),
    LIBRARY: ("exited", "__main__ 4 0.125 UTC\n"),
    "1/0": ("crashed", ""),
    "raise SystemExit(3)": ("crashed", ""),
    "def": ("crashed", ""),
    "\0": ("crashed", ""),
    "import os; os.abort()": ("crashed", ""),
    "import os; os.kill(os.getpid(), 9)": ("crashed", ""),
    "import os; os.write(1, bytes([255])); os.write(2, b'x')": ("exited", "\ufffd"),
    # what a runner would take for a failure of the sandbox
    "import os\nfor n in range(2, 64):\n    try: os.write(n, b'bwrap: failed')\n"
    "    except OSError: pass\nos._exit(1)": ("crashed", ""),
    "import os\nprint(*[n for n in range(2, 64) if os.path.exists(f'/dev/fd/{n}')], "
    "sorted(os.environ), os.getcwd())": ("exited", "['LC_CTYPE', 'PWD', 'PYTHONHASHSEED'] /\n"),
}


@for_each_user
def test_programs_end_with_an_outcome_and_an_output(
    user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "hush")
    results = run_as(user, list(RESULTS), stdin="aé\n", wall_s=120)
    assert dict(zip(RESULTS, results, strict=True)) == RESULTS
    code = "print([*{'no', 'fixed', 'order', 'in', 'sets'}], hash('text'), hash(b'bytes'))"
    assert len(set(run_as(user, [code] * 3, wall_s=120))) == 1


PRELUDE = """
import ctypes, importlib, os, resource, signal, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), "refused")
"""
ESCAPES = """
open({secret!r})
open({package!r})
open("/etc/passwd")
open("/usr/bin/env")
open("/proc/self/environ")
open("/proc/{parent}/environ")
open("/proc/self/root/etc/passwd")
open("/proc/net/tcp")
open("/sys/class/net/lo/address")
open("/dev/mem")
open("/dev/tty")
os.listdir("/etc")[1]
os.listdir({folder!r})
os.listdir("/usr/lib/python3/dist-packages")[0]
importlib.import_module("numpy")
open("new", "w")
open("/tmp/new", "w")
open("/dev/new", "w")
open(os.__file__, "a")
os.unlink(os.__file__)
os.chmod(os.__file__, 0o777)
os.link(os.__file__, "/linked")
os.mkdir("made")
os.mknod("/dev/made", 0o600 | 8192, 259)
os.execv("/bin/sh", ["sh"])
1 // (os.system("true") == 0)
os.kill({parent}, 0)
os.kill({parent}, 9)
os.pidfd_open({parent})
os.sched_setaffinity({parent}, [0])
os.setpriority(os.PRIO_PROCESS, {parent}, 19)
call("ptrace", 16, {parent}, 0, 0)
resource.prlimit({parent}, resource.RLIMIT_CPU)
resource.setrlimit(resource.RLIMIT_CPU, (99, 99))
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
resource.setrlimit(resource.RLIMIT_NPROC, (999, 999))
os.setuid(0)
os.setgroups([])
os.chroot("/")
1 // (os.getsid(0) == 0)
socket.sethostname("other")
call("mount", b"none", b"/", b"tmpfs", 0, None)
call("mount", None, b"/", None, 32 | 4096, None)
call("umount2", b"/usr/lib", 2)
call("unshare", 0x00020000)
call("unshare", 0x40000000)
call("setns", 0, 0)
call("unshare", 0x10020000) or call("umount2", b"/usr/lib/python3/dist-packages", 2)
call("unshare", 0x10020000) or call("mount", None, b"/usr/lib", None, 32 | 4096, None)
call("unshare", 0x10020000) or call("mount", b"proc", b"/dev", b"proc", 0, None)
call("reboot", 0)
socket.create_connection(("127.0.0.1", {port}), 5)
socket.socket(socket.AF_UNIX).connect({abstract!r})
socket.socket(socket.AF_INET, socket.SOCK_RAW)
socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
socket.getaddrinfo("example.org", 80)
""".strip().splitlines()
"""Statements that must fail, each in a process of its own."""
HARMLESS = ["open(os.__file__)", "call('getpid')", "socket.socket()", "os.mkdir and os.getpid()"]


@pytest.fixture
def listeners() -> Iterator[dict[str, Any]]:
    abstract = f"\0trajpack-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as network, socket.socket(socket.AF_UNIX) as local:
        local.bind(abstract)
        local.listen()
        network.setblocking(False)
        local.setblocking(False)
        yield {"port": network.getsockname()[1], "abstract": abstract}
        for listener in (network, local):
            with pytest.raises(BlockingIOError):
                listener.accept()


@pytest.mark.attack
@for_each_user
def test_no_program_gets_out(
    user: str, listeners: dict[str, Any], tmp_path: Path, limits: dict[str, Any]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the hidden answer")
    names = listeners | {"secret": str(secret), "folder": str(tmp_path), "parent": os.getpid()}
    names["package"] = str(SOURCES / "agent" / "errors.py")
    statements = [statement.format(**names) for statement in ESCAPES]
    statements += ["call('unshare', 0x10000000)"] if user != "root" else []
    lines = [PRELUDE]
    for statement in [*HARMLESS, *statements]:
        lines += ["if os.fork() == 0:", "    try:", f"        {statement}"]
        lines += ["    except Exception: pass"]
        lines += [f"    else: os.write(1, {statement + chr(10)!r}.encode())"]
        lines += ["    os._exit(0)", "os.wait()"]
    ((outcome, output),) = run_as(user, ["\n".join(lines)], **limits)
    assert (outcome, output.splitlines()) == ("exited", HARMLESS)
    assert secret.read_text() == "the hidden answer"
    assert os.listdir(tmp_path) == ["secret"]


EXHAUSTING = {
    "while True: pass": {"cpu_limit"},
    "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass": {"crashed"},
    "10 ** 10 ** 8 % 7": {"cpu_limit", "memory_limit"},
    "bytearray(1 << 40)": {"memory_limit"},
    "x = []\nwhile True: x.append(bytearray(1 << 20))": {"memory_limit"},
    "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 24))": {"crashed"},
    "import os\nos.posix_fallocate(os.memfd_create('x'), 0, 1 << 40)": {"crashed"},
    "def f(): f()\nf()": {"crashed"},
    "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x): return f(x)\nf(1)": {
        "crashed",
        "memory_limit",
        "cpu_limit",
    },
    "import os\nwhile True: os.dup(0)": {"crashed"},
    "while True: print('x' * 9999)": {"output_limit"},
    "import os\nwhile True:\n    try: os.write(1, b'x' * 9999)\n    except OSError: pass": {
        "output_limit"
    },
    "import os\nwhile True: os.write(2, b'x' * 9999)": {"cpu_limit"},
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass": {"cpu_limit"},
    "import os\nwhile True:\n    try:\n        if os.fork(): os._exit(0)\n"
    "    except OSError: pass": {"exited"},
    "import threading\ndef f():\n    while True: pass\n"
    "for _ in range(4): threading.Thread(target=f).start()": {"cpu_limit"},
    "import _thread, time\nwhile True: _thread.start_new_thread(time.sleep, (99,))": {"crashed"},
    # a daemon that has left its session and closed everything
    "import os, signal, time\n"
    "for _ in range(2):\n    if os.fork(): os._exit(0)\n    os.setsid()\n"
    "os.closerange(0, 64)\nfor n in range(1, 32):\n"
    "    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
    "time.sleep(999)": {"exited"},
    "import ctypes\nctypes.string_at(0)": {"crashed"},
}
"""Programs that take what they can get, and how they may end."""
WAITING = [
    "import time\ntime.sleep(999)",
    "import os, time\nos.closerange(0, 99)\ntime.sleep(999)",
    "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except OSError: pass\nwhile True: signal.pause()",
    "import os, time\nfor _ in range(5):\n    if not os.fork(): break\ntime.sleep(999)",
    "import os, time\nfor process in (-1, 1):\n    for number in range(1, 32):\n"
    "        try: os.kill(process, number)\n        except OSError: pass\ntime.sleep(999)",
]


@pytest.mark.attack
@pytest.mark.slow
@for_each_user
def test_exhausting_programs_are_stopped_and_leave_nothing(
    user: str, limits: dict[str, Any]
) -> None:
    results = run_as(user, list(EXHAUSTING), cpu_s=1, **limits)
    others = {
        code: outcome
        for (code, expected), (outcome, _) in zip(EXHAUSTING.items(), results, strict=True)
        if outcome not in expected
    }
    assert others == {}
    assert_none_left(limits)


@for_each_user
def test_waiting_programs_are_stopped_and_leave_nothing(user: str, limits: dict[str, Any]) -> None:
    results = run_as(user, WAITING, at_once=len(WAITING), **limits | {"wall_s": 5})
    assert [outcome for outcome, _ in results] == ["wall_limit"] * len(WAITING)
    assert_none_left(limits)


COUNTS = """
import os, threading, time
begun = 0
try:
    while True:
        {begin}
        begun += 1
except (OSError, RuntimeError):
    print(begun, flush=True)
os._exit(0)
"""


@for_each_user
@pytest.mark.parametrize("most", [1, 2, 8])
def test_processes_and_threads_stop_at_their_limit(user: str, most: int) -> None:
    """Several programs, and other processes of the user, do not count."""
    fork = COUNTS.format(begin="os.fork() or time.sleep(999)")
    thread = COUNTS.format(begin="threading.Thread(target=time.sleep, args=(999,)).start()")
    results = run_as(user, [fork, thread] * 2, at_once=4, max_processes=most, wall_s=120)
    assert results == [("exited", f"{most - 1}\n")] * 4


@for_each_user
def test_programs_die_with_a_process_that_is_killed(user: str, limits: dict[str, Any]) -> None:
    sleeping = "import os, time\nos.fork()\nos.fork()\ntime.sleep(999)"
    with start_as(user, [sleeping] * 2, **limits) as process:
        deadline = time.monotonic() + 60
        while len(processes(limits)) < 2 * 6:  # bwrap, its child, and four of the program
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert_none_left(limits)


@pytest.mark.attack
@for_each_user
def test_programs_that_are_cancelled_at_any_moment_leave_nothing(
    user: str, limits: dict[str, Any], tries: Callable[[int], int]
) -> None:
    drawn = random.Random(f"14 {user}")
    for _ in range(tries(60)):
        sleeping = ["import time\ntime.sleep(999)"] * 4
        results = run_as(user, sleeping, at_once=4, cancel_s=drawn.random() / 4, **limits)
        assert [outcome for outcome, _ in results] == ["TimeoutError"] * 4
    assert_none_left(limits)


REFUSAL = (
    "bwrap: No permissions to create new namespace, likely because the kernel does not allow "
    "non-privileged user namespaces."
)
BROKEN = {
    f"echo '{REFUSAL}' >&2; exit 1": "No permissions to create new namespace",
    "echo 'bwrap: Unknown option --disable-userns' >&2; exit 1": "Unknown option",
    "exit 0": "a program was not run: ''",
    "printf ready >&2; exit 1": r"a program that imports decimal ended with \('crashed', ''\)",
    "sleep 999": "a program was not run: ''",
    None: "No such file or directory: 'bwrap'",
}
REMEDY = ".*Install the package bubblewrap .*, or pass a function of yours, run_program"


@pytest.mark.parametrize("script", BROKEN)
def test_where_bubblewrap_fails_the_error_says_what_to_do(
    script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere" if script is None else f"{tmp_path}:/bin")
    with pytest.raises(ValueError, match=BROKEN[script] + REMEDY) as caught:
        BubblewrapRunner(wall_s=0.2 if script == "sleep 999" else 60)
    assert type(caught.value).__name__ == "SetupError"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"cpu_s": 0.5}, {"wall_s": float("nan")}, {"memory_bytes": 0}, {"max_processes": 0}]
)
def test_limits_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="limits must be positive, and integers but for wall_s"):
        BubblewrapRunner(**options)
