"""`PrefixBreak`: where a prompt left the history of its conversation, and why; also in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.text import counted, one_line

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Function from token ids to text."""
Tokens: TypeAlias = npt.NDArray[np.integer[Any]]
Reason: TypeAlias = Literal["stripped", "rewritten", "repeated", "fields", "left"]
"""Why a prefix broke, see `PrefixBreak.reason`."""

RUN = 8
"""Equal tokens after which a prompt counts as back in the history: a power of two."""
MOST_BREAKS = 8
"""Breaks that are shown, unless all are asked for."""


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


def prefix_breaks(batch: PackedBatch) -> tuple[PrefixBreak, ...]:
    """Return the turns whose prompts do not begin with an earlier turn, and where and why.

    Example:
        >>> import trajpack
        >>> turns = [
        ...     trajpack.Turn([1, 2], [8, 3, 4], [-0.5] * 3),
        ...     trajpack.Turn([1, 2, 3, 4, 5], [6], [-0.5]),
        ... ]
        >>> trajpack.pack([trajpack.Trajectory("a", turns)]).prefix_breaks()
        (PrefixBreak(trajectory=0, turn=1, history=0, position=2, expected=8, came=3, \
reason='stripped', removed=1, added=0),)
    """
    return tuple(_breaks(batch))


def _breaks(batch: PackedBatch) -> Iterator[PrefixBreak]:
    ids, starts = batch.input_ids.cpu().numpy(), batch.host_lengths.starts
    compared = [one for one in batch.token_fields if not (one.generated_only or one.new_only)]
    columns = [ids, *(_bits(batch.fields[one.name]) for one in compared)]
    ends = batch.turn_spans[:, 1].cpu().numpy() - starts[batch.turn_sequence.cpu().numpy()]
    prompts = batch.turn_spans[:, 0].tolist()
    begins, sequences = batch.turn_begin.tolist(), batch.turn_sequence.tolist()
    for trajectory, (first, end) in enumerate(pairwise(batch.cu_turns.tolist())):
        for turn in range(first + 1, end):
            start = int(starts[sequences[turn]])
            if begins[turn] != start:
                continue  # it extends a chain
            length = prompts[turn] - start
            others = sequences[first:turn]
            shared_with = {
                other: _agreeing_from(columns, start, int(starts[other]), length)
                for other in {*others}
            }
            shared = np.minimum([shared_with[other] for other in others], ends[first:turn])
            position = int(shared.max())  # no later turn adds to what is shared
            history = int(np.flatnonzero(shared == position)[-1])
            before = int(starts[others[history]])
            expected = ids[before + position : before + int(ends[first + history])]
            came = ids[start + position : start + length]
            if expected.size or not came.size:
                yield PrefixBreak(
                    trajectory,
                    turn - first,
                    history,
                    position,
                    int(expected[0]) if expected.size else None,
                    int(came[0]) if came.size else None,
                    *reason_of(expected, came),
                )


def _bits(rows: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return rows ``[tokens, ...]`` as bytes ``[tokens, bytes of a row]``."""
    host = rows.cpu()[:, None].flatten(1).contiguous()
    bits: npt.NDArray[np.uint8] = host.view(torch.uint8).numpy()
    return bits


def _agreeing_from(columns: Sequence[Tokens], one: int, other: int, size: int) -> int:
    """Return how many of ``size`` tokens from two places on agree in every column."""
    size = min(size, len(columns[0]) - other)
    for column in columns:
        differ = column[one : one + size] != column[other : other + size]
        differ = differ if differ.ndim == 1 else differ.any(1)
        size = int(differ.argmax()) if differ.any() else size
    return size


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


def describe_breaks(breaks: Sequence[PrefixBreak], num_continuations: int) -> str:
    """Return in words how many of the turns but the first ones broke a prefix, by reason."""
    reasons = Counter(one.reason for one in breaks).most_common()
    words = ", ".join(f"{count:,} {reason}" for reason, count in reasons)
    total = f"{len(breaks):,} of {counted(num_continuations, 'continuation')}"
    return f"{total}: {words}" if words else total


def break_rows(
    breaks: Sequence[PrefixBreak],
    ids: Sequence[str],
    decode: Decode | None = None,
    *,
    full: bool = False,
) -> list[tuple[str, str]]:
    """Return breaks as pairs of a turn and words; the last pair says how many were left out.

    ``ids`` are the names of the trajectories; ``decode`` makes texts of token ids, ``None`` shows
    the ids alone; with ``full`` no break is left out.
    """
    most = len(breaks) if full else MOST_BREAKS
    rows = [(f"turn {one.turn}", _words(one, ids, decode)) for one in breaks[:most]]
    left_out = counted(len(breaks) - most, "more break")
    return [*rows, ("...", left_out)] if len(breaks) > most else rows


def _words(one: PrefixBreak, ids: Sequence[str], decode: Decode | None) -> str:
    def shown(token: int | None) -> str:
        if token is None:
            return "nothing"
        text = "" if decode is None else one_line(decode([token]), max_chars=20)
        return f"{token} '{text}'" if text else f"{token}"

    words = {
        "stripped": f"{one.removed} stripped",
        "rewritten": f"{one.removed} rewritten as {one.added}",
        "repeated": "the prompt ends there",
        "fields": "rows of a field differ",
        "left": "it left the history",
    }
    return (
        f"of {one_line(ids[one.trajectory], max_chars=60)}: at {one.position:,} came "
        f"{shown(one.came)}, turn {one.history} has {shown(one.expected)}; {words[one.reason]}"
    )
