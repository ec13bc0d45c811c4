from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trajpack.agent.errors import SetupError
from trajpack.agent.sandbox.launcher import canonical
from trajpack.agent.sandbox.sandbox import Outcome, Sandbox, SandboxError, SandboxLimits

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    limits = SandboxLimits(cpu_s=1, wall_s=20.0, memory_bytes=256 << 20, output_bytes=10_000)
    with Sandbox(limits) as sandbox:
        yield sandbox


def attempt(sandbox: Sandbox, *statements: str, setup: str = "import os") -> list[str]:
    """Run each statement, and return the name of what it raised, or "done"."""
    lines = [setup]
    for statement in statements:
        lines += ["try:", f"    {statement}", "    print('done')"]
        lines += ["except BaseException as error:", "    print(type(error).__name__)"]
    result = sandbox.run("\n".join(lines))
    assert result.outcome is Outcome.EXITED
    return result.output.decode().split()


def test_a_program_reads_its_input_and_its_output_is_kept(sandbox: Sandbox) -> None:
    result = sandbox.run("import sys\nprint(sys.stdin.read().upper() * 2)", stdin="aé\n".encode())
    assert (result.outcome, result.output.decode()) == (Outcome.EXITED, "AÉ\nAÉ\n\n")
    assert 0 < result.cpu_s < 1


def test_the_value_of_an_expression_replaces_prints(sandbox: Sandbox) -> None:
    code = "print('noise')\nif __name__ == '__main__': input()\ndef f(x):\n    return {x: [x / 2]}"
    result = sandbox.run(code, expression="f(3)")
    assert (result.outcome, result.output.decode()) == (Outcome.EXITED, canonical({3: [1.5]}))


def test_a_program_does_the_same_each_time(sandbox: Sandbox) -> None:
    code = "print([*{'no', 'fixed', 'order', 'in', 'sets'}], hash('text'), hash(b'bytes'))"
    assert len({sandbox.run(code).output for _ in range(3)}) == 1


def test_the_standard_library_can_be_used(sandbox: Sandbox) -> None:
    code = """
import bisect, collections, dataclasses, decimal, fractions, heapq, itertools, json, math, random
import re, ssl, statistics, string, threading, zlib
@dataclasses.dataclass
class Point:
    x: int
done = []
threads = [threading.Thread(target=done.append, args=(Point(i),)) for i in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(done), decimal.Decimal(1) / 8, random.random() < 1)
"""
    assert sandbox.run(code).output == b"4 0.125 True\n"


