"""Code environment: answers are programs, judged by cases that the programs cannot see."""

from __future__ import annotations

import ast
import asyncio
import builtins
import inspect
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trajpack.agent.environments.judging import JudgingEnvironment
from trajpack.agent.environments.program_runner import BubblewrapRunner
from trajpack.packing.representation import brief_repr

RunProgram = Callable[[str, str], Awaitable[tuple[str, str]]]
"""Runs a program, the first string, with the second as standard input; returns its outcome,
``"exited"`` or a word for the failure, and its standard output. It raises if it did not run it."""

_MAX_ANSWER_CHARS = 65_536
_COLLECTIONS = {"set", "frozenset", "tuple", "list", "sorted"}
_PYTHON = {"", "python", "python3", "py"}
_FENCE = "```"


@dataclass(frozen=True)
class CodeProblem:
    """A task whose answer is a program, with the cases that judge it.

    Attributes:
        id: Unique among the problems used together.
        inputs: Pairs of a standard input and the standard output expected for it; spaces and empty
            lines at ends do not count.
        asserts: Assertions about the program's functions, ``assert EXPRESSION == VALUE``, where
            the value is a literal, or ``set``, ``frozenset``, ``tuple``, ``list`` or ``sorted`` of
            one. The expression is evaluated after the program; a value that is of no built-in type
            equals none.
        setup: Python code that runs before the answer in each case, such as imports.

    Raises:
        ValueError: If there are no cases, or an assertion has another form.
    """

    id: str
    inputs: Sequence[tuple[str, str]] = ()
    asserts: Sequence[str] = ()
    setup: str = ""

    __repr__ = brief_repr

    def __post_init__(self) -> None:
        if not (self.inputs or self.asserts):
            raise ValueError(f"problem {self.id!r} has no cases: expected inputs or asserts")
        for text in self.asserts:
            _split(text)


class CodeEnvironment(JudgingEnvironment[CodeProblem]):
    """Judges the last fenced Python block of an answer by the cases of its problem.

    Each case is a program of its own. Expected results stay in this process: a program cannot read
    them, and its output is compared, never run or parsed.

    ``info`` of a step has for each answer ``fraction_passed`` and ``outcomes``, a word for each
    case, inputs first: ``"passed"``, ``"wrong"``, ``"no_code"``, or the outcome of a program that
    failed.

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
        self, asked: CodeProblem, qid: str, answers: Sequence[str]
    ) -> tuple[list[bool], dict[str, Any]]:
        outcomes = []
        for answer in answers:
            code = last_code_block(answer[-_MAX_ANSWER_CHARS:])
            cases = _cases(asked, code or "")
            runs = [] if code is None else [self._run(case) for case in cases]
            outcomes.append(await asyncio.gather(*runs) or ["no_code"] * len(cases))
        fractions = [words.count("passed") / len(words) for words in outcomes]
        info = {"fraction_passed": fractions, "outcomes": outcomes}
        return [fraction == 1 for fraction in fractions], info

    async def _run(self, case: _Case) -> str:
        async with self._idle:
            try:
                outcome, output = await self._run_program(case.program, case.stdin)
            except Exception as error:
                raise RuntimeError(f"step: a program was not run: {error}") from error
        if outcome != "exited":
            return outcome
        return "passed" if _lines(output) == _lines(case.expected) else "wrong"


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
    lines = [*text.split("\n"), _FENCE]
    for number, line in enumerate(lines):
        mark = line.strip()
        if language is None and mark.startswith(_FENCE):
            language, begin = "".join(mark.strip("`").lower().split()[:1]), number + 1
        elif language is not None and mark == _FENCE:
            found = "\n".join(lines[begin:number]) if language in _PYTHON else found
            language = None
    return found


class _Case(NamedTuple):
    program: str
    stdin: str
    expected: str


def _cases(problem: CodeProblem, code: str) -> list[_Case]:
    program = f"{problem.setup}\n{code}\n"
    cases = [_Case(program, stdin, stdout) for stdin, stdout in problem.inputs]
    for text in problem.asserts:
        expression, value = _split(text)
        shown = f"{_SHOW_VALUE}\n_show_value({program!r}, {expression!r})\n"
        cases.append(_Case(shown, "", canonical(value)))
    return cases


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def canonical(value: Any) -> str:
    """Return a text that is equal for equal values, as Python compares them, and else differs.

    A value that is of no built-in type becomes the name of its type.

    Example:
        >>> canonical([1, 2.0, True]), canonical({"b": None, "a": (1.5,)})
        ('[0x1, 0x2, 0x1]', "{'a': (1.5), 'b': None}")
    """
    if isinstance(value, dict):
        pairs = [f"{canonical(key)}: {canonical(value[key])}" for key in value]
        return f"{{{', '.join(sorted(pairs))}}}"
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [canonical(item) for item in value]
        if isinstance(value, (set, frozenset)):
            return f"set({', '.join(sorted(items))})"
        return f"[{', '.join(items)}]" if isinstance(value, list) else f"({', '.join(items)})"
    if isinstance(value, complex) and value.imag == 0:
        value = value.real
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return hex(value)  # conversion to decimal is slow and limited in length
    kinds: tuple[Any, ...] = (float, complex, str, bytes, type(None))
    for kind in kinds:
        if isinstance(value, kind):
            return str(kind.__repr__(value))
    return f"<{type(value).__name__}>"


# Prints the value of an expression alone; what the answer prints goes to standard error.
_SHOW_VALUE = f"""from __future__ import annotations
{inspect.getsource(canonical)}
def _show_value(code, expression):
    import os, sys
    result = os.dup(1)
    os.dup2(2, 1)
    module = sys.modules["answer"] = type(sys)("answer")
    exec(compile(code, "<answer>", "exec", dont_inherit=True), module.__dict__)
    text = canonical(eval(expression, module.__dict__))
    with open(result, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
"""


def _split(text: str) -> tuple[str, Any]:
    """Return the expression of an assertion and the value expected of it."""
    try:
        match ast.parse(text.strip()).body:
            case [ast.Assert(ast.Compare(left, [ast.Eq() | ast.Is()], [right]))]:
                return ast.unparse(left), _value(right)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        pass
    raise ValueError(f"asserts: expected 'assert EXPRESSION == VALUE', got {text!r:.120}")


def _value(node: ast.expr) -> Any:
    if any(isinstance(part, ast.Constant) and part.value is ... for part in ast.walk(node)):
        raise ValueError("an ellipsis is compared with nothing")
    match node:
        case ast.Call(ast.Name(name), [argument], []) if name in _COLLECTIONS:
            return getattr(builtins, name)(ast.literal_eval(argument))
    return ast.literal_eval(node)
