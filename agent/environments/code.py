"""Code environment: answers are programs, judged by cases that the programs cannot see."""

from __future__ import annotations

import ast
import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trajpack.agent.environments.judging import JudgingEnvironment
from trajpack.agent.sandbox.launcher import MAX_DEPTH, canonical
from trajpack.agent.sandbox.sandbox import Outcome, Sandbox, SandboxError, SandboxLimits
from trajpack.packing.representation import brief_repr

_MAX_ANSWER_CHARS = 65_536
_NO_CODE, _PASSED, _WRONG, _NOT_RUN = "no_code", "passed", "wrong", "not_run"
_COLLECTIONS: dict[str, Callable[[Any], Any]] = {
    "set": set,
    "frozenset": frozenset,
    "tuple": tuple,
    "list": list,
    "sorted": sorted,
}
_PYTHON = ("", "python", "python3", "py")
_FENCE = "```"


@dataclass(frozen=True)
class InputCase:
    """A case that compares standard output, without trailing spaces and empty lines.

    Attributes:
        stdin: Standard input of the program.
        stdout: Expected standard output.
    """

    stdin: str
    stdout: str

    __repr__ = brief_repr

    def is_met_by(self, output: bytes) -> bool:
        """Return whether ``output`` equals the expected standard output."""
        got, expected = (
            [line.rstrip() for line in text.rstrip().split(b"\n")]
            for text in (output, self.stdout.encode())
        )
        return got == expected


@dataclass(frozen=True)
class ValueCase:
    """A case that compares the value of an expression in the program's namespace.

    Numbers, strings, bytes, ``None`` and collections of them are compared as Python does. A value
    of any other type equals no expected value.

    Attributes:
        expression: Trusted expression; evaluated in the sandbox.
        value: Expected value.

    Raises:
        TypeError: If the expected value is of another type, or nested more than 100 deep.

    Example:
        >>> ValueCase.from_assert("assert add(2, 3) == 5, 'two and three'")
        ValueCase(expression='add(2, 3)', value=5)
        >>> ValueCase.from_assert("assert not is_even(7)")
        ValueCase(expression='bool(is_even(7))', value=False)
    """

    expression: str
    value: Any

    __repr__ = brief_repr

    def __post_init__(self) -> None:
        if not _can_be_compared(self.value):
            raise TypeError(
                f"the value expected of {self.expression!r:.120} must be a number, str, bytes, "
                f"None or a collection of them, got {type(self.value).__name__}"
            )

    def is_met_by(self, output: bytes) -> bool:
        """Return whether ``output`` is the `canonical` text of the expected value."""
        return output == canonical(self.value).encode()

    @classmethod
    def from_assert(cls, text: str) -> ValueCase:
        """Split an assertion into expression and expected value, which the program never sees.

        Args:
            text: ``assert EXPRESSION == VALUE`` or ``assert [not] NAME(VALUE, ...)``, where a value
                is a literal, or ``set``, ``frozenset``, ``tuple``, ``list`` or ``sorted`` of one.

        Raises:
            ValueError: On any other text, which could be checked only inside the program's process,
                where the program could read the expected value.
        """
        try:
            (statement,) = ast.parse(text.strip()).body
            if isinstance(statement, ast.Assert):
                return cls._from_test(statement.test)
        except (ValueError, SyntaxError, TypeError):
            pass
        raise ValueError(
            f"from_assert: expected 'assert EXPRESSION == VALUE' or 'assert [not] NAME(VALUE, ...)'"
            f", got {text!r:.120}"
        )

    @classmethod
    def _from_test(cls, test: ast.expr) -> ValueCase:
        match test:
            case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
                return cls(ast.unparse(left), _value(right))
            case ast.UnaryOp(op=ast.Not(), operand=ast.Call() as call):
                return cls(_truth_of(call), False)
            case ast.Call() as call:
                return cls(_truth_of(call), True)
        raise ValueError("neither a comparison nor a call")


@dataclass(frozen=True)
class CodeProblem:
    """A task whose answer is a program, with the cases that judge it.

    Attributes:
        id: Unique among the problems used together.
        cases: Cases; an answer is right if it passes all.
        setup: Python code that runs before the answer in each case, such as imports.

    Raises:
        ValueError: If there are no cases.
    """

    id: str
    cases: Sequence[InputCase | ValueCase]
    setup: str = ""

    __repr__ = brief_repr

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError(f"problem {self.id!r} has no cases")


