"""Equality of turns, and of arrays in different containers."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.conversion import host_array, host_tensor, merge_spans
from trajpack.packing.ragged import Ragged, flattened
from trajpack.packing.turn_fields import TURN_FIELDS

if TYPE_CHECKING:
    from trajpack.packing.types import Turn


def same_turns(one: Turn, other: Turn) -> bool:
    """Return whether two turns hold the same values."""
    try:
        mine, theirs = one.fields or {}, other.fields or {}
        return (
            _numbers(one) == _numbers(other)
            and same_values(one.prompt_ids, other.prompt_ids)
            and same_values(one.completion_ids, other.completion_ids)
            and same_values(one.completion_logprobs, other.completion_logprobs, np.float32)
            and set(mine) == set(theirs)
            and all(same_rows(mine[name], theirs[name]) for name in mine)
        )
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - raised by a container of the caller
        return False  # invalid values cannot be compared


def same_values(left: Any, right: Any, dtype: npt.DTypeLike | None = None) -> bool:
    """Return whether two array-likes hold the same values, as ``dtype`` where it is given."""
    with np.errstate(over="ignore"):
        one, other = host_array(left, dtype), host_array(right, dtype)
        return bool(np.array_equal(one, other))


def same_bytes(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> bool:
    """Return whether two contiguous arrays hold the same bytes; words are compared fastest."""
    if one.size != other.size:
        return False
    one, other, whole = one.reshape(-1), other.reshape(-1), one.size & -8
    return np.array_equal(one[whole:], other[whole:]) and np.array_equal(
        one[:whole].view(np.uint64), other[:whole].view(np.uint64)
    )


def _numbers(turn: Turn) -> tuple[Any, ...]:
    """Return the numbers of a turn, and its versions in their one form."""
    numbers = {one.attribute: one.plain(getattr(turn, one.attribute)) for one in TURN_FIELDS}
    first, last = int(numbers.pop("version_start")), int(numbers.pop("version_end"))
    given = () if turn.version_spans is None else turn.version_spans
    return numbers, merge_spans([tuple(map(operator.index, span)) for span in given], first, last)


def same_rows(left: Any, right: Any) -> bool:
    """Return whether rows of an extra field are equal in the narrower of their dtypes.

    Rows that were packed as float32 equal the Python floats that they came from; NaN equals NaN.
    """
    try:
        if isinstance(left, Ragged) or isinstance(right, Ragged):
            raise ValueError("they are ragged")
        one, other = host_tensor(left), host_tensor(right)
    except (TypeError, ValueError):  # lists of different lengths
        mine, theirs = flattened(left), flattened(right)
        return np.array_equal(mine.cu, theirs.cu) and same_rows(mine.values, theirs.values)
    if one.numel() == other.numel() == 0:
        return True
    if one.shape != other.shape:
        return False
    narrow = min(
        one.dtype, other.dtype, key=lambda dtype: (not dtype.is_floating_point, dtype.itemsize)
    )
    if narrow.is_floating_point:
        one, other = (rows.to(narrow).to(torch.float64) for rows in (one, other))
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
