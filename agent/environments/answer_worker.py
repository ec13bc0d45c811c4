"""Worker process that checks answers and may be killed at any time.

`MathVerifyEnvironment` runs this file as a script, by its path, so that neither the package nor
torch nor the user's script is imported: a start takes half a second. Requests are pickles on
standard input, ``(solutions, gym, answer, seconds)``; a reply on standard output is one byte. The
first byte, `READY`, follows the imports. The process ends with its input, or when a request exceeds
its time.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import re
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

READY, RIGHT, WRONG, FAILED = b"R", b"1", b"0", b"E"

_EXTRA_MEMORY_BYTES = 1 << 30
_GRACE_S = 2.0
_MAX_SCORED_CHARS = 1000
_MAX_DEPTH = 50
_NAMES = re.compile("a?(sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|pi|[a-zA-Z]")
_TOKEN = re.compile(
    r"0x[0-9a-fA-F]+|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|[a-zA-Z]+(?!\d)|[-+*/^()=,: ]",
    re.ASCII,
)
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?|\d+(?:\.\d+)?")
_DELIMITERS = ("\\boxed", "\\(", "\\[")


def wall_seconds(cpu_seconds: float) -> float:
    """Return the wall-clock limit of a check; it is longer, since the machine may be busy."""
    return 2 * cpu_seconds + 1


def is_equal(solutions: Sequence[str], answer: str) -> bool:
    r"""Return whether the final answer of a text equals one of ``solutions``.

    Solutions are numbers or LaTeX, bare, between dollars or in ``\boxed{}``. A literal copy of a
    solution, alone or in a box, is right. Has no time limit.
    """
    from math_verify import parse, verify

    final = _boxed(answer) or answer.strip()
    if any(final == solution.strip() for solution in solutions):
        return True
    parsed_answer = parse(answer, parsing_timeout=None)
    for solution in solutions:
        is_marked = any(mark in solution for mark in _DELIMITERS) or solution.count("$") > 1
        marked = solution if is_marked else f"\\boxed{{{solution}}}"
        gold = parse(marked, parsing_timeout=None)
        if verify(gold, parsed_answer, timeout_seconds=None):
            return True
    return False


def is_full_score(task: str, entry: Mapping[str, Any], answer: str) -> bool:
    """Return whether reasoning-gym's scorer gives the final answer the score 1.

    A literal copy of the entry's answer is right without a scorer. Any other text must satisfy
    `is_arithmetic`, since scorers evaluate it.
    """
    finals = final_answers(answer)
    own = entry.get("answer")
    if isinstance(own, str) and own.strip() in (answer.strip(), *finals):
        return True
    score = _scorer(task)
    return any(score(answer=final, entry=entry) == 1.0 for final in finals if is_arithmetic(final))


def is_arithmetic(text: str) -> bool:
    """Return whether a text has numbers, operators and known names only.

    Names are single letters and common functions. The text has no quotes, underscores, attribute
    access or names of Python objects, so its evaluation only computes a value.

    Example:
        >>> is_arithmetic("2*x**3 + sqrt(x)"), is_arithmetic("eval(x)"), is_arithmetic("x.y")
        (True, False, False)
    """
    if not 0 < len(text) <= _MAX_SCORED_CHARS:
        return False
    end = depth = 0
    for token in _TOKEN.finditer(text):
        word = token.group()
        if token.start() != end or (word.isalpha() and not _NAMES.fullmatch(word)):
            return False
        depth += {"(": 1, ")": -1}.get(word, 0)
        if not 0 <= depth <= _MAX_DEPTH:
            return False
        end = token.end()
    return end == len(text)


def final_answers(answer: str) -> list[str]:
    r"""Return candidates for the final answer of a text.

    The content of the last ``\boxed{}``; without one, the whole text and its last number.

    Example:
        >>> final_answers("so it is \\boxed{-4}, not 5"), final_answers("7 - 8 = -1.")
        (['-4'], ['7 - 8 = -1.', '-1'])
    """
    boxed = _boxed(answer)
    candidates = [answer.strip()] if boxed is None else [boxed]
    numbers = _NUMBER.findall(answer) if boxed is None else _NUMBER.findall(boxed)
    if numbers and (boxed is None or numbers[-1] == boxed):
        candidates.append(numbers[-1].replace(",", ""))
    return list(dict.fromkeys(candidates))


def _boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start:i].strip()
    return None


@functools.cache
def _scorer(task: str) -> Any:
    from reasoning_gym.factory import get_score_answer_fn

    return get_score_answer_fn(task)


def _answer_to(solutions: Sequence[str], gym: tuple[str, Any] | None, answer: str) -> bytes:
    try:
        is_right = is_full_score(*gym, answer) if gym else is_equal(solutions, answer)
    except Exception:  # noqa: BLE001 - libraries parse hostile text and may raise anything
        return FAILED
    return RIGHT if is_right else WRONG


def _limit_memory() -> None:
    """Limit the address space to the current use plus a margin, if the use is known."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            in_use = int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return
    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _EXTRA_MEMORY_BYTES, hard_limit))


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Duplicate the pipes and redirect standard streams, so that libraries cannot print to them."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return requests, replies


def main(needs_gym: bool) -> None:
    """Serve requests until the input ends."""
    requests, replies = _take_standard_streams()
    import math_verify  # noqa: F401 - import before the first request

    if needs_gym:
        import reasoning_gym  # noqa: F401 - import before the first request
    logging.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory()
    os.dup2(1, 2)
    replies.write(READY)
    while True:
        try:
            solutions, gym, answer, seconds = pickle.load(requests)
        except EOFError:
            return
        # The default action of both signals ends the process. SIGALRM also ends a process
        # whose parent is gone.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, wall_seconds(seconds) + _GRACE_S)
        reply = _answer_to(solutions, gym, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(reply)


if __name__ == "__main__":
    main(needs_gym="--reasoning-gym" in sys.argv[1:])