def last_code_block(text: str) -> str | None:
    r"""Return the last fenced block whose language is Python or not given; None without one.

    A fence is a line that begins with three backquotes. An unclosed block ends with the text.

    Example:
        >>> last_code_block("So:\n```python\nprint(1)\n```\nor\n```bash\nls\n```")
        'print(1)'
        >>> last_code_block("There is none.") is None
        True
    """
    found, language, begin = None, None, 0
    lines = text.split("\n")
    for number, line in enumerate(lines):
        mark = line.strip()
        if language is None and mark.startswith(_FENCE):
            words = mark.strip("`").lower().split()
            language, begin = words[0] if words else "", number + 1
        elif language is not None and mark == _FENCE:
            found = "\n".join(lines[begin:number]) if language in _PYTHON else found
            language = None
    return "\n".join(lines[begin:]) if language in _PYTHON else found


def _can_be_compared(value: Any, depth: int = 0) -> bool:
    """Return whether `canonical` represents the value completely."""
    if isinstance(value, list | tuple | set | frozenset | dict):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return depth < MAX_DEPTH and all(_can_be_compared(part, depth + 1) for part in parts)
    return value is None or isinstance(value, int | float | complex | str | bytes)


def _truth_of(call: ast.Call) -> str:
    if not isinstance(call.func, ast.Name):
        raise ValueError("not a call of a name")
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        _value(argument)
    return f"bool({ast.unparse(call)})"


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
            if name in _COLLECTIONS:
                return _COLLECTIONS[name](ast.literal_eval(argument))
    return ast.literal_eval(node)


class CodeEnvironment(JudgingEnvironment[CodeProblem]):
    r"""Judges the last fenced Python block of an answer by the cases of its problem.

    An action is ``(qid, answers)``, where ``qid`` is a problem's id, or one followed by ``@`` and
    anything without another ``@``. One environment serves any number of episodes at once; it must
    be closed, by `close` or ``async with``.

    Each case runs in a new process of a `Sandbox`. Expected results stay in this process: a program
    cannot read them, and its output is compared, never run or parsed. A cancelled step does not
    wait for running programs.

    ``info`` of a step has for each answer ``fraction_passed`` and ``outcomes``, a word for each
    case: ``"passed"``, ``"wrong"``, ``"not_run"``, ``"no_code"``, or the value of an `Outcome`.

    Args:
        problems: All problems of the rollout.
        limits: Limits of one program in one case; defaults if None.
        workers: Programs that run at the same time; the number of cores if None.
        stop_at_failure: Skip the remaining cases after a failed one; they count as failed.
        allow_file_reads: See `Sandbox`.

    Raises:
        ValueError: If an id appears twice or ``workers`` is not positive.
        SetupError: If this machine lacks a protection of the sandbox.

    Cost: about 25 ms of processor time to start a program for each case. Only the last 65,536
    characters of an answer are read.
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
        super().__init__(problems, "problem")
        self._stop_at_failure = stop_at_failure
        self._sandbox = Sandbox(limits, allow_file_reads=allow_file_reads)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="trajpack-code")

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox of the programs; `Sandbox.protections` lists its protections."""
        return self._sandbox

    async def _judge(
        self, asked: CodeProblem, qid: str, answers: Sequence[str]
    ) -> tuple[list[bool], dict[str, Any]]:
        outcomes = [await self._outcomes(asked, answer) for answer in answers]
        fractions = [words.count(_PASSED) / len(words) for words in outcomes]
        info = {"fraction_passed": fractions, "outcomes": outcomes}
        return [fraction == 1 for fraction in fractions], info

    async def close(self) -> None:
        """Kill running programs and wait for their end. A `step` in progress raises."""
        self._sandbox.close()
        await asyncio.to_thread(self._threads.shutdown)  # queued programs raise at once

    async def _outcomes(self, problem: CodeProblem, answer: str) -> list[str]:
        """Return the outcome of each case."""
        code = last_code_block(answer[-_MAX_ANSWER_CHARS:])
        if code is None:
            return [_NO_CODE] * len(problem.cases)
        program = f"{problem.setup}\n{code}\n"
        if not self._stop_at_failure:
            return await asyncio.gather(*(self._try(program, case) for case in problem.cases))
        words: list[str] = []
        while len(words) < len(problem.cases) and words.count(_PASSED) == len(words):
            words.append(await self._try(program, problem.cases[len(words)]))
        return words + [_NOT_RUN] * (len(problem.cases) - len(words))

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
