"""`PrefixBreak`: where a prompt left the history of its conversation, and why."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.integer[Any]]
Reason: TypeAlias = Literal[
    "stripped",
    "inserted",
    "rewritten",
    "ending",
    "repeated",
    "compacted",
    "conversation",
    "fields",
    "unknown",
]
"""Why a prefix broke, see `PrefixBreak.reason`."""

RUN = 8
"""Equal tokens after which a prompt counts as back in the history."""
_POWERS = np.power(np.uint64(0x9E3779B97F4A7C15), np.arange(RUN, dtype=np.uint64))


class PrefixBreak(NamedTuple):
    """A turn whose prompt does not begin with the history, so that a new sequence begins.

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
            is only one, then at the break or at its old position). - ``"stripped"``: the prompt
            left out ``removed`` tokens, then it is back. - ``"inserted"``: ``added`` tokens came,
            then it is back. - ``"rewritten"``: ``added`` tokens came in place of ``removed`` ones,
            then it is back. - ``"ending"``: only the last token of the history differs, such as a
            line end. - ``"repeated"``: the prompt ends inside the history, as that of a second
            attempt does. - ``"compacted"``: it is not back, and the prompt is shorter than the
            history. - ``"conversation"``: it is not back, and shares less than half of the first
            prompt: another conversation, such as that of a sub-agent. - ``"fields"``: the tokens
            agree, rows of an extra field do not. - ``"unknown"``: none of these.
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


def reason_of(
    history: Tokens, prompt: Tokens, shared: int, *, first_prompt: int
) -> tuple[Reason, int | None, int | None]:
    """Return reason, removed and added tokens of a `PrefixBreak`.

    Args:
        history: Tokens of the history behind the shared ones.
        prompt: Tokens of the prompt behind the shared ones.
        shared: Tokens that they share.
        first_prompt: Tokens of the prompt with which the conversation of the history began.

    Cost: a sort of both.

    Example:
        >>> reason_of(np.array([5, 6, 7]), np.array([6, 7, 8]), 10, first_prompt=4)
        ('stripped', 1, 0)
    """
    reason: Reason = "unknown"
    if not prompt.size:
        reason = "repeated"
    elif history.size and history[0] == prompt[0]:
        reason = "fields"
    elif len(history) == 1:
        reason = "ending"
    elif history.size and (back := _back_in_history(history, prompt)) is not None:
        removed, added = back
        reason = "rewritten" if removed and added else "stripped" if removed else "inserted"
        return reason, removed, added
    elif 2 * shared < first_prompt:
        reason = "conversation"
    elif len(prompt) < len(history):
        reason = "compacted"
    return reason, None, None


def _back_in_history(history: Tokens, prompt: Tokens) -> tuple[int, int] | None:
    """Return the removed and added tokens of `PrefixBreak`: the place with fewest added ones."""
    found = list[tuple[int, int]]()
    if min(len(history), len(prompt)) >= RUN:
        of_history, of_prompt = _hashes(history), _hashes(prompt)
        is_back = np.isin(of_prompt, of_history)
        if is_back.any():
            added = int(is_back.argmax())
            places = np.flatnonzero(of_history == of_prompt[added])[:RUN].tolist()
            agreeing = [_agreeing(history[place:], prompt[added:]) for place in places]
            if max(agreeing) >= RUN:  # not so only where hashes collide
                found.append((places[int(np.argmax(agreeing))], added))
    for size in range(min(RUN - 1, len(history)), 0, -1):
        removed = len(history) - size
        windows = _windows(prompt[: RUN + size], size)
        places = np.flatnonzero((windows == history[removed:]).all(1)).tolist()
        found += [(removed, place) for place in places if size > 1 or place in {0, removed}]
    return min(found, key=lambda edit: edit[1], default=None)


def _agreeing(one: Tokens, other: Tokens) -> int:
    """Return how many tokens agree before the first that does not."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size


def _windows(tokens: Tokens, size: int) -> npt.NDArray[Any]:
    if len(tokens) < size:
        return np.empty((0, size), tokens.dtype)
    return np.lib.stride_tricks.sliding_window_view(tokens, size)


def _hashes(tokens: Tokens) -> npt.NDArray[np.uint64]:
    """Return a hash of each `RUN` tokens that follow each other."""
    hashes: npt.NDArray[np.uint64] = _windows(tokens.astype(np.uint64), RUN) @ _POWERS
    return hashes
