"""An environment that knows the answers and checks what models say against them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import pickle
import queue
import selectors
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any

from trajpack.agent import answer_worker
from trajpack.agent.questions import Question

_SCRIPT = Path(answer_worker.__file__)
_START_TIMEOUT_S = 120.0
_MAX_ANSWER_CHARS = 16_384


class _Verdict(Enum):
    RIGHT = "right"
    WRONG = "wrong"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


class MathVerifyEnvironment:
    r"""Judges final answers by math-verify or, for its questions, by reasoning-gym.

    An action is ``(qid, answers)``, where ``qid`` is a question's id, or one followed by
    ``@`` and anything without another ``@``. One environment serves any number of
    episodes and tasks at once; it must be closed, by `close` or ``async with``.

    Answers are checked in worker processes, which start at the first `step` and import
    neither torch nor the caller's script, so a script needs no ``__main__`` guard. Whatever
    an answer does there harms no one: a check that takes too long is killed and the answer
    counts as wrong, as it does when the worker dies or runs out of memory.

    Args:
        questions: Every question that will be asked, ids unique.
        workers: Processes that check answers at the same time.
        timeout_s: Seconds for the check of one answer at most.

    Raises:
        ValueError: If an id appears twice, or an option is not positive.
        ModuleNotFoundError: If math-verify or reasoning-gym is needed and not installed.

    Cost: about 80 MB and half a second to start for each worker, twice that with
    reasoning-gym; a check of an integer takes about a millisecond. Only the last 16,384
    characters of an answer are read.
    """

    def __init__(
        self, questions: Iterable[Question], *, workers: int = 1, timeout_s: float = 5.0
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s must be positive and finite, got {timeout_s}")
        self._questions: dict[str, Question] = {}
        for question in questions:
            if question.id in self._questions:
                raise ValueError(f"question id {question.id!r} appears twice")
            self._questions[question.id] = question
        needs_gym = any(question.gym_task for question in self._questions.values())
        for module in ("math_verify", *(["reasoning_gym"] if needs_gym else [])):
            if importlib.util.find_spec(module) is None:
                raise ModuleNotFoundError(f"{module} is needed: pip install 'trajpack[agent]'")
        self._timeout_s = timeout_s
        self._is_closed = False
        self._workers = [_Worker(needs_gym) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="trajpack-answers")
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    async def reset(self) -> tuple[None, dict[str, Any]]:
        """Start an episode; there is nothing to do."""
        return None, {}

    async def step(
        self, action: tuple[str, Sequence[str]]
    ) -> tuple[None, list[bool], bool, bool, dict[str, Any]]:
        """Judge the answers to one question.

        Returns:
            ``(None, successes, True, False, info)`` with one success per answer. ``info``
            is empty unless checks were cut short: then ``timed_out`` and ``failed`` hold
            one bool per answer.

        Raises:
            ValueError: If no question has this ``qid``.
            TypeError: If an answer is not a string.
            RuntimeError: If the environment is closed, or a worker cannot start.
        """
        qid, answers = action
        question = self._question(qid)
        if isinstance(answers, str) or not all(isinstance(answer, str) for answer in answers):
            raise TypeError(f"step: the answers to {qid!r} must be a list of strings")
        loop = asyncio.get_running_loop()
        self._refuse_if_closed()
        checks = [
            loop.run_in_executor(self._threads, self._check, self._request(question, answer))
            for answer in answers
        ]
        verdicts = await asyncio.gather(*checks)
        cut_short = {
            verdict.value: [given is verdict for given in verdicts]
            for verdict in (_Verdict.TIMED_OUT, _Verdict.FAILED)
        }
        info = cut_short if any(map(any, cut_short.values())) else {}
        return None, [verdict is _Verdict.RIGHT for verdict in verdicts], True, False, info

    async def close(self) -> None:
        """End all workers and wait until they are gone. A check in progress fails."""
        self._is_closed = True
        for worker in self._workers:
            worker.kill()
        try:
            await asyncio.to_thread(self._threads.shutdown)
        finally:
            self._finalizer()

    async def __aenter__(self) -> MathVerifyEnvironment:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _question(self, qid: str) -> Question:
        for question_id in (qid, qid.rpartition("@")[0]):
            if question_id in self._questions:
                return self._questions[question_id]
        raise ValueError(f"step: no question has the id {qid!r}")

    def _request(self, question: Question, answer: str) -> bytes:
        gym = (question.gym_task, question.gym_entry) if question.gym_task else None
        answer = answer[-_MAX_ANSWER_CHARS:]
        return pickle.dumps((question.solutions, gym, answer, self._timeout_s))

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError("the environment is closed")

    def _check(self, request: bytes) -> _Verdict:
        """Run in one of as many threads as there are workers, so one is always idle."""
        worker = self._idle.get()
        try:
            self._refuse_if_closed()
            return worker.check(request, self._timeout_s)
        finally:
            self._idle.put(worker)


class _Worker:
    """A process that starts when needed and is replaced after it was killed or died."""

    def __init__(self, needs_gym: bool) -> None:
        self._needs_gym = needs_gym
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, request: bytes, timeout_s: float) -> _Verdict:
        child = self._child
        if child is None or child.poll() is not None:
            child = self._start()
        assert child.stdin is not None
        try:
            child.stdin.write(request)
            child.stdin.flush()
            reply = _read_byte(child, timeout_s)
        except BrokenPipeError:
            reply = b""
        if reply == answer_worker.RIGHT:
            return _Verdict.RIGHT
        if reply == answer_worker.WRONG:
            return _Verdict.WRONG
        if reply != answer_worker.FAILED:
            self.stop()
        return _Verdict.TIMED_OUT if reply is None else _Verdict.FAILED

    def _start(self) -> subprocess.Popen[bytes]:
        self.stop()
        command = [sys.executable, "-P", "-W", "ignore", str(_SCRIPT)]
        self._child = child = subprocess.Popen(
            command + ["--reasoning-gym"] * self._needs_gym,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Thread pools of numerical libraries reserve memory for every core.
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the caller to handle
        )
        if _read_byte(child, _START_TIMEOUT_S) != answer_worker.READY:
            self.stop()
            raise RuntimeError(f"a worker that checks answers did not start: {child.returncode}")
        return child

    def kill(self) -> None:
        """End the process; a thread that waits for its reply gets none. Safe in any thread."""
        child = self._child
        if child is not None:
            child.kill()

    def stop(self) -> None:
        """End the process, wait until it is gone and close its pipes."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            # What was not flushed was for the process that is gone.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _stop_all(workers: Iterable[_Worker]) -> None:
    for worker in workers:
        worker.stop()


def _read_byte(child: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
    """Return one byte, nothing if the process is gone, or None if none came in time."""
    assert child.stdout is not None
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while (remaining := deadline - time.monotonic()) > 0:
            if selector.select(remaining):
                return os.read(child.stdout.fileno(), 1)
    return None
