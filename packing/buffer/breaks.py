"""`PrefixBreak`: where a prompt left the history of its conversation, and why."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.integer[Any]]
Reason: TypeAlias = Literal["stripped", "rewritten", "repeated", "fields", "left"]
"""Why a prefix broke, see `PrefixBreak.reason`."""

RUN = 8
"""Equal tokens after which a prompt counts as back in the history: a power of two."""


class PrefixBreak(NamedTuple):
    """A turn whose prompt does not begin with the history, so that a new chain begins.

    The history is the earlier turn of the trajectory with which the prompt shares most tokens, the
    latest of several: its prompt and completion.

    Attributes:
        trajectory: Index of the trajectory in the batch.
        turn: Turn of the trajectory that broke the prefix, counted from 0.
        history: Turn of the trajectory that is the history.
        position: Tokens that prompt and history share: index of the first token that differs.
        expected: Token of the history there; ``None`` if the history ends there.
        came: Token of the prompt there; ``None`` if the prompt ends there.
        reason: Reason, as far as tokens tell. The prompt is back in the history where 8 tokens
            agree; within 8 tokens, also where all tokens that are left of the history agree (if it
            is only one, then at the break or at its old position).

            - ``"stripped"``: the prompt left out ``removed`` tokens, then it is back.
            - ``"rewritten"``: ``added`` tokens came, in place of ``removed`` ones if any, then it
              is back.
            - ``"repeated"``: the prompt ends inside the history, as that of a second attempt does.
            - ``"fields"``: the tokens agree, rows of an extra field do not.
            - ``"left"``: it is not back, such as in a compacted history or with a sub-agent.
        removed: Tokens of the history that were left out; ``None`` if the prompt is not back in it.
        added: Tokens that the prompt has in their place; ``None`` if it is not back.
    """

    trajectory: int
    turn: int
    history: int
    position: int
    expected: int | None
    came: int | None
    reason: Reason
    removed: int | None
    added: int | None


def reason_of(history: Tokens, prompt: Tokens) -> tuple[Reason, int | None, int | None]:
    """Return reason, removed and added tokens of a `PrefixBreak`.

    ``history`` and ``prompt`` are the tokens of both behind the shared ones.

    Example:
        >>> reason_of(np.array([5, 6, 7]), np.array([6, 7, 8]))
        ('stripped', 1, 0)
    """
    if not prompt.size:
        return "repeated", None, None
    if history.size and history[0] == prompt[0]:
        return "fields", None, None
    back = _back_in_history(history, prompt)
    return ("left", None, None) if back is None else ("rewritten" if back[1] else "stripped", *back)


def is_retokenized(prompt: bytes, completion: bytes, later: bytes) -> bool:
    """Return whether a later prompt repeats a turn with up to 8 tokens of its completion replaced.

    That is what tokens of decoded text do, or a template that ends messages in its own way. All are
    int32 tokens; ``later`` is the prompt of a later turn.
    """
    if not later.startswith(prompt):
        return False
    one = np.frombuffer(completion, np.int32)
    other = np.frombuffer(later, np.int32, offset=len(prompt))
    begin = _agreeing(one, other)
    reason, removed, added = reason_of(*(of[begin : begin + 4 * RUN] for of in (one, other)))
    return reason == "rewritten" and 0 < (removed or 0) <= RUN and 0 < (added or 0) <= RUN


def _back_in_history(history: Tokens, prompt: Tokens) -> tuple[int, int] | None:
    """Return the removed and added tokens of `PrefixBreak`: the place with fewest added ones."""
    found = list[tuple[int, int]]()
    if min(len(history), len(prompt)) >= RUN:
        windows = _numbers_of_windows(np.concatenate([history, [-1], prompt]))
        of_history, of_prompt = windows[: len(history) - RUN + 1], windows[len(history) + 1 :]
        is_back = np.isin(of_prompt, of_history)
        if is_back.any():
            added = int(is_back.argmax())
            places = np.flatnonzero(of_history == of_prompt[added])[:RUN].tolist()
            agreeing = [_agreeing(history[place:], prompt[added:]) for place in places]
            found.append((places[int(np.argmax(agreeing))], added))
    for size in range(min(RUN - 1, len(history)), 0, -1):
        removed = len(history) - size
        for place in range(min(RUN, len(prompt) - size) + 1) if size > 1 else {0, removed}:
            if np.array_equal(prompt[place : place + size], history[removed:]):
                found.append((removed, place))
    return min(found, key=lambda edit: edit[1], default=None)


def _agreeing(one: Tokens, other: Tokens) -> int:
    """Return how many tokens agree before the first that does not."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size


def _numbers_of_windows(tokens: Tokens) -> npt.NDArray[np.int64]:
    """Return a number for each `RUN` tokens in a row, equal where the tokens are equal."""
    numbers, size = tokens.astype(np.int64), 1
    while size < RUN:  # of a window twice as long: its halves
        halves = numbers[:-size] << 32 | numbers[size:] & 0xFFFFFFFF
        numbers, size = np.unique(halves, return_inverse=True)[1], 2 * size
    return numbers
