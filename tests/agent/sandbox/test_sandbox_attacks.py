"""Programs that try to get out of the sandbox, to take all there is, and to outlive it."""

from __future__ import annotations

import json
import os
import random
import re
import select
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.agent.sandbox.sandbox_cases import (
    ENOSYS,
    EPERM,
    PACKAGE,
    USERS,
    require_x86_64,
    run_as,
    start_as,
)
from tests.agent.sandbox.sandbox_escapes import DEADLY, PRELUDE, STATEMENTS
from trajpack.agent.sandbox import restrictions

pytestmark = pytest.mark.attack
SEED = 14
UNFILTERED = {335, 336}
"""``uretprobe`` and ``uprobe``, which newer kernels do not filter: they serve its probes alone."""


@pytest.fixture
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that everybody may read, but for the sandbox."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "secret").write_text("the hidden answer")
    return folder / "secret"


@pytest.mark.parametrize("user", USERS)
def test_no_program_gets_out(user: str, secret: Path, tries: Callable[[int], int]) -> None:
    require_x86_64()
    assert len(STATEMENTS) + len(DEADLY) >= 165
    drawn = random.Random(f"{SEED} {user}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        names = {
            "secret": str(secret),
            "folder": str(secret.parent),
            "name": secret.parent.name,
            "parent": os.getpid(),
            "port": listener.getsockname()[1],
            "package": str(PACKAGE),
        }
        chosen = drawn.sample(STATEMENTS, tries(len(STATEMENTS)))
        statements = [statement.format(**names) for statement in chosen]
        deadly = drawn.sample(DEADLY, tries(len(DEADLY)))
        programs = [attempts(one) for one in [*batched(statements), *([one] for one in deadly)]]
        report = run_as(user, programs, at_once=2, cpu_s=30, wall_s=300)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert report.error is None
    died = report.results[-len(deadly) :]
    assert died == [("crashed", "")] * len(deadly)
    refused = [result for result in report.results if result not in died]
    assert {outcome for outcome, _ in refused} == {"exited"}
    came_through = "".join(output for _, output in refused).split("\n")[:-1]
    assert came_through == []
    assert not report.has_children
    assert report.num_files == 0
    assert secret.read_text() == "the hidden answer"
    assert os.listdir(secret.parent) == ["secret"]


def attempts(statements: Sequence[str]) -> str:
    """Return a program that tries each, and writes those that come through."""
    lines = [PRELUDE]
    for statement in statements:
        lines += ["try:", f"    {statement}", "except Exception: pass"]
        lines += ["else:", f"    os.write(1, {statement + chr(10)!r}.encode())"]
    return "\n".join(lines)


