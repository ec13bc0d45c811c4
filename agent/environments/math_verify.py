"""Environment that compares answers with known solutions by math-verify or reasoning-gym."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trajpack.agent.environments import answer_worker
from trajpack.agent.environments.questions import JudgingEnvironment, Question
from trajpack.packing.optional import require

SCRIPT = Path(answer_worker.__file__)
"""Program of the workers."""
TIMED_OUT = b"timed out"
"""Verdict on an answer whose worker ran out of time, beside those of `answer_worker`."""
LENIENT = frozenset({"coin_flip", "game_of_life_halting"})
"""Tasks of reasoning-gym whose scorers give many wrong numbers the full score."""
_START_TIMEOUT_S = 120.0
_MAX_ANSWER_CHARS = 16_384
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}


class MathVerifyEnvironment(JudgingEnvironment):
    """Judges final answers by math-verify, or by reasoning-gym for questions of its tasks.

    It must be closed, by `close` or ``async with``. Worker processes check the answers. They start
    when needed and do not import the caller's script, which needs no ``__main__`` guard. No text of
    a model is run as code: some scorers of reasoning-gym evaluate their input, so they get numbers,
    operators and names of common functions only. Any other answer to their questions is right if it
    equals the entry's answer.

    A check that exceeds its time or memory counts as wrong; ``info`` of the step has then
    ``timed_out`` and ``failed``, a bool per answer each. If a worker is lost for any other reason,
    the step raises.

    Args:
        questions: All questions of the rollout.
        workers: Worker processes; the number of cores, at most four, if None.
        timeout_s: Most seconds of processor time for one check. Its wall time is limited to about
            twice as much.

    Raises:
        ValueError: If an id appears twice, an option is not positive, or a question is of
            ``coin_flip`` or ``game_of_life_halting``, whose scorers give wrong numbers the full
            score.
        ModuleNotFoundError: If math-verify or reasoning-gym is needed and not installed.
    """

    def __init__(
        self, questions: Iterable[Question], *, workers: int | None = None, timeout_s: float = 5.0
    ) -> None:
        workers = min(4, os.cpu_count() or 1) if workers is None else workers
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s must be positive and finite, got {timeout_s}")
        super().__init__(questions, "question")
        tasks = {question.gym_task for question in self._by_id.values() if question.gym_task}
        for task in tasks & LENIENT:
            raise ValueError(
                f"reasoning-gym's scorer of {task!r} gives wrong numbers the full score: use "
                "ExactAnswerEnvironment, or questions of another task"
            )
        require("math_verify", *(["reasoning_gym"] if tasks else []))
        self._timeout_s = timeout_s
        self._is_closed = False
        self._workers = [_Worker(needs_gym=bool(tasks)) for _ in range(workers)]
        self._idle = self._workers.copy()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="trajpack-answers")

    async def _judge(
        self, asked: Question, answers: Sequence[str]
    ) -> tuple[list[bool], dict[str, Any]]:
        self._refuse_if_closed()
        gym = (asked.gym_task, asked.gym_entry) if asked.gym_task else None
        loop, question = asyncio.get_running_loop(), (asked.solutions, gym)
        checks = [
            loop.run_in_executor(self._threads, self._check, question, answer) for answer in answers
        ]
        try:
            verdicts = await asyncio.gather(*checks)
        except RuntimeError as error:
            self._refuse_if_closed()
            raise RuntimeError(f"step: an answer was not checked: {error}") from error
        cut_short = {
            "timed_out": [verdict == TIMED_OUT for verdict in verdicts],
            "failed": [verdict == answer_worker.FAILED for verdict in verdicts],
        }
        info = cut_short if any(map(any, cut_short.values())) else {}
        return [verdict == answer_worker.RIGHT for verdict in verdicts], info

    async def close(self) -> None:
        """Kill all workers and wait for their end. A `step` in progress raises."""
        self._is_closed = True
        for worker in self._workers:
            worker.kill()
        await asyncio.to_thread(self._threads.shutdown)
        for worker in self._workers:
            worker.stop()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError("the environment is closed")

    def _check(self, question: tuple[Any, ...], answer: str) -> bytes:
        """Check in one of the threads; there are as many as workers, so a worker is idle."""
        worker = self._idle.pop()  # the one that was used last: others need not start
        try:
            self._refuse_if_closed()
            return worker.check(*question, answer[-_MAX_ANSWER_CHARS:], seconds=self._timeout_s)
        finally:
            self._idle.append(worker)


class _Worker:
    """A process that checks answers; it starts when needed, and again after its end."""

    def __init__(self, needs_gym: bool) -> None:
        self._needs_gym = needs_gym
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Any = None

    def check(self, *request: Any, seconds: float) -> bytes:
        """Return the verdict on an answer.

        Raises:
            RuntimeError: If the process was lost or cannot be started.
        """
        if self._child is None or self._child.poll() is not None:
            self._start()
        child = self._child
        assert child is not None
        try:
            self._connection.send((*request, seconds))
            if self._connection.poll(2 * seconds + 1):  # the machine may be busy
                verdict: bytes = self._connection.recv_bytes()
                return verdict
            self.stop()
        except (EOFError, OSError):
            status = child.wait()
            if -status in _CRASHES:
                return answer_worker.FAILED
            if status != -signal.SIGPROF:
                raise RuntimeError(f"its worker was lost, with status {status}") from None
        return TIMED_OUT

    def _start(self) -> None:
        self.stop()
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", SCRIPT, *["gym"] * self._needs_gym],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                # Thread pools of numerical libraries reserve memory for every core.
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the caller to handle
            )
        try:
            if not self._connection.poll(_START_TIMEOUT_S):
                raise EOFError
            self._connection.recv_bytes()
        except (EOFError, OSError):
            raise RuntimeError("a worker that checks answers did not start") from None

    def kill(self) -> None:
        """Kill the process; a thread that waits for its reply gets none. Thread-safe."""
        if (child := self._child) is not None:
            child.kill()

    def stop(self) -> None:
        """Kill the process and wait for its end."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            self._connection.close()

    def __del__(self) -> None:
        self.stop()  # of an environment that was never closed
