"""Code environment: answers are programs, judged by cases that the programs cannot see."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trajpack.agent.environments.program_runner import BubblewrapRunner
from trajpack.agent.environments.questions import JudgingEnvironment
from trajpack.packing.representation import brief_repr

RunProgram = Callable[[str, str], Awaitable[tuple[str, str]]]
"""Runs a program, the first string, with the second as standard input; returns its outcome,
``"exited"`` or a word for the failure, and its standard output. It raises if it did not run it."""

_MAX_ANSWER_CHARS = 65_536
_PYTHON = {"", "python", "python3", "py"}
_BLOCK = re.compile(r"^[^\S\n]*```([^\n]*)\n?(.*?)(?:^[^\S\n]*```[^\S\n]*$|\Z)", re.M | re.S)
"""Language and code of a fenced block; one that is not closed ends with the text."""


@dataclass(frozen=True)
class CodeProblem:
    """A task whose answer is a program, with the cases that judge it.

    Attributes:
        id: Unique among the problems used together.
        inputs: Pairs of a standard input and the standard output expected for it; spaces and empty
            lines at ends do not count.
        setup: Python code that runs before the answer in each case, such as imports.
        call: Python code that runs after it, such as ``print(add(int(input()), int(input())))``
            where the answer is a function. It must name no expected value: the answer can read it.

    Raises:
        ValueError: If there are no cases.
    """

    id: str
    inputs: Sequence[tuple[str, str]]
    setup: str = ""
    call: str = ""

    __repr__ = brief_repr

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError(f"problem {self.id!r} has no cases")


class CodeEnvironment(JudgingEnvironment):
    """Judges the last fenced Python block of an answer by the cases of its problem.

    Each case is a program of its own. Expected results stay in this process, and output is
    compared, never run or parsed.

    ``info`` of a step has for each answer ``fraction_passed`` and ``outcomes``, a word for each
    case: ``"passed"``, ``"wrong"``, ``"no_code"``, or the outcome of a program that failed.

    Args:
        problems: All problems of the rollout.
        run_program: Runs one program, as a `BubblewrapRunner` does, which is the default.
        workers: Programs that run at the same time; the number of cores if None.

    Raises:
        ValueError: If an id appears twice or ``workers`` is not positive.
        SetupError: If ``run_program`` is None and bubblewrap is missing or forbidden here.
    """

    def __init__(
        self,
        problems: Iterable[CodeProblem],
        *,
        run_program: RunProgram | None = None,
        workers: int | None = None,
    ) -> None:
        workers = workers if workers is not None else os.cpu_count() or 1
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        super().__init__(problems, "problem")
        self._run_program = BubblewrapRunner() if run_program is None else run_program
        self._idle = asyncio.Semaphore(workers)

    async def _judge(
        self, asked: CodeProblem, answers: Sequence[str]
    ) -> tuple[list[bool], dict[str, Any]]:
        outcomes = []
        for answer in answers:
            code = last_code_block(answer[-_MAX_ANSWER_CHARS:])
            program = f"{asked.setup}\n{code}\n{asked.call}\n"
            runs = [] if code is None else [self._run(program, *case) for case in asked.inputs]
            outcomes.append(await asyncio.gather(*runs) or ["no_code"] * len(asked.inputs))
        fractions = [words.count("passed") / len(words) for words in outcomes]
        info = {"fraction_passed": fractions, "outcomes": outcomes}
        return [fraction == 1 for fraction in fractions], info

    async def _run(self, program: str, stdin: str, expected: str) -> str:
        async with self._idle:
            try:
                outcome, output = await self._run_program(program, stdin)
            except Exception as error:
                raise RuntimeError(f"step: a program was not run: {error}") from error
        if outcome != "exited":
            return outcome
        return "passed" if _lines(output) == _lines(expected) else "wrong"


def last_code_block(text: str) -> str | None:
    """Return the last fenced block whose language is Python or not named; None without one."""
    blocks = [
        code.removesuffix("\n")
        for language, code in _BLOCK.findall(text)
        if "".join(language.strip(" `").lower().split()[:1]) in _PYTHON
    ]
    return blocks[-1] if blocks else None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
