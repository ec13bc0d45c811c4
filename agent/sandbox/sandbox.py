"""`Sandbox`: runs untrusted Python programs, each in a confined process, within limits."""

from __future__ import annotations

import contextlib
import functools
import logging
import marshal
import os
import platform
import select
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import CodeType
from typing import Any

from trajpack.agent.errors import SetupError
from trajpack.agent.sandbox import launcher
from trajpack.agent.sandbox.restrictions import landlock_ruleset, system_call_filter

_logger = logging.getLogger(__name__)

_START_S = 60.0
_END_S = 60.0
_STATUS_BYTES = 4096
_PIECE_BYTES = 1 << 16


class SandboxError(RuntimeError):
    """The sandbox failed to run a program, for a reason outside the program."""


class Outcome(Enum):
    """How a program ended.

    Attributes:
        EXITED: Exit status 0.
        CRASHED: Exception, other exit status, or signal.
        CPU_LIMIT: `SandboxLimits.cpu_s` was exceeded.
        WALL_LIMIT: `SandboxLimits.wall_s` was exceeded.
        MEMORY_LIMIT: An uncaught MemoryError.
        OUTPUT_LIMIT: `SandboxLimits.output_bytes` was exceeded.
    """

    EXITED = "exited"
    CRASHED = "crashed"
    CPU_LIMIT = "cpu_limit"
    WALL_LIMIT = "wall_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of one program.

    Attributes:
        cpu_s: Processor time in whole seconds, the unit of ``RLIMIT_CPU``.
        wall_s: Seconds from the first line of the program to its end.
        memory_bytes: Bytes of address space, interpreter included; at least 64 MiB.
        output_bytes: Bytes of standard output; a program that writes more is killed.
        num_files: Open descriptors; at least 16.
        num_threads: Running threads, main thread included. Where the kernel cannot count them, a
            program has the main thread only and `Sandbox.protections` has ``"no_threads"``.

    Raises:
        ValueError: If a limit is not positive or below its minimum.
        TypeError: If a number that must be an integer is not.
    """

    cpu_s: int = 5
    wall_s: float = 15.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 64 << 10
    num_files: int = 64
    num_threads: int = 32

    def __post_init__(self) -> None:
        least = {"cpu_s": 1, "memory_bytes": 64 << 20, "output_bytes": 1}
        least |= {"num_files": 16, "num_threads": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < minimum:
                raise ValueError(f"{name} must be at least {minimum}, got {value}")
        if not 0 < self.wall_s < float("inf"):
            raise ValueError(f"wall_s must be positive and finite, got {self.wall_s}")


@dataclass(frozen=True)
class SandboxResult:
    """Result of one program.

    Attributes:
        outcome: Reason of the end.
        output: Standard output, or the value of the expression as `canonical` text. The program
            chose every byte: compare it, and never run, format or log it unescaped.
        wall_s: Seconds from the first line of the program to its end.
        cpu_s: Seconds of processor time, start of the interpreter included.
    """

    outcome: Outcome
    output: bytes
    wall_s: float
    cpu_s: float


class Sandbox:
    r"""Runs each program in its own process; may be used from several threads.

    A program has the standard library, its input, and an empty read-only working folder. It has no
    network, no environment variables and no inherited descriptors; it cannot start processes or
    programs, send signals, or change files. The kernel enforces this before the first line, and
    each process tests it before that line.

    Args:
        limits: Limits of each program; defaults if None.
        allow_file_reads: Accept a kernel without Landlock. Programs can then read every file that
            the current user can read, hidden answers among them.

    Raises:
        SetupError: If a protection is missing or does not work, or the kernel has no Landlock and
            ``allow_file_reads`` is not set. The message names the protection.

    Cost: about 25 ms of processor time to start a program, and 10 MB.

    Example:
        >>> with Sandbox() as sandbox:
        ...     result = sandbox.run("print(int(input()) + 1)", stdin=b"41")
        >>> result.outcome, result.output
        (<Outcome.EXITED: 'exited'>, b'42\n')
    """

    def __init__(
        self, limits: SandboxLimits | None = None, *, allow_file_reads: bool = False
    ) -> None:
        self._limits = SandboxLimits() if limits is None else limits
        self._running: set[_Program] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        if sys.platform != "linux":
            raise SetupError(f"Sandbox: it needs Linux, this is {sys.platform}")
        try:
            self._filters = tuple(
                system_call_filter(platform.machine(), with_threads=with_threads)
                for with_threads in (False, True)
            )
        except ValueError as error:
            raise SetupError(f"Sandbox: {error}") from error
        self._folder = tempfile.TemporaryDirectory(prefix="trajpack-sandbox-")
        self._working_folder = os.path.join(self._folder.name, "work")
        self._hidden = os.path.join(self._folder.name, "hidden")
        self._protections: tuple[str, ...] = ()
        try:
            os.mkdir(self._working_folder)
            Path(self._hidden).touch()  # each process tests that it cannot read this file
            try:
                self._ruleset = landlock_ruleset(self._working_folder)
            except OSError as error:
                raise SetupError(f"Sandbox: files cannot be hidden here: {error}") from error
            if self._ruleset is not None:  # threads in `run` may use it
                weakref.finalize(self, os.close, self._ruleset)
            self._test_program(allow_file_reads)
        except BaseException:
            self.close()
            raise

    @property
    def protections(self) -> tuple[str, ...]:
        """Names of the protections in force, each tested.

        Always ``"seccomp"``; ``"landlock"`` unless ``allow_file_reads`` waives it; either
        ``"thread_limit"`` (`SandboxLimits.num_threads`) or, where the kernel cannot count the
        threads of one program, ``"no_threads"``; and ``"namespaces"`` where the user may create
        network and IPC namespaces.
        """
        return self._protections

    def run(self, code: str, *, stdin: bytes = b"", expression: str | None = None) -> SandboxResult:
        """Run a program and wait for its end.

        Args:
            code: Untrusted Python.
            stdin: Standard input of the program.
            expression: Trusted expression that is evaluated after the program in its namespace. Its
                value replaces the program's output.

        Raises:
            SandboxError: If the program could not be run, or the sandbox was closed.
        """
        return self._run(code, stdin, expression, limits=self._limits)[0]

    def close(self) -> None:
        """Kill all running programs; later calls of `run` raise."""
        with self._lock:
            self._is_closed = True
            for program in self._running:
                program.kill()
        self._folder.cleanup()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _test_program(self, allow_file_reads: bool) -> None:
        """Run a program that imports a module and tries to exceed its thread limit.

        Each process tests the other protections itself.
        """
        most = min(self._limits.num_threads, 4)
        trial = replace(self._limits, num_threads=most)
        try:
            result, protections = self._run(_TRIAL % most, b"", "started", limits=trial)
        except SandboxError as error:
            raise SetupError(f"Sandbox: programs cannot be locked up here: {error}") from error
        texts = {launcher.canonical(count).encode(): count for count in range(most + 1)}
        started = texts.get(result.output)
        if result.outcome is not Outcome.EXITED or started is None:
            raise SetupError(f"Sandbox: no program can run here: it {result.outcome.value}")
        if started == most:
            raise SetupError("Sandbox: programs could start any number of threads here")
        if "landlock" not in protections and not allow_file_reads:
            raise SetupError(
                "Sandbox: this kernel has no Landlock, so programs could read your files, hidden "
                "answers among them; allow_file_reads=True runs them all the same"
            )
        if started == 0 and most > 1:
            _logger.warning(
                "Sandbox: programs can start no threads here, since the kernel cannot count those "
                "of one program: it allows neither user namespaces nor another user id"
            )
        self._protections = protections

    def _run(
        self, code: str, stdin: bytes, expression: str | None, *, limits: SandboxLimits
    ) -> tuple[SandboxResult, tuple[str, ...]]:
        # SIGXCPU at the soft limit, SIGKILL at the hard one.
        kernel_limits = {"RLIMIT_CPU": (limits.cpu_s, limits.cpu_s + 1)}
        kernel_limits["RLIMIT_AS"] = (limits.memory_bytes, limits.memory_bytes)
        kernel_limits["RLIMIT_NOFILE"] = (limits.num_files, limits.num_files)
        for name in ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_MEMLOCK"):
            kernel_limits[name] = (0, 0)
        request = {
            "code": code.encode("utf-8", "replace"),
            "expression": expression,
            "filters": self._filters,
            "ruleset": self._ruleset,
            "hidden": self._hidden,
            "limits": kernel_limits,
            "num_threads": limits.num_threads,
            "parent": os.getpid(),
        }
        self._refuse_if_closed()
        try:
            program = _Program(request, stdin, self._working_folder)
        except OSError as error:
            raise SandboxError(f"a process could not be started: {error}") from error
        with program:
            with self._lock:
                self._refuse_if_closed()
                self._running.add(program)
            try:
                return program.watch(limits), program.protections
            finally:
                with self._lock:
                    self._running.discard(program)
                self._refuse_if_closed()  # a kill by `close` is not an outcome of the program

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise SandboxError("the sandbox is closed")


_TRIAL = """
import _thread, keyword
_thread.stack_size(1 << 16)
never = _thread.allocate_lock()
never.acquire()
started = 0
try:
    while started < %d:
        _thread.start_new_thread(never.acquire, ())
        started += 1
