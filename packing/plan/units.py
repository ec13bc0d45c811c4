"""Units of plans: types of arguments, checks of single values, and sums of integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Cost: TypeAlias = Callable[[Ints], Any] | Sequence[float] | npt.NDArray[Any] | None
"""Cost of a sequence: a function of lengths, one number for each, or ``None`` for its tokens."""
Labels: TypeAlias = Sequence[Any] | npt.NDArray[Any] | None
Algorithm: TypeAlias = Literal["next_fit", "best_fit_decreasing", "karmarkar_karp"]
"""Method that fills micro-batches.

- ``"next_fit"``: in the order given, a new one where the next sequence does not fit.
- ``"best_fit_decreasing"``: longest first, each into the fullest with room: as few as it can.
- ``"karmarkar_karp"``: equal cost, by differencing and exchanges.
"""
Policy: TypeAlias = Literal["raise", "drop", "truncate_at_turn", "own_bin"]
"""Treatment of a sequence that is longer than the capacity:

- ``"raise"``: a ValueError names it.
- ``"drop"``: it is in no micro-batch.
- ``"truncate_at_turn"``: its first turns are kept, as many as fit; where none fits it is dropped.
- ``"own_bin"``: it is alone in a micro-batch over the capacity.
"""
COST_BITS = 42
"""All costs together, scaled to integers, are below two to this power: their sums are exact."""
MAX_CAPACITY = 2**31 - 1
"""Tokens of the largest micro-batch: its boundaries are int32. A greater capacity is no limit."""


def check_count(op: str, name: str, value: Any, *, least: int = 1) -> None:
    """Raise unless ``value`` is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{op}: {name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{op}: {name} must be {least} or more, got {value}")


def check_choice(op: str, name: str, value: Any, *, choices: Any) -> None:
    """Raise unless ``value`` is one of a ``Literal``'s values."""
    if value not in get_args(choices):
        known = ", ".join(repr(choice) for choice in get_args(choices))
        raise ValueError(f"{op}: {name} must be one of {known}, got {value!r}")


def round_up(value: Any, multiple: int) -> Any:
    """Return a number, or each number of an array, rounded up to a multiple."""
    return value if multiple == 1 else -(-value // multiple) * multiple


def scaled(costs: Floats) -> Ints:
    """Return costs as integers with an exact sum: unchanged, or scaled by a power of two."""
    total = float(np.cumsum(costs)[-1]) if len(costs) else 0.0  # the same order on every machine
    whole = costs.astype(np.int64) if total < 2.0**COST_BITS else None
    if whole is not None and bool((whole == costs).all()):
        return whole
    exponent = COST_BITS - int(np.frexp(total)[1])
    return np.rint(np.ldexp(costs, exponent)).astype(np.int64)


def numbered(labels: Ints) -> tuple[Ints, Ints]:
    """Number labels from 0 in order of appearance; return the numbers and the first indices."""
    _, firsts, inverse = np.unique(labels, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    return inverse_of(order)[inverse], firsts[order]


def inverse_of(order: Ints) -> Ints:
    """Return the place of each number in a permutation."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place


def summed(values: Ints, index: Ints, count: int) -> Ints:
    """Return the exact sums of values with the same index, int64 ``[count]``."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, index, values)
    return sums


def decreasing(values: Ints) -> Ints:
    """Return the indices from the largest value to the smallest; equal values stay in order."""
    return np.argsort(-values, kind="stable")
