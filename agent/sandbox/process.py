"""One sandboxed process, from start to end."""

from __future__ import annotations

import contextlib
import functools
import marshal
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from trajpack.agent.sandbox import launcher as sandbox_launcher
from trajpack.agent.sandbox.limits import Outcome, SandboxError, SandboxLimits, SandboxResult

_START_S = 60.0
_END_S = 60.0
_STATUS_BYTES = 4096
_PIECE_BYTES = 1 << 16


class SandboxedProcess:
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
                env=_ENVIRONMENT,
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
        cut_short = self._read_to_end(limits)
        try:
            self.kill()
        except OSError as error:
            reason = f"a program cannot be stopped (pidfd_send_signal: {error})"
            raise SandboxError(reason) from error
        if not select.select([self._handle], [], [], _END_S)[0]:
            raise SandboxError(f"a program was killed and has not ended in {_END_S:g} s")
        _, status, usage = os.wait4(self._child.pid, 0)
        self._child.returncode = os.waitstatus_to_exitcode(status)
        word, *protections = self._status.decode("utf-8", "replace").split(" ")
        if word.encode() != sandbox_launcher.READY:
            reason = self._status.decode("utf-8", "replace") or "it ended before it was ready"
            raise SandboxError(f"the program was not run: {reason}")
        self.protections = tuple(protections)
        cpu_s = usage.ru_utime + usage.ru_stime
        outcome = cut_short or _outcome(self._child.returncode, cpu_s >= limits.cpu_s)
        wall_s = time.monotonic() - self._began
        return SandboxResult(outcome, bytes(self._output[: limits.output_bytes]), wall_s, cpu_s)

    def __enter__(self) -> SandboxedProcess:
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
_ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""The whole environment. A fixed hash seed gives sets of strings the same order in each run, so
that verdicts repeat; the option ``-I`` would ignore it."""


@functools.cache
def _launcher() -> CodeType:
    source = Path(sandbox_launcher.__file__)
    return compile(source.read_bytes(), source.name, "exec", dont_inherit=True, optimize=2)


def _outcome(exit_code: int, has_used_its_time: bool) -> Outcome:
    if exit_code == 0:
        return Outcome.EXITED
    if exit_code == -signal.SIGXCPU or (exit_code == -signal.SIGKILL and has_used_its_time):
        return Outcome.CPU_LIMIT
    return Outcome.MEMORY_LIMIT if exit_code == sandbox_launcher.OUT_OF_MEMORY else Outcome.CRASHED


def _file_of(content: bytes, stack: contextlib.ExitStack) -> int:
    """Return a descriptor of a memory file with ``content``, positioned at its start."""
    descriptor = os.memfd_create("trajpack-sandbox")
    stack.callback(os.close, descriptor)
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
