"""Sequences that are longer than a micro-batch: what is to become of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

Policy: TypeAlias = Literal["raise", "drop", "truncate_at_turn", "own_bin"]
"""What happens to a sequence that is longer than the capacity:

- ``"raise"``: a ValueError names it.
- ``"drop"``: it is in no micro-batch.
- ``"truncate_at_turn"``: its first turns are kept, as many as fit; where none fits it is dropped.
- ``"own_bin"``: it is alone in a micro-batch over the capacity.
"""


class Oversized(NamedTuple):
    """What became of sequences that were too long, ascending."""

    dropped: tuple[int, ...] = ()
    truncated: dict[int, int] = {}  # noqa: RUF012 - never written to
    alone: tuple[int, ...] = ()


def settle_oversized(
    op: str,
    lengths: npt.NDArray[np.int64],
    capacity: int,
    align: int,
    policy: Policy,
    turn_ends: Sequence[Any] | None,
) -> Oversized:
    """Say what becomes of the sequences that are longer than ``capacity``, a multiple of align.

    Raises:
        ValueError: If there is one and the policy is ``"raise"``, or the policy is unknown, or
            turns are needed and not given.
    """
    if policy not in get_args(Policy):
        known = ", ".join(repr(name) for name in get_args(Policy))
        raise ValueError(f"{op}: oversized must be one of {known}, got {policy!r}")
    _check_turn_ends(op, len(lengths), policy, turn_ends)
    found = np.flatnonzero(lengths > capacity).tolist()
    if policy == "raise" and found:
        raise ValueError(
            f"{op}: sequence {found[0]} has {lengths[found[0]]} tokens, more than the capacity of "
            f"{capacity}{f' in multiples of {align}' if align > 1 else ''}; oversized='drop', "
            "'truncate_at_turn' or 'own_bin' takes it"
        )
    if policy == "drop":
        return Oversized(dropped=tuple(found))
    if policy == "own_bin":
        return Oversized(alone=tuple(found))
    dropped, truncated = [], {}
    for sequence in found:
        assert turn_ends is not None
        kept = _longest_that_fits(
            op, turn_ends[sequence], sequence, int(lengths[sequence]), capacity
        )
        if kept:
            truncated[sequence] = kept
        else:
            dropped.append(sequence)
    return Oversized(tuple(dropped), truncated)


def _check_turn_ends(op: str, num_sequences: int, policy: Policy, turn_ends: Any) -> None:
    if policy != "truncate_at_turn":
        if turn_ends is not None:
            raise ValueError(
                f"{op}: turn_ends are for oversized='truncate_at_turn', got {policy!r}"
            )
        return
    if turn_ends is None:
        raise ValueError(f"{op}: oversized='truncate_at_turn' needs turn_ends, got None")
    if len(turn_ends) != num_sequences:
        raise ValueError(
            f"{op}: turn_ends must have one row for each of {num_sequences} sequences, "
            f"got {len(turn_ends)}"
        )


def _longest_that_fits(op: str, ends: Any, sequence: int, length: int, capacity: int) -> int:
    """Return the last end of a turn within the capacity; 0 if there is none."""
    rows = [int(end) for end in ends]
    for end in rows:
        if not 0 <= end <= length:
            raise ValueError(
                f"{op}: turn_ends of sequence {sequence} must be in [0, {length}], got {end}"
            )
    return max((end for end in rows if end <= capacity), default=0)
