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
LENIENT = frozenset({"coin_flip", "game_of_life_halting"})
"""Tasks of reasoning-gym whose scorers give many wrong numbers the full score."""
_START_TIMEOUT_S = 120.0
_MAX_ANSWER_CHARS = 16_384
_TIMED_OUT = (-signal.SIGPROF, -signal.SIGALRM)
_CRASHED = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL, -signal.SIGFPE)


class MathVerifyEnvironment(JudgingEnvironment):
    """Judges final answers by math-verify, or by reasoning-gym for questions of its tasks.

    It must be closed, by `close` or ``async with``. Worker processes check the answers; they start
    when needed and do not import the caller's script. No text of a model is run as code: scorers of
    reasoning-gym, of which some evaluate their input, get numbers, operators and names of common
    functions only. Any other answer to their questions is right if it equals the entry's answer.

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
        self._needs_gym = bool(tasks)
        self._timeout_s = timeout_s
        self._is_closed = False
        self._workers: dict[subprocess.Popen[bytes], Any] = {}  # with their connections
        self._idle: list[subprocess.Popen[bytes]] = []
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="trajpack-answers")

    async def _judge(
        self, asked: Question, answers: Sequence[str]
    ) -> tuple[list[bool], dict[str, Any]]:
        self._refuse_if_closed()
        gym = (asked.gym_task, asked.gym_entry) if asked.gym_task else None
        loop = asyncio.get_running_loop()
        requests = [
            (asked.solutions, gym, answer[-_MAX_ANSWER_CHARS:], self._timeout_s)
            for answer in answers
        ]
        checks = [loop.run_in_executor(self._threads, self._check, request) for request in requests]
        verdicts = await asyncio.gather(*checks)
        timed_out = [verdict in _TIMED_OUT for verdict in verdicts]
        failed = [verdict in (None, *_CRASHED) for verdict in verdicts]
        info = {"timed_out": timed_out, "failed": failed} if any(timed_out + failed) else {}
        return [verdict is True for verdict in verdicts], info

    async def close(self) -> None:
        """Kill all workers and wait for their end. A `step` in progress raises."""
        self._is_closed = True
        for worker in list(self._workers):
            worker.kill()
        await asyncio.to_thread(self._threads.shutdown)
        for worker in list(self._workers):
            self._end(worker)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError("the environment is closed")

    def _check(self, request: tuple[Any, ...]) -> int | None:
        """Return the reply of a worker, or the status it ended with. Called in the threads."""
        limit_s = 2 * self._timeout_s + 1  # the alarm of a worker that stands still does not end it
        try:
            worker = self._idle.pop()
            while self._workers[worker].poll():  # it has ended: it was asked nothing
                self._end(worker)
                worker = self._idle.pop()
        except IndexError:
            worker = self._start()
            limit_s += _START_TIMEOUT_S
        self._refuse_if_closed()
        try:
            self._workers[worker].send(request)
            if not self._workers[worker].poll(limit_s):
                worker.kill()
                self._end(worker)
                return -signal.SIGALRM
            verdict: int | None = self._workers[worker].recv()
        except (EOFError, OSError):
            verdict = self._end(worker)
            if verdict not in (*_TIMED_OUT, *_CRASHED):
                self._refuse_if_closed()
                raise RuntimeError(
                    f"step: an answer was not checked: its worker was lost, with status {verdict}"
                ) from None
        else:
            self._idle.append(worker)  # the next to be used: others need not start
        return verdict

    def _start(self) -> subprocess.Popen[bytes]:
        connection, theirs = multiprocessing.Pipe()
        with theirs:
            worker = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", SCRIPT, *["gym"] * self._needs_gym],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                # Thread pools of numerical libraries reserve memory for every core.
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the caller to handle
            )
        self._workers[worker] = connection
        return worker

    def _end(self, worker: subprocess.Popen[bytes]) -> int:
        self._workers.pop(worker).close()
        return worker.wait()