def test_the_network_is_out_of_reach(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        socket.create_connection(address, timeout=5).close()  # it does listen
        listener.accept()[0].close()
        listener.setblocking(False)
        setup = "import ctypes, socket\nlibc = ctypes.CDLL(None)"
        tries = [
            f"socket.create_connection({address!r})",
            "socket.socket(socket.AF_UNIX)",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
            "socket.socketpair()",
            "assert libc.socket(2, 1, 0) >= 0",
            "assert libc.syscall(425, 8, 0) >= 0",
        ]
        errors = attempt(sandbox, *tries, setup=setup)
        assert errors == ["PermissionError"] * 4 + ["AssertionError"] * 2
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_no_process_can_be_begun_or_signalled(sandbox: Sandbox) -> None:
    tries = [
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "subprocess.run(['/bin/true'])",
        "os.setsid()",
        f"os.kill({os.getpid()}, 9)",
        "os.kill(os.getppid(), 9)",
        "os.kill(-1, 9)",
        "resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
    ]
    errors = attempt(sandbox, *tries, setup="import os, resource, subprocess")
    assert set(errors[:-1]) == {"PermissionError"}
    assert errors[-1] in ("PermissionError", "ValueError")
    bomb = (
        "import os\nfor _ in range(1000):\n    try: os.fork()\n    except OSError: pass\nprint(1)"
    )
    assert sandbox.run(bomb).output == b"1\n"


def test_files_are_neither_read_nor_changed(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "expected.txt").write_text("the hidden answer")
    tries = [
        f"open({str(tmp_path / 'expected.txt')!r}).read()",
        f"open({str(ROOT / 'README.md')!r}).read()",
        f"os.listdir({str(tmp_path)!r})",
        "open('/etc/passwd').read()",
        f"open('/proc/{os.getpid()}/mem', 'rb').read(1)",
        "open('/proc/self/cmdline').read()",
        "open('here', 'w')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"os.unlink({str(tmp_path / 'expected.txt')!r})",
        f"os.rename({str(tmp_path / 'expected.txt')!r}, '/tmp/elsewhere')",
        "os.mkdir('here')",
        "os.symlink('/', 'here')",
        "os.chmod('.', 0o777)",
        "os.memfd_create('here')",
    ]
    assert set(attempt(sandbox, *tries)) == {"PermissionError"}
    assert "landlock" in sandbox.protections
    assert [path.name for path in tmp_path.iterdir()] == ["expected.txt"]
    assert sandbox.run("import os\nprint(os.listdir('.'))").output == b"[]\n"


def test_descriptors_arguments_and_environment_are_not_inherited(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "hush")
    with (tmp_path / "open").open("wb") as file:
        os.set_inheritable(file.fileno(), True)
        code = """
import os, sys
found = []
for descriptor in range(3, 1024):
    try:
        os.fstat(descriptor)
        found.append(descriptor)
    except OSError:
        pass
print(found, sys.argv, dict(os.environ))
"""
        assert sandbox.run(code).output == b"[] ['__main__'] {}\n"


@pytest.mark.slow
def test_a_program_that_takes_too_much_is_stopped(sandbox: Sandbox) -> None:
    assert sandbox.run("while True: pass").outcome is Outcome.CPU_LIMIT
    deaf = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert sandbox.run(deaf).outcome is Outcome.CPU_LIMIT
    assert sandbox.run("x = bytearray(1 << 30)").outcome is Outcome.MEMORY_LIMIT
    assert sandbox.run("x = [0]\nwhile True: x += x").outcome is Outcome.MEMORY_LIMIT
    result = sandbox.run("while True: print('x' * 999)")
    assert (result.outcome, len(result.output)) == (Outcome.OUTPUT_LIMIT, 10_000)
    assert sandbox.run("import os; os.write(1, b'x' * 10_000)").outcome is Outcome.EXITED
    files = "import os\nx = [os.dup(0) for _ in range(100)]"
    assert sandbox.run(files).outcome is Outcome.CRASHED


@pytest.mark.parametrize(
    "code", ["import time; time.sleep(60)", "import os, time\nos.close(1)\ntime.sleep(60)"]
)
def test_a_program_that_lasts_too_long_is_killed(code: str) -> None:
    with Sandbox(SandboxLimits(wall_s=0.2)) as sandbox:
        began = time.monotonic()
        assert sandbox.run(code).outcome is Outcome.WALL_LIMIT
        assert time.monotonic() - began < 20


def test_a_process_that_cannot_be_watched_is_reaped(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    def fail(pid: int) -> int:
        begun.append(pid)
        raise OSError(24, "Too many open files")

    num_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", fail)
        with pytest.raises(SandboxError, match=r"could not be started: .*Too many open files"):
            sandbox.run("import time; time.sleep(60)")
    with pytest.raises(ChildProcessError):
        os.waitpid(begun[0], os.WNOHANG)
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert sandbox.run("print(1)").output == b"1\n"
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_program_that_does_not_end_when_it_is_killed_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the kernel says that it has sent a signal, and has not."""
    before = children()
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda handle, number: None)
    monkeypatch.setattr("trajpack.agent.sandbox.sandbox._END_S", 0.1)
    with (
        Sandbox(SandboxLimits(wall_s=0.2)) as sandbox,
        pytest.raises(SandboxError, match=r"was killed and has not ended in 0.1 s"),
    ):
        sandbox.run("import time; time.sleep(60)")
    assert children() == before


def children() -> set[str]:
    """Return the processes that this one has begun and not waited for."""
    found = Path("/proc/self/task").glob("*/children")
    return {number for one in found for number in one.read_text().split()}


@pytest.mark.parametrize(
    "code",
    ["1/0", "raise SystemExit(3)", "def", "\0", "import os; os._exit(1)", "import os; os.abort()"],
)
def test_a_program_that_fails_has_crashed(sandbox: Sandbox, code: str) -> None:
    assert sandbox.run(code).outcome is Outcome.CRASHED


def test_a_program_cannot_forge_the_status(sandbox: Sandbox) -> None:
    code = """
import os
for descriptor in range(3, 100):
    try:
        os.write(descriptor, b'OSError: the sandbox is broken')
    except OSError:
        pass
os._exit(1)
"""
    assert sandbox.run(code).outcome is Outcome.CRASHED


def test_a_closed_sandbox_kills_its_programs_and_refuses_others() -> None:
    sandbox = Sandbox()
    errors: list[BaseException] = []

    def sleep() -> None:
        try:
            sandbox.run("import time; time.sleep(60)")
        except SandboxError as error:
            errors.append(error)

    thread = threading.Thread(target=sleep)
    thread.start()
    while not sandbox._running:
        time.sleep(0.001)
    sandbox.close()
    thread.join(20)
    assert not thread.is_alive()
    assert [str(error) for error in errors] == ["the sandbox is closed"]
    with pytest.raises(SandboxError, match="the sandbox is closed"):
        sandbox.run("")


def test_a_program_dies_with_its_parent(tmp_path: Path) -> None:
    # The package without its facade, whose imports take seconds.
    script = f"""
import sys, threading, time, types
sys.modules["trajpack"] = package = types.ModuleType("trajpack")
package.__path__ = [{str(ROOT / "src" / "trajpack")!r}]
from trajpack.agent.sandbox.sandbox import Sandbox
sandbox = Sandbox()
threading.Thread(target=sandbox.run, args=("import time; time.sleep(60)",), daemon=True).start()
while not sandbox._running: time.sleep(0.001)
(child,) = sandbox._running
while not child._status: time.sleep(0.001)
print(child._child.pid, flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", script]
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # it leaves its empty folder behind
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        handle = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    poll = select.poll()
    poll.register(handle)
    try:
        assert poll.poll(20_000)
    finally:
        os.close(handle)


def test_a_sandbox_without_working_filter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(SetupError, match=r"Sandbox: .*got 'riscv64'"):
        Sandbox()
    allow_all = (6).to_bytes(2, sys.byteorder) + bytes(2) + (0x7FFF0000).to_bytes(4, sys.byteorder)
    monkeypatch.setattr(
        "trajpack.agent.sandbox.sandbox.system_call_filter", lambda machine, **options: allow_all
    )
    with pytest.raises(SetupError, match=r"locked up here: .*seccomp does not hold: the network"):
        Sandbox()
    monkeypatch.setattr(
        "trajpack.agent.sandbox.sandbox.system_call_filter", lambda machine, **options: b""
    )
    with pytest.raises(SetupError, match=r"cannot be locked up here: .*prctl.22."):
        Sandbox()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"cpu_s": 0}, "cpu_s must be at least 1, got 0"),
        ({"cpu_s": 0.5}, "cpu_s must be an integer"),
        ({"wall_s": float("nan")}, "wall_s must be positive and finite, got nan"),
        ({"memory_bytes": 1 << 20}, "memory_bytes must be at least 67108864"),
        ({"num_files": True}, "num_files must be an integer"),
    ],
)
def test_limits_out_of_range_are_refused(options: dict[str, float], error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        SandboxLimits(**options)  # type: ignore[arg-type]
