"""Environment that compares answers with known solutions by math-verify or reasoning-gym.

Worker processes, which run `answer_worker`, check the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import selectors
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trajpack.agent.environments import answer_worker
from trajpack.agent.environments.judging import JudgingEnvironment
from trajpack.agent.environments.questions import Question
from trajpack.packing.optional import require

SCRIPT = Path(answer_worker.__file__)
"""Program of the workers."""
_START_TIMEOUT_S = 120.0
_MAX_ANSWER_CHARS = 16_384
_MAX_DEFAULT_WORKERS = 4
_LENIENT = frozenset({"coin_flip", "game_of_life_halting"})
"""Tasks of reasoning-gym whose scorers give many wrong numbers the full score."""
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})


_TIMED_OUT = b"timed out"
"""Verdict on an answer whose worker ran out of time, beside those of `answer_worker`."""
_VERDICTS = (answer_worker.RIGHT, answer_worker.WRONG, answer_worker.FAILED)


class MathVerifyEnvironment(JudgingEnvironment[Question]):
    r"""Judges final answers by math-verify, or by reasoning-gym for questions of its tasks.

    An action is ``(qid, answers)``, where ``qid`` is a question's id, or one followed by
    ``@`` and anything without another ``@``. One environment serves any number of
    episodes and tasks at once; it must be closed, by `close` or ``async with``.

    Worker processes check the answers. They start when needed and import neither torch nor the
    caller's script, so a script needs no ``__main__`` guard. No text of a model is run as code:
    some scorers of reasoning-gym evaluate their input, so they get numbers, operators and names of
    common functions only. Any other answer to their questions is right if it equals the entry's
    answer, and otherwise wrong.

    A check that exceeds its time or memory counts as wrong; ``info`` of the step has then
    ``timed_out`` and ``failed``, a bool per answer each. If a worker is lost for any other reason,
    a new one repeats the check once, and the step raises if that is lost too.

    Args:
        questions: All questions of the rollout. No id is another id followed by ``@`` and a suffix.
        workers: Worker processes; the number of cores, at most four, if None.
        timeout_s: Most seconds of processor time for one check. Its wall time is limited to about
            twice as much.

    Raises:
        ValueError: If an id appears twice or is another with a suffix, an option is not positive,
            or a question is of ``coin_flip`` or ``game_of_life_halting``, whose scorers give wrong
            numbers the full score.
        ModuleNotFoundError: If math-verify or reasoning-gym is needed and not installed.
    """

    def __init__(
        self,
        questions: Iterable[Question],
        *,
        workers: int | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        if workers is None:
            workers = min(_MAX_DEFAULT_WORKERS, os.cpu_count() or 1)
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s must be positive and finite, got {timeout_s}")
        super().__init__(questions, "question")
        for id in self._by_id:
            stem, mark, _ = id.rpartition("@")
            if mark and stem in self._by_id:
                raise ValueError(
                    f"question id {id!r} might be a sample of the question with the id {stem!r}"
                )
        tasks = {question.gym_task for question in self._by_id.values() if question.gym_task}
        for task in tasks & _LENIENT:
            raise ValueError(
                f"reasoning-gym's scorer of {task!r} gives wrong numbers the full score: use "
                "ExactAnswerEnvironment, or questions of another task"
            )
        needs_gym = bool(tasks)
        require("math_verify", *(["reasoning_gym"] if needs_gym else []))
        self._timeout_s = timeout_s
        self._closed = threading.Event()
        self._workers = [_AnswerWorker(needs_gym, self._closed) for _ in range(workers)]
        # LIFO: another worker starts only while the last used one is busy.
        self._idle: queue.LifoQueue[_AnswerWorker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="trajpack-answers")
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    async def _judge(
        self, asked: Question, qid: str, answers: Sequence[str]
    ) -> tuple[list[bool], dict[str, Any]]:
        loop = asyncio.get_running_loop()
        self._refuse_if_closed()
        checks = [
            loop.run_in_executor(self._threads, self._check, asked, answer) for answer in answers
        ]
        try:
            verdicts = await asyncio.gather(*checks)
        except (RuntimeError, OSError) as error:
            self._refuse_if_closed()
            raise RuntimeError(f"step: an answer to {qid!r} was not checked: {error}") from error
        cut_short = {
            name: [given == verdict for given in verdicts]
            for name, verdict in (("timed_out", _TIMED_OUT), ("failed", answer_worker.FAILED))
        }
        info = cut_short if any(map(any, cut_short.values())) else {}
        return [verdict == answer_worker.RIGHT for verdict in verdicts], info

    async def close(self) -> None:
        """Kill all workers and wait for their end. A `step` in progress raises."""
        self._closed.set()
        for worker in self._workers:
            worker.kill()
        try:
            await asyncio.to_thread(self._threads.shutdown)
        finally:
            self._finalizer()

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the environment is closed")

    def _check(self, question: Question, answer: str) -> bytes:
        """Check in one of the threads; there are as many as workers, so a worker is idle."""
        gym = (question.gym_task, question.gym_entry) if question.gym_task else None
        worker = self._idle.get()
        try:
            self._refuse_if_closed()
            answer = answer[-_MAX_ANSWER_CHARS:]
            return worker.check((question.solutions, gym), answer, self._timeout_s)
        finally:
            self._idle.put(worker)


def _stop_all(workers: Iterable[_AnswerWorker]) -> None:
    for worker in workers:
        worker.stop()


class _AnswerWorker:
    """A worker process that starts when needed and is replaced after its end.

    No process is started after ``closed`` is set.
    """

    def __init__(self, needs_gym: bool, closed: threading.Event) -> None:
        self._needs_gym = needs_gym
        self._closed = closed
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None before the start."""
        return None if self._child is None else self._child.pid

    def check(self, question: tuple[Any, ...], answer: str, cpu_seconds: float) -> bytes:
        """Check one answer; repeat the check in a new process if the first was lost.

        Raises:
            RuntimeError: If both processes were lost, none can be started, or the environment is
                closed.
        """
        request = pickle.dumps((*question, answer, cpu_seconds))
        for _ in range(2):
            child = self._child
            if child is None or child.poll() is not None:
                child = self._start()
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(request)
                child.stdin.flush()
            reply = _read(child, answer_worker.wall_seconds(cpu_seconds))
            if reply in _VERDICTS:
                return reply
            self.stop()
            self._refuse_if_closed()
            if reply is None or child.returncode == -signal.SIGPROF:
                return _TIMED_OUT
            if -child.returncode in _CRASHES:
                return answer_worker.FAILED
        raise RuntimeError("its worker was lost, and so was a second one")

    def _start(self) -> subprocess.Popen[bytes]:
        self.stop()
        command = [sys.executable, "-P", "-W", "ignore", str(SCRIPT)]
        # Thread pools of numerical libraries reserve memory for every core.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._refuse_if_closed()
        self._child = child = subprocess.Popen(
            command + ["--reasoning-gym"] * self._needs_gym,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the caller to handle
        )
        # `closed` is set before processes are killed, so a process that starts meanwhile ends too.
        if self._closed.is_set():
            child.kill()
        if _read(child, _START_TIMEOUT_S) != answer_worker.READY:
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
            with contextlib.suppress(BrokenPipeError):  # a request may be left in it
                pipe.close()

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the environment is closed")


def _read(child: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """Return a byte, none of an ended process, or None after the time."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        return os.read(child.stdout.fileno(), 1) if selector.select(seconds) else None
