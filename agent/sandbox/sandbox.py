"""Runs untrusted Python programs, each in a confined process."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trajpack.agent.errors import SetupError
from trajpack.agent.sandbox.files import landlock_ruleset
from trajpack.agent.sandbox.filter import system_call_filter
from trajpack.agent.sandbox.launcher import canonical
from trajpack.agent.sandbox.limits import Outcome, SandboxError, SandboxLimits, SandboxResult
from trajpack.agent.sandbox.process import SandboxedProcess

_logger = logging.getLogger(__name__)

_TRIED_THREADS = 4
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
        self._running: set[SandboxedProcess] = set()
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
        self._ruleset: int | None = None
        self._protections: tuple[str, ...] = ()
        try:
            self._working_folder = os.path.join(self._folder.name, "work")
            os.mkdir(self._working_folder)
            # Each process tests that it cannot read this file.
            self._hidden = os.path.join(self._folder.name, "hidden")
            with open(self._hidden, "xb"):
                pass
            self._ruleset = self._make_ruleset()
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
        result, _ = self._run(code, stdin, expression=expression, limits=self._limits)
        return result

    def close(self) -> None:
        """Kill all running programs; later calls of `run` raise."""
        with self._lock:
            self._is_closed = True
            for child in self._running:
                child.kill()
        self._folder.cleanup()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _make_ruleset(self) -> int | None:
        try:
            ruleset = landlock_ruleset(self._working_folder)
        except OSError as error:
            raise SetupError(f"Sandbox: files cannot be hidden here: {error}") from error
        if ruleset is not None:  # threads in `run` may use it
            weakref.finalize(self, os.close, ruleset)
        return ruleset

    def _test_program(self, allow_file_reads: bool) -> None:
        """Run a program that imports a module and tries to exceed its thread limit.

        Each process tests the other protections itself.
        """
        most = min(self._limits.num_threads, _TRIED_THREADS)
        trial = replace(self._limits, num_threads=most)
        try:
            result, protections = self._run(_TRIAL % most, b"", expression="started", limits=trial)
        except SandboxError as error:
            raise SetupError(f"Sandbox: programs cannot be locked up here: {error}") from error
        started = {canonical(count).encode(): count for count in range(most + 1)}.get(result.output)
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
        self, code: str, stdin: bytes, *, expression: str | None, limits: SandboxLimits
    ) -> tuple[SandboxResult, tuple[str, ...]]:
        request = {
            "code": code.encode("utf-8", "replace"),
            "expression": expression,
            "filters": self._filters,
            "ruleset": self._ruleset,
            "hidden": self._hidden,
            "limits": _kernel_limits(limits),
            "num_threads": limits.num_threads,
            "parent": os.getpid(),
        }
        with contextlib.ExitStack() as stack:
            child = stack.enter_context(self._start(request, stdin))
            with self._lock:
                self._refuse_if_closed()
                self._running.add(child)
            stack.callback(self._forget, child)
            try:
                return child.watch(limits), child.protections
            finally:
                # A kill by `close` is not an outcome of the program.
                self._refuse_if_closed()

    def _start(self, request: Mapping[str, Any], stdin: bytes) -> SandboxedProcess:
        self._refuse_if_closed()
        try:
            return SandboxedProcess(request, stdin, self._working_folder)
        except OSError as error:
            raise SandboxError(f"a process could not be started: {error}") from error

    def _forget(self, child: SandboxedProcess) -> None:
        with self._lock:
            self._running.discard(child)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise SandboxError("the sandbox is closed")


def _kernel_limits(limits: SandboxLimits) -> dict[str, tuple[int, int]]:
    fixed = {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_NOFILE": limits.num_files,
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": 0,
        "RLIMIT_MEMLOCK": 0,
    }
    # SIGXCPU at the soft limit, SIGKILL at the hard one.
    cpu = {"RLIMIT_CPU": (limits.cpu_s, limits.cpu_s + 1)}
    return cpu | {name: (value, value) for name, value in fixed.items()}
