"""When two arrays that different containers hold are the same."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.conversion import host_array, host_tensor, several


def read_once(values: Any) -> Any:
    """Return an array as it is, and entries of any other container, no more than it says it has."""
    is_plain = type(values) in {list, tuple} or hasattr(type(values), "__array__")
    return values if is_plain or not isinstance(values, Sized) else several("values", values)


def same_values(left: Any, right: Any, dtype: npt.DTypeLike | None = None) -> bool:
    """Tell whether two array-likes hold the same values, as ``dtype`` where it is given."""
    with np.errstate(over="ignore"):
        one, other = host_array(read_once(left), dtype), host_array(read_once(right), dtype)
        return bool(np.array_equal(one, other))


def same_rows(left: Any, right: Any) -> bool:
    """Tell whether two arrays of an extra field hold the same, in the narrower of their dtypes.

    What was packed as float32 is equal to the Python floats it came from; NaN is equal to NaN.
    """
    one, other = host_tensor(read_once(left)), host_tensor(read_once(right))
    if one.numel() == other.numel() == 0:
        return True
    if one.shape != other.shape:
        return False
    narrow = min(
        one.dtype, other.dtype, key=lambda dtype: (not dtype.is_floating_point, dtype.itemsize)
    )
    one, other = (
        row.to(narrow).to(torch.float64) if narrow.is_floating_point else row
        for row in (one, other)
    )
    same = (one == other) | (one.isnan() & other.isnan())
    return bool(same.all())
