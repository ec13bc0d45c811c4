"""Client side of a worker process that checks answers."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from trajpack.agent.environments import answer_worker

SCRIPT = Path(answer_worker.__file__)
START_TIMEOUT_S = 120.0

_REPLY_BYTES = 1 + answer_worker.NONCE_BYTES
_ENVIRONMENT = (
    *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
    *("PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE"),
    "PYTHONPYCACHEPREFIX",
)
"""Environment variables that a worker inherits: those that imports need."""
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
"""Signals of a crash."""


class Verdict(Enum):
    """Result of a check."""

    RIGHT = "right"
    WRONG = "wrong"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


class WorkerLostError(RuntimeError):
    """A worker ended during a check, possibly for a reason outside the answer."""


class AnswerWorker:
    """A worker process that starts when needed and is replaced after its end.

    Args:
        needs_gym: Whether reasoning-gym is imported at the start.
        closed: No process is started after this is set.
    """

    def __init__(self, needs_gym: bool, closed: threading.Event) -> None:
        self._needs_gym = needs_gym
        self._closed = closed
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None before the start."""
        return None if self._child is None else self._child.pid

    def check(self, question: tuple[Any, ...], answer: str, cpu_seconds: float) -> Verdict:
        """Check one answer; repeat the check in a new process if the first did not finish.

        Raises:
            WorkerLostError: If both processes were lost.
            RuntimeError: If no process can be started, or the environment is closed.
        """
        with contextlib.suppress(WorkerLostError):
            verdict, is_final = self._check_once(question, answer, cpu_seconds)
            if is_final:
                return verdict
        return self._check_once(question, answer, cpu_seconds)[0]

    def _check_once(
        self, question: tuple[Any, ...], answer: str, cpu_seconds: float
    ) -> tuple[Verdict, bool]:
        """Return a verdict, and whether it is final."""
        child = self._ready()
        nonce = secrets.token_bytes(answer_worker.NONCE_BYTES)
        request = pickle.dumps((nonce, *question, answer, cpu_seconds))
        deadline = time.monotonic() + answer_worker.wall_seconds(cpu_seconds)
        reply = _read(child, _REPLY_BYTES, deadline) if _write(child, request, deadline) else None
        verdict = _VERDICTS.get(reply[:1]) if reply and reply[1:] == nonce else None
        if verdict is not None:
            return verdict, True
        self.stop()
        self._refuse_if_closed()
        if reply is None:
            return Verdict.TIMED_OUT, False
        if reply:
            return Verdict.FAILED, False
        if child.returncode == -signal.SIGPROF:
            return Verdict.TIMED_OUT, True
        if -child.returncode in _CRASHES:
            return Verdict.FAILED, False
        raise WorkerLostError(f"its worker ended with status {child.returncode}")

    def _ready(self) -> subprocess.Popen[bytes]:
        """Return a process that waits for a request and has no unread output."""
        child = self._child
        if child is not None and child.poll() is None and not _has_output(child):
            return child
        return self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.stop()
        command = [sys.executable, "-P", "-W", "ignore", str(SCRIPT)]
        self._refuse_if_closed()
        self._child = child = subprocess.Popen(
            command + ["--reasoning-gym"] * self._needs_gym,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=worker_environment(os.environ),
            start_new_session=True,  # Ctrl-C is for the caller to handle
        )
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)
        # `closed` is set before processes are killed, so a process that starts meanwhile ends too.
        if self._closed.is_set():
            child.kill()
        if _read(child, 1, time.monotonic() + START_TIMEOUT_S) != answer_worker.READY:
            self.stop()
            self._refuse_if_closed()
            raise RuntimeError(f"a worker that checks answers did not start: {child.returncode}")
        return child

    def kill(self) -> None:
        """Kill the process; a thread that waits for its reply gets none. Thread-safe."""
        child = self._child
        if child is not None:
            child.kill()

    def stop(self) -> None:
        """Kill the process, wait for its end and close its pipes."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the environment is closed")


_VERDICTS: Mapping[bytes, Verdict] = {
    answer_worker.RIGHT: Verdict.RIGHT,
    answer_worker.WRONG: Verdict.WRONG,
    answer_worker.FAILED: Verdict.FAILED,
}


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a worker, without secrets.

    Example:
        >>> worker_environment({"PATH": "/bin", "API_KEY": "hidden"})
        {'PATH': '/bin', 'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}
    """
    kept = {name: environ[name] for name in _ENVIRONMENT if name in environ}
    # Thread pools of numerical libraries reserve memory for every core.
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _has_output(child: subprocess.Popen[bytes]) -> bool:
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        return bool(selector.select(0))


def _write(child: subprocess.Popen[bytes], request: bytes, deadline: float) -> bool:
    """Send a request; return False if the deadline passed, True also if the process ended."""
    assert child.stdin is not None
    rest = memoryview(request)
    with selectors.DefaultSelector() as selector, contextlib.suppress(BrokenPipeError):
        selector.register(child.stdin, selectors.EVENT_WRITE)
        while rest and (remaining := deadline - time.monotonic()) > 0:
            if selector.select(remaining):
                rest = rest[os.write(child.stdin.fileno(), rest) :]
        return not rest
    return True


def _read(child: subprocess.Popen[bytes], num_bytes: int, deadline: float) -> bytes | None:
    """Return the reply, or None after the deadline.

    An ended process gives a shorter reply, surplus output a reply that is one byte too long.
    """
    assert child.stdout is not None
    reply = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while (remaining := deadline - time.monotonic()) > 0:
            if selector.select(remaining):
                piece = os.read(child.stdout.fileno(), num_bytes + 1 - len(reply))
                reply += piece
                if not piece or len(reply) >= num_bytes:
                    return reply
    return None
