"""Environment that compares answers with known solutions by math-verify or reasoning-gym."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trajpack.agent.environments.answer_checking import AnswerWorker, Verdict
from trajpack.agent.environments.questions import (
    Question,
    check_answers,
    find_by_qid,
    unique_by_id,
)
from trajpack.packing.optional import require

_MAX_ANSWER_CHARS = 16_384
_MAX_DEFAULT_WORKERS = 4


class MathVerifyEnvironment:
    r"""Judges final answers by math-verify, or by reasoning-gym for questions of its tasks.

    An action is ``(qid, answers)``, where ``qid`` is a question's id, or one followed by
    ``@`` and anything without another ``@``. One environment serves any number of
    episodes and tasks at once; it must be closed, by `close` or ``async with``.

    Worker processes check the answers. They start when needed and import neither torch nor the
    caller's script, so a script needs no ``__main__`` guard. They get only the environment
    variables that imports need. No text of a model is run as code: some scorers of reasoning-gym
    evaluate their input, so they get numbers, operators and names of common functions only. Any
    other answer to their questions is right if it equals the entry's answer, and otherwise wrong.

    A check that exceeds its time or memory counts as wrong. If a worker is lost for any other
    reason, a new one repeats the check once.

    Args:
        questions: All questions of the rollout. No id is another id followed by ``@`` and a suffix.
        workers: Worker processes; the number of cores, at most four, if None.
        timeout_s: Most seconds of processor time for one check. Its wall time is limited to about
            twice as much.

    Raises:
        ValueError: If an id appears twice or is another with a suffix, or an option is not
            positive.
        ModuleNotFoundError: If math-verify or reasoning-gym is needed and not installed.

    Cost: about 80 MB and half a second to start for each worker, twice that with
    reasoning-gym; a check of an integer takes about a millisecond. Only the last 16,384
    characters of an answer are read.
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
        self._questions = _by_id(questions)
        needs_gym = any(question.gym_task for question in self._questions.values())
        require("math_verify", *(["reasoning_gym"] if needs_gym else []))
        self._timeout_s = timeout_s
        self._closed = threading.Event()
        self._workers = [AnswerWorker(needs_gym, self._closed) for _ in range(workers)]
        # LIFO: another worker starts only while the last used one is busy.
        self._idle: queue.LifoQueue[AnswerWorker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="trajpack-answers")
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    async def reset(self) -> tuple[None, dict[str, Any]]:
        """Start an episode; has no effect."""
        return None, {}

    async def step(
        self, action: tuple[str, Sequence[str]]
    ) -> tuple[None, list[bool], bool, bool, dict[str, Any]]:
        """Judge the answers to one question.

        Returns:
            ``(None, successes, True, False, info)`` with one success per answer. If checks
            exceeded a limit, ``info`` has ``timed_out`` and ``failed``, a bool per answer each.

        Raises:
            ValueError: If no question has this ``qid``.
            TypeError: If an answer is not a string.
            RuntimeError: If the environment is closed, a worker cannot start, or two workers were
                lost during one check; not a verdict on the answer.
        """
        qid, answers = action
        question = find_by_qid(self._questions, qid, "question")
        check_answers(qid, answers)
        loop = asyncio.get_running_loop()
        self._refuse_if_closed()
        checks = [
            loop.run_in_executor(self._threads, self._check, question, answer) for answer in answers
        ]
        try:
            verdicts = await asyncio.gather(*checks)
        except (RuntimeError, OSError) as error:
            self._refuse_if_closed()
            raise RuntimeError(f"step: an answer to {qid!r} was not checked: {error}") from error
        cut_short = {
            verdict.value: [given is verdict for given in verdicts]
            for verdict in (Verdict.TIMED_OUT, Verdict.FAILED)
        }
        info = cut_short if any(map(any, cut_short.values())) else {}
        return None, [verdict is Verdict.RIGHT for verdict in verdicts], True, False, info

    async def close(self) -> None:
        """Kill all workers and wait for their end. A `step` in progress raises."""
        self._closed.set()
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

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the environment is closed")

    def _check(self, question: Question, answer: str) -> Verdict:
        """Check in one of the threads; there are as many as workers, so a worker is idle."""
        gym = (question.gym_task, question.gym_entry) if question.gym_task else None
        worker = self._idle.get()
        try:
            self._refuse_if_closed()
            answer = answer[-_MAX_ANSWER_CHARS:]
            return worker.check((question.solutions, gym), answer, self._timeout_s)
        finally:
            self._idle.put(worker)


def _by_id(questions: Iterable[Question]) -> dict[str, Question]:
    by_id = unique_by_id(questions, "question")
    for id in by_id:
        stem, mark, _ = id.rpartition("@")
        if mark and stem in by_id:
            raise ValueError(
                f"question id {id!r} might be a sample of the question with the id {stem!r}"
            )
    return by_id


def _stop_all(workers: Iterable[AnswerWorker]) -> None:
    for worker in workers:
        worker.stop()
