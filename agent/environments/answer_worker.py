"""Checks answers, in a process of its own that may be killed at any time.

This file is run as a script by `MathVerifyEnvironment`, by its path, so that neither the
package nor torch nor the user's script is imported here: a start takes half a second.
Requests are pickles on standard input, ``(nonce, solutions, gym, answer, seconds)``; each is
answered on standard output with one byte and the nonce. One byte before them all says that
imports are done. The end of the input ends the process; so does a request that takes too long.
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

NONCE_BYTES = 16

_EXTRA_MEMORY_BYTES = 1 << 30
_GRACE_S = 2.0
_MAX_SCORED_CHARS = 1000
_MAX_DEPTH = 50
_NAMES = re.compile(
    "a?(sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|pi|[a-zA-Z]",
)
_TOKEN = re.compile(
    r"0x[0-9a-fA-F]+|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|[a-zA-Z]+(?!\d)|[-+*/^()=,: ]",
    re.ASCII,
)
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?|\d+(?:\.\d+)?")
_DELIMITERS = ("\\boxed", "\\(", "\\[")


def wall_seconds(cpu_seconds: float) -> float:
    """Return how long a check may last that may compute for ``cpu_seconds``.

    Longer, so that a check is not cut short because the machine is busy with others.
    """
    return 2 * cpu_seconds + 1


def is_equal(solutions: Sequence[str], answer: str) -> bool:
    r"""Return whether the final answer of a text equals one of ``solutions``.

    Solutions are numbers or LaTeX, bare, between dollars or in ``\boxed{}``. A solution
    repeated word for word, alone or in a box, is right whatever it is.

    Cost: has no time limit of its own.
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
    """Return whether reasoning-gym's scorer gives the final answer of a text full marks.

    Partial credit is not success. The entry's own answer, word for word, is right without a
    scorer; any other text that is not `is_arithmetic` is wrong, since scorers evaluate it.
    """
    finals = final_answers(answer)
    own = entry.get("answer")
    if isinstance(own, str) and own.strip() in (answer.strip(), *finals):
        return True
    score = _scorer(task)
    return any(score(answer=final, entry=entry) == 1.0 for final in finals if is_arithmetic(final))


def is_arithmetic(text: str) -> bool:
    """Return whether a text is made of nothing but numbers, operators and known names.

    Names are single letters and the usual functions. So there is no quote, underscore, dot
    between names, or name of anything in Python, and evaluating the text computes a value.

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
    r"""Return what may be meant as the final answer of a text.

    That is the content of the last ``\boxed{}``; without one, the text as a whole or the
    last number in it.

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
    except Exception:  # noqa: BLE001 - libraries meet hostile text here and may raise anything
        return FAILED
    return RIGHT if is_right else WRONG


def _limit_memory() -> None:
    """Allow a little more than is in use now; where that is unknown, set no limit."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            in_use = int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return
    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _EXTRA_MEMORY_BYTES, hard_limit))


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Keep the pipes for the protocol; nothing a library prints may reach them."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return requests, replies


def main(needs_gym: bool) -> None:
    """Serve requests until the input ends."""
    requests, replies = _take_standard_streams()
    import math_verify  # noqa: F401 - so that no request pays for it

    if needs_gym:
        import reasoning_gym  # noqa: F401 - so that no request pays for it
    logging.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory()
    os.dup2(1, 2)
    replies.write(READY)
    while True:
        try:
            nonce, solutions, gym, answer, seconds = pickle.load(requests)
        except EOFError:
            return
        # Either signal's default action ends the process, whatever it is doing. The alarm
        # leaves no orphan behind if the parent is gone and cannot kill it in time.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, wall_seconds(seconds) + _GRACE_S)
        reply = _answer_to(solutions, gym, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(reply + nonce)


if __name__ == "__main__":
    main(needs_gym="--reasoning-gym" in sys.argv[1:])
