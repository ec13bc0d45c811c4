"""An environment that knows the answers and checks what models say against them."""

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
from trajpack.agent.environments.questions import Question
from trajpack.packing.optional import require

_MAX_ANSWER_CHARS = 16_384
_MAX_DEFAULT_WORKERS = 4


class MathVerifyEnvironment:
    r"""Judges final answers by math-verify or, for its questions, by reasoning-gym.

    An action is ``(qid, answers)``, where ``qid`` is a question's id, or one followed by
    ``@`` and anything without another ``@``. One environment serves any number of
    episodes and tasks at once; it must be closed, by `close` or ``async with``.

    Answers are checked in worker processes, which start as they are needed and import
    neither torch nor the caller's script, so a script needs no ``__main__`` guard. They see
    nothing of the caller's environment variables but what finding modules takes. No text of a
    model is run as code: reasoning-gym's scorers, some of which evaluate what they are given,
    see numbers, operators and the names of the usual functions alone. Any other answer to
    their questions is right if it is the entry's own answer word for word, and else wrong.

    A check that computes for too long or runs out of memory counts as wrong. Where its
    worker is lost for any other reason, it is made once more by a fresh one.

    Args:
        questions: Every question that will be asked. Ids are unique, and none is another
            one followed by ``@`` and a suffix.
        workers: Processes that check answers at the same time; None takes as many as there
            are cores, but four at most.
        timeout_s: Seconds of processor time for the check of one answer at most. On a busy
            machine it may last somewhat more than twice as long.

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
        # The last one used is the first to be used again: others start only where it is busy.
        self._idle: queue.LifoQueue[AnswerWorker] = queue.LifoQueue()
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
            RuntimeError: If the environment is closed, a worker cannot start, or two were
                lost over one answer. It says nothing about the answers.
        """
        qid, answers = action
        question = self._question(qid)
        if isinstance(answers, str) or not all(isinstance(answer, str) for answer in answers):
            raise TypeError(f"step: the answers to {qid!r} must be a list of strings")
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
        """End all workers and wait until they are gone. A `step` in progress raises."""
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

    def _question(self, qid: str) -> Question:
        for question_id in (qid, qid.rpartition("@")[0]):
            if question_id in self._questions:
                return self._questions[question_id]
        raise ValueError(f"step: no question has the id {qid!r}")

    def _refuse_if_closed(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the environment is closed")

    def _check(self, question: Question, answer: str) -> Verdict:
        """Run in one of as many threads as there are workers, so one is always idle."""
        gym = (question.gym_task, question.gym_entry) if question.gym_task else None
        worker = self._idle.get()
        try:
            self._refuse_if_closed()
            answer = answer[-_MAX_ANSWER_CHARS:]
            return worker.check((question.solutions, gym), answer, self._timeout_s)
        finally:
            self._idle.put(worker)


def _by_id(questions: Iterable[Question]) -> dict[str, Question]:
    by_id: dict[str, Question] = {}
    for question in questions:
        if question.id in by_id:
            raise ValueError(f"question id {question.id!r} appears twice")
        by_id[question.id] = question
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
