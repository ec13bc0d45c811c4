"""Worker process that checks answers and may be killed at any time.

`MathVerifyEnvironment` runs this file by its path, so that neither the package nor the user's
script is imported. A request is the arguments of `verdict` and a limit in seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

_EXTRA_MEMORY_BYTES = 1 << 30
_MAX_SCORED_CHARS = 1000
_TOKEN = r"0x[0-9a-fA-F]+|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|[-+*/^()=,: ]"
_NAME = r"(?:a?(?:sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|pi|[a-zA-Z])(?![a-zA-Z0-9])"
_ARITHMETIC = re.compile(f"(?>{_TOKEN}|{_NAME})++", re.ASCII)
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?|\d+(?:\.\d+)?")
_DELIMITERS = ("\\boxed", "\\(", "\\[")


def is_equal(solutions: Sequence[str], answer: str) -> bool:
    r"""Return whether the final answer of a text equals one of ``solutions``.

    They are numbers or LaTeX, bare, between dollars or in ``\boxed{}``; a literal copy is right.
    """
    from math_verify import parse, verify

    final = _boxed(answer) or answer.strip()
    if any(final == solution.strip() for solution in solutions):
        return True
    parsed = parse(answer, parsing_timeout=None)
    for solution in solutions:
        is_marked = any(mark in solution for mark in _DELIMITERS) or solution.count("$") > 1
        gold = parse(solution if is_marked else f"\\boxed{{{solution}}}", parsing_timeout=None)
        if verify(gold, parsed, timeout_seconds=None):
            return True
    return False


def is_full_score(task: str, entry: Mapping[str, Any], answer: str) -> bool:
    """Return whether reasoning-gym's scorer gives the final answer the score 1.

    A literal copy of the entry's answer is right. Any other must satisfy `is_arithmetic`, since
    scorers evaluate it.
    """
    from reasoning_gym.factory import get_score_answer_fn

    finals = final_answers(answer)
    own = entry.get("answer")
    if isinstance(own, str) and own.strip() in (answer.strip(), *finals):
        return True
    score = get_score_answer_fn(task)
    return any(score(answer=final, entry=entry) == 1.0 for final in finals if is_arithmetic(final))


def is_arithmetic(text: str) -> bool:
    """Return whether a text has numbers, operators, single letters and common functions only."""
    return len(text) <= _MAX_SCORED_CHARS and _ARITHMETIC.fullmatch(text) is not None


def final_answers(answer: str) -> list[str]:
    r"""Return the content of the last ``\boxed{}``, or else a text and its last number."""
    boxed = _boxed(answer)
    whole = answer.strip() if boxed is None else boxed
    numbers = _NUMBER.findall(whole)
    last = numbers[-1:] if boxed is None or numbers == [boxed] else []
    return list(dict.fromkeys([whole, *(number.replace(",", "") for number in last)]))


def _boxed(text: str) -> str | None:
    _, mark, rest = text.rpartition("\\boxed{")
    depth = 1
    for i, char in enumerate(rest if mark else ""):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return rest[:i].strip()
    return None


def verdict(
    solutions: Sequence[str], gym: tuple[str, Mapping[str, Any]] | None, answer: str
) -> bool | None:
    """Return whether an answer is right, or None where a library could not tell."""
    try:
        return is_full_score(*gym, answer) if gym else is_equal(solutions, answer)
    except Exception:  # noqa: BLE001 - libraries parse hostile text and may raise anything
        return None


def main(needs_gym: bool) -> None:
    """Serve requests on the connection that is the standard input until it ends."""
    import math_verify  # noqa: F401 - import before the first request

    if needs_gym:
        import reasoning_gym  # noqa: F401 - import before the first request
    os.dup2(1, 2)
    logging.disable()
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as statm:
        in_use = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + _EXTRA_MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection: Any = Connection(0)
    with contextlib.suppress(EOFError):
        while True:
            *question, seconds = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
            signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 1)  # the machine may be busy
            reply = verdict(*question)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(reply)


if __name__ == "__main__":
    main(needs_gym="gym" in sys.argv)