def batched(items: Sequence[str], size: int = 12) -> list[Sequence[str]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def test_escapes_are_tried_in_earnest() -> None:
    """What is not refused comes through, code of the machine too."""
    require_x86_64()
    getpid = "machine_code(bytes.fromhex('b827000000 0f05 c3'))"
    harmless = [f"assert {getpid} == os.getpid()", "open(os.__file__).read(1)", "call(39)"]
    report = run_as("nobody", [attempts([*harmless, "1 / 0"])])
    assert report.results == [("exited", "\n".join([*harmless, ""]))]


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_every_system_call_but_those_of_the_list_fails(
    user: str, tries: Callable[[int], int]
) -> None:
    """Each number, with -1 for all arguments. Any answer but the filter's own error is too much."""
    require_x86_64()
    allowed = {int(number) for number in re.findall(r":(\d+):", restrictions._ALLOWED)}
    allowed |= {rule[0] for rule in restrictions._RULES.values()}
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
minus = [ctypes.c_long(-1)] * 6
for number in {numbers}:
    result = libc.syscall(ctypes.c_long(number), *minus)
    print(number, result, ctypes.get_errno(), flush=True)
"""
    all_numbers = [number for number in range(700) if number not in UNFILTERED]
    numbers = random.Random(f"{SEED} {user}").sample(all_numbers, tries(len(all_numbers)))
    refused = [number for number in numbers if number not in allowed]
    report = run_as(user, [code.format(numbers=refused)], cpu_s=30, wall_s=300)
    ((outcome, output),) = report.results
    assert outcome == "exited"
    errors = {number: EPERM if number < 440 else ENOSYS for number in refused}
    expected = [f"{number} -1 {error}" for number, error in errors.items()]
    assert output.splitlines() == expected
    # Those that are allowed may wait without end, and end their program.
    programs = [code.format(numbers=[number]) for number in numbers if number in allowed]
    report = run_as(user, programs, at_once=2, wall_s=0.2)
    assert len(report.results) == len(numbers) - len(refused)
    assert not report.has_children


EXHAUSTING = {
    "computes": ("while True: pass", {"cpu_limit"}),
    "computes, deaf": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        {"cpu_limit"},
    ),
    "computes in C": ("10 ** 10 ** 8 % 7", {"cpu_limit", "memory_limit"}),
    "computes in threads": (
        "import threading\ndef f():\n    while True: pass\n"
        "for _ in range(4): threading.Thread(target=f).start()",
        {"cpu_limit", "crashed"},
    ),
    "an expression without end": ("import re\nre.match('(a+)+b', 'a' * 99)", {"cpu_limit"}),
    "a number without end": (
        "int('9' * 10 ** 6) if False else pow(3, 10 ** 9)",
        {"cpu_limit", "memory_limit"},
    ),
    "allocates at once": ("bytearray(1 << 40)", {"memory_limit"}),
    "allocates and fills": ("x = []\nwhile True: x.append(bytearray(1 << 20))", {"memory_limit"}),
    "doubles": ("x = [0]\nwhile True: x += x", {"memory_limit"}),
    "a text without end": ("x = 'x'\nwhile True: x *= 2", {"memory_limit"}),
    "a bomb of zeros": (
        "import zlib\nzlib.decompress(zlib.compress(bytes(1 << 27)) * 1)",
        {"memory_limit", "exited"},
    ),
    "maps": (
        "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 24))",
        {"crashed", "memory_limit"},
    ),
    "recurses": ("def f(): f()\nf()", {"crashed"}),
    "recurses on the stack of C": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x): return f(x)\nf(1)",
        {"crashed", "memory_limit", "cpu_limit"},
    ),
    "nests": ("eval('(' * 10 ** 6)", {"crashed", "memory_limit"}),
    "descriptors": ("import os\nwhile True: os.dup(0)", {"crashed"}),
    "pipes": ("import os\nwhile True: os.pipe()", {"crashed"}),
    "forks": (
        "import os\nfor _ in range(99999):\n    try: os.fork()\n    except OSError: pass",
        {"exited"},
    ),
    "threads": (
        "import _thread, time\nwhile True: _thread.start_new_thread(time.sleep, (9,))",
        {"crashed"},
    ),
    "writes": ("while True: print('x' * 9999)", {"output_limit"}),
    "writes bytes": ("import os\nwhile True: os.write(1, b'x')", {"output_limit"}),
    "writes errors": ("import os\nwhile True: os.write(2, b'x' * 9999)", {"cpu_limit"}),
    "sleeps": ("import time\ntime.sleep(99)", {"wall_limit"}),
    "sleeps without output": (
        "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(99)",
        {"wall_limit"},
    ),
    "sleeps without any descriptor": (
        "import os, time\nos.closerange(0, 99)\ntime.sleep(99)",
        {"wall_limit"},
    ),
    "waits for a lock": (
        "import threading\nx = threading.Lock()\nx.acquire()\nx.acquire()",
        {"wall_limit"},
    ),
    "waits for a signal": (
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except OSError: pass\nwhile True: signal.pause()",
        {"wall_limit"},
    ),
    "waits for a pipe": ("import os\nread, _ = os.pipe()\nos.read(read, 1)", {"wall_limit"}),
    "stays in a thread": (
        "import _thread, time\n_thread.start_new_thread(time.sleep, (99,))\ntime.sleep(99)",
        {"wall_limit"},
    ),
    "stays at the end": ("import atexit, time\natexit.register(time.sleep, 99)", {"wall_limit"}),
    "ends by a signal": ("import os, ctypes\nctypes.string_at(0)", {"crashed"}),
}
"""Programs that take what they can get, and how they may end."""


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_exhausting_programs_are_stopped(user: str, tries: Callable[[int], int]) -> None:
    names = random.Random(f"{SEED} {user}").sample(list(EXHAUSTING), tries(len(EXHAUSTING)))
    for is_waiting in (False, True):
        chosen = [name for name in names if (EXHAUSTING[name][1] == {"wall_limit"}) == is_waiting]
        programs = [EXHAUSTING[name][0] for name in chosen]
        wall_s = 0.3 if is_waiting else 120
        report = run_as(user, programs, at_once=2, cpu_s=1, wall_s=wall_s, memory_bytes=256 << 20)
        others = {
            name: outcome
            for name, (outcome, _) in zip(chosen, report.results, strict=True)
            if outcome not in EXHAUSTING[name][1]
        }
        assert others == {}
        assert not report.has_children
        assert report.num_files == 0


@pytest.mark.parametrize("user", USERS)
def test_programs_that_run_when_the_sandbox_is_closed_are_gone(
    user: str, tries: Callable[[int], int]
) -> None:
    count = tries(40)
    deaf = "import signal\nprint('ready', flush=True)\nwhile True: signal.sigtimedwait([10], 60)"
    report = run_as(user, [deaf] * count, at_once=count, close_early=True)
    assert report.results == [("SandboxError", "the sandbox is closed")] * count
    assert not report.has_children
    assert report.num_files == 0


@pytest.mark.parametrize("user", USERS)
def test_programs_die_with_a_parent_that_is_killed(user: str) -> None:
    code = "import time\nprint('ready', flush=True)\ntime.sleep(60)"
    with start_as(user, [code] * 3, at_once=3, is_killed=True) as parent:
        assert parent.stdout is not None
        handles = [os.pidfd_open(number) for number in json.loads(parent.stdout.readline())]
        parent.send_signal(signal.SIGKILL)
    assert len(handles) == 3
    for handle in handles:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(60_000)
        os.close(handle)
