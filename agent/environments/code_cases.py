"""Tests that judge a program from outside: what they expect never gets into its process."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trajpack.agent.sandbox.launcher import MAX_DEPTH, canonical

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
    """A program reads ``stdin`` and is to print ``stdout``.

    Space at the end of lines and empty lines at the end do not matter.
    """

    stdin: str
    """What it reads."""
    stdout: str
    """What it is to print."""

    def is_met_by(self, output: bytes) -> bool:
        """Return whether this was printed."""
        return _lines(output) == _lines(self.stdout.encode())


@dataclass(frozen=True)
class ValueCase:
    """An expression among a program's names is to have a value.

    Equality is Python's, between numbers, strings, bytes, ``None`` and collections of them. A
    value of another type is equal to nothing.

    Raises:
        TypeError: If the value expected is of another type, or nested more than 100 deep.

    Example:
        >>> ValueCase.from_assert("assert add(2, 3) == 5, 'two and three'")
        ValueCase(expression='add(2, 3)', value=5)
        >>> ValueCase.from_assert("assert not is_even(7)")
        ValueCase(expression='bool(is_even(7))', value=False)
    """

    expression: str
    """Run as it is, in the sandbox: it comes from whoever wrote the test."""
    value: Any
    """What it is to be."""

    def __post_init__(self) -> None:
        if not _can_be_compared(self.value):
            raise TypeError(
                f"the value expected of {self.expression!r:.120} must be a number, str, bytes, "
                f"None or a collection of them, got {type(self.value).__name__}"
            )

    def is_met_by(self, output: bytes) -> bool:
        """Return whether the expression had this value, given its `canonical` text."""
        return output == canonical(self.value).encode()

    @classmethod
    def from_assert(cls, text: str) -> ValueCase:
        """Take an assertion apart, so that what it expects need not be shown to the program.

        Args:
            text: ``assert EXPRESSION == VALUE`` or ``assert [not] NAME(VALUE, ...)``, where a value
                is a literal, or ``set``, ``frozenset``, ``tuple``, ``list`` or ``sorted`` of one.

        Raises:
            ValueError: On any other text: to check it, the program would have to be told what is
                expected of it, and could then say just that.
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
    """A task whose answer is a program, and the tests that it is to pass.

    Raises:
        ValueError: If it has no cases.
    """

    id: str
    """Unique among the problems used together."""
    cases: Sequence[InputCase | ValueCase]
    """All must be met."""
    setup: str = ""
    """Python that runs before the answer in each case, imports for example."""

    def __post_init__(self) -> None:
        if not self.cases:
            raise ValueError(f"problem {self.id!r} has no cases")


def last_code_block(text: str) -> str | None:
    r"""Return the last fenced block of a text that is Python or says nothing of its language.

    A block that is never closed ends with the text. A fence is a line that begins with three
    backquotes.

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
    """Return whether the canonical text of a value says all about it."""
    if isinstance(value, list | tuple | set | frozenset | dict):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return depth < MAX_DEPTH and all(_can_be_compared(part, depth + 1) for part in parts)
    return value is None or isinstance(value, int | float | complex | str | bytes)


def _lines(output: bytes) -> list[bytes]:
    return [line.rstrip() for line in output.rstrip().split(b"\n")]


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
