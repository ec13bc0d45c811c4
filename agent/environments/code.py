"""An environment where answers are programs, and tests that they do not see judge them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trajpack.agent.environments.code_cases import (
    CodeProblem,
    InputCase,
    ValueCase,
    last_code_block,
)
from trajpack.agent.sandbox.limits import Outcome, SandboxError, SandboxLimits
from trajpack.agent.sandbox.sandbox import Sandbox

_MAX_ANSWER_CHARS = 65_536
_NO_CODE, _PASSED, _WRONG, _NOT_RUN = "no_code", "passed", "wrong", "not_run"


@dataclass(frozen=True)
class _Verdict:
    """What the cases of one problem said of one answer."""

    words: tuple[str, ...]

    @property
    def fraction_passed(self) -> float:
        return self.words.count(_PASSED) / len(self.words)


class CodeEnvironment:
    r"""Calls an answer right whose last fenced block of Python passes every test of its problem.

    An action is ``(qid, answers)``, where ``qid`` is a problem's id, or one followed by ``@`` and
    anything without another ``@``. One environment serves any number of episodes at once; it must
    be closed, by `close` or ``async with``.

    Each case runs in a fresh process of a `Sandbox`. What a case expects stays in this process: a
    program cannot read it, and what it prints is compared, never run or parsed.

    Args:
        problems: Every problem that will be asked.
        limits: Of one program in one case; None takes the default ones.
        workers: Programs that run at the same time; None takes as many as there are cores.
        stop_at_failure: Run no further cases once one has failed; those count as failed.
        allow_file_reads: As `Sandbox` takes it.

    Raises:
        ValueError: If an id appears twice or ``workers`` is not positive.
        SetupError: If this machine cannot lock programs up.

    Cost: about 25 ms of processor time to start a program for each case, and what it computes. Only
    the last 65,536 characters of an answer are read.
    """

    def __init__(
        self,
        problems: Iterable[CodeProblem],
        *,
        limits: SandboxLimits | None = None,
        workers: int | None = None,
        stop_at_failure: bool = False,
        allow_file_reads: bool = False,
    ) -> None:
        workers = workers if workers is not None else os.cpu_count() or 1
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self._problems: dict[str, CodeProblem] = {}
        for problem in problems:
            if problem.id in self._problems:
                raise ValueError(f"problem id {problem.id!r} appears twice")
            self._problems[problem.id] = problem
        self._stop_at_failure = stop_at_failure
        self._sandbox = Sandbox(limits, allow_file_reads=allow_file_reads)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="trajpack-code")

    @property
    def sandbox(self) -> Sandbox:
        """Where the programs run; its ``protections`` say what holds them."""
        return self._sandbox

    async def reset(self) -> tuple[None, dict[str, Any]]:
        """Start an episode; there is nothing to do."""
        return None, {}

    async def step(
        self, action: tuple[str, Sequence[str]]
    ) -> tuple[None, list[bool], bool, bool, dict[str, Any]]:
        """Run the answers to one problem.

        A step that is cancelled waits for nothing; programs that run already go on to their end.

        Returns:
            ``(None, successes, True, False, info)`` with one success per answer. ``info`` has for
            each answer ``fraction_passed`` and ``outcomes``, a word for each case: ``"passed"``,
            ``"wrong"``, ``"not_run"``, ``"no_code"``, or the value of an `Outcome`.

        Raises:
            ValueError: If no problem has this ``qid``.
            TypeError: If an answer is not a string.
            SandboxError: If a program could not be run. It says nothing about the answers.
        """
        qid, answers = action
        problem = self._problems.get(qid) or self._problems.get(qid.rpartition("@")[0])
        if problem is None:
            raise ValueError(f"step: no problem has the id {qid!r}")
        if isinstance(answers, str) or not all(isinstance(answer, str) for answer in answers):
            raise TypeError(f"step: the answers to {qid!r} must be a list of strings")
        verdicts = [await self._judge(problem, answer) for answer in answers]
        info = {
            "fraction_passed": [verdict.fraction_passed for verdict in verdicts],
            "outcomes": [list(verdict.words) for verdict in verdicts],
        }
        return None, [verdict.fraction_passed == 1 for verdict in verdicts], True, False, info

    async def close(self) -> None:
        """Kill what is running, and wait until it is gone. A `step` in progress raises."""
        self._sandbox.close()
        await asyncio.to_thread(self._threads.shutdown)  # what is queued raises at once

    async def __aenter__(self) -> CodeEnvironment:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _judge(self, problem: CodeProblem, answer: str) -> _Verdict:
        code = last_code_block(answer[-_MAX_ANSWER_CHARS:])
        if code is None:
            return _Verdict((_NO_CODE,) * len(problem.cases))
        program = f"{problem.setup}\n{code}\n"
        if self._stop_at_failure:
            words: list[str] = []
            while len(words) < len(problem.cases) and words.count(_PASSED) == len(words):
                words.append(await self._try(program, problem.cases[len(words)]))
            words += [_NOT_RUN] * (len(problem.cases) - len(words))
        else:
            words = await asyncio.gather(*(self._try(program, case) for case in problem.cases))
        return _Verdict(tuple(words))

    async def _try(self, program: str, case: InputCase | ValueCase) -> str:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._run, program, case)
        except RuntimeError as error:
            if isinstance(error, SandboxError):
                raise
            raise SandboxError(f"step: a program was not run: {error}") from error

    def _run(self, program: str, case: InputCase | ValueCase) -> str:
        if isinstance(case, InputCase):
            result = self._sandbox.run(program, stdin=case.stdin.encode())
        else:
            result = self._sandbox.run(program, expression=case.expression)
        if result.outcome is not Outcome.EXITED:
            return str(result.outcome.value)
        return _PASSED if case.is_met_by(result.output) else _WRONG