except RuntimeError:
    pass
"""


class _Program:
    """A process that runs the launcher; the context manager kills it and closes its descriptors.

    Args:
        request: Argument of `launcher.main`.
        stdin: Standard input of the program.
        folder: Working folder.

    Raises:
        OSError: If a process or descriptor cannot be created.
    """

    def __init__(self, request: Mapping[str, Any], stdin: bytes, folder: str) -> None:
        self.protections: tuple[str, ...] = ()
        """Protections in force; known when `watch` has returned."""
        self._status = b""
        self._output = bytearray()
        self._began = time.monotonic()
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            request_file = _file_of(marshal.dumps((_launcher(), dict(request))), theirs)
            stdin_file = _file_of(stdin, theirs)
            self._status_pipe, told = os.pipe()
            theirs.callback(os.close, told)
            ours.callback(os.close, self._status_pipe)
            handed_on = () if request["ruleset"] is None else (request["ruleset"],)
            self._child = subprocess.Popen(
                [*_COMMAND, str(request_file), str(told)],
                stdin=stdin_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(request_file, told, *handed_on),
                # A fixed hash seed gives sets of strings the same order in each run, so that
                # verdicts repeat; the option -I would ignore it.
                env={"PYTHONHASHSEED": "0"},
                cwd=folder,
                start_new_session=True,
            )
            ours.callback(self._reap)
            # The process was not waited for, so its id cannot have been reused.
            self._handle = os.pidfd_open(self._child.pid)
            ours.callback(os.close, self._handle)
            self._closing = ours.pop_all()

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def watch(self, limits: SandboxLimits) -> SandboxResult:
        """Wait for the end; kill the process when a limit is reached.

        Raises:
            SandboxError: If the program did not start, or cannot be killed.
        """
        exceeded = self._read_to_end(limits)
        try:
            self.kill()
        except OSError as error:
            reason = f"a program cannot be stopped (pidfd_send_signal: {error})"
            raise SandboxError(reason) from error
        if not select.select([self._handle], [], [], _END_S)[0]:
            raise SandboxError(f"a program was killed and has not ended in {_END_S:g} s")
        _, status, usage = os.wait4(self._child.pid, 0)
        exit_code = self._child.returncode = os.waitstatus_to_exitcode(status)
        word, *protections = self._status.decode("utf-8", "replace").split(" ")
        if word.encode() != launcher.READY:
            reason = self._status.decode("utf-8", "replace") or "it ended before it was ready"
            raise SandboxError(f"the program was not run: {reason}")
        self.protections = tuple(protections)
        cpu_s = usage.ru_utime + usage.ru_stime
        if exceeded is not None:
            outcome = exceeded
        elif exit_code == 0:
            outcome = Outcome.EXITED
        elif exit_code == -signal.SIGXCPU or (
            exit_code == -signal.SIGKILL and cpu_s >= limits.cpu_s
        ):
            outcome = Outcome.CPU_LIMIT
        elif exit_code == launcher.OUT_OF_MEMORY:
            outcome = Outcome.MEMORY_LIMIT
        else:
            outcome = Outcome.CRASHED
        wall_s = time.monotonic() - self._began
        return SandboxResult(outcome, bytes(self._output[: limits.output_bytes]), wall_s, cpu_s)

    def __enter__(self) -> _Program:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing.close()

    def _reap(self) -> None:
        assert self._child.stdout is not None
        self._child.stdout.close()
        if self._child.returncode is None:
            self._child.kill()
            self._child.wait()

    def _read_to_end(self, limits: SandboxLimits) -> Outcome | None:
        """Read output until the process ends; return the limit that it exceeded, if any."""
        assert self._child.stdout is not None
        output = self._child.stdout.fileno()
        deadline = self._began + _START_S
        with selectors.DefaultSelector() as selector:
            for descriptor in (output, self._status_pipe, self._handle):
                selector.register(descriptor, selectors.EVENT_READ)
            # The process and its output end in any order; wait for both.
            while selector.get_map():
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    return Outcome.WALL_LIMIT
                for descriptor in (key.fd for key, _ in events):
                    piece = b"" if descriptor == self._handle else os.read(descriptor, _PIECE_BYTES)
                    if not piece:
                        selector.unregister(descriptor)
                    if descriptor == output:
                        self._output += piece
                    elif descriptor == self._status_pipe and piece:
                        self._status = (self._status + piece)[:_STATUS_BYTES]
                        self._began = time.monotonic()
                        deadline = self._began + limits.wall_s
                if len(self._output) > limits.output_bytes:
                    return Outcome.OUTPUT_LIMIT
        return None


# The launcher is passed compiled, which is faster than parsing its source.
_BEGIN = (
    "import marshal, sys\n"
    "code, request = marshal.load(open(int(sys.argv[1]), 'rb'))\n"
    "names = {'__name__': 'launcher'}\n"
    "exec(code, names)\n"
    "names['main'](request, int(sys.argv[2]))\n"
)
_COMMAND = (sys.executable, "-s", "-P", "-S", "-B", "-X", "utf8", "-c", _BEGIN)


@functools.cache
def _launcher() -> CodeType:
    source = Path(launcher.__file__)
    return compile(source.read_bytes(), source.name, "exec", dont_inherit=True, optimize=2)


def _file_of(content: bytes, stack: contextlib.ExitStack) -> int:
    """Return a descriptor of a memory file with ``content``, positioned at its start."""
    descriptor = os.memfd_create("trajpack-sandbox")
    stack.callback(os.close, descriptor)
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
