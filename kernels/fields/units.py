"""Rows of tensors as integer units, which ops move bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from trajpack.kernels.runs import in_tiles

UNITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtype that moves a unit, by the unit's bytes."""


class Rows(NamedTuple):
    """Layout of the rows of a tensor, one for each token."""

    width: int
    """Units of a row."""
    unit: int
    """Bytes of a unit."""
    fill: int
    """Unit of a row that is not given, as a signed integer."""


def rows_of(dtype: torch.dtype, shape: Sequence[int], fill: bytes, offset: int = 0) -> Rows:
    """Return the layout with the widest units that rows of ``shape`` at a byte offset allow.

    ``fill`` is the memory of one element, of at most 8 bytes.
    """
    row = math.prod(shape) * dtype.itemsize
    unit = 8 if dtype.itemsize == 8 else math.gcd(row, offset, 4)
    return Rows(row // unit, unit, int.from_bytes((fill * 8)[:unit], "little", signed=True))


def layouts_of(numbers: Sequence[int]) -> list[Rows]:
    """Return the layouts that an op takes as flat integers."""
    return [Rows(*numbers[at : at + 3]) for at in range(0, len(numbers), 3)]


def empty_units(
    layouts: Sequence[Rows], num_tokens: int, device: torch.device
) -> list[torch.Tensor]:
    """Return uninitialised units of all rows of each layout, and more to the end of a tile."""
    return [
        torch.empty(in_tiles(num_tokens * width), dtype=UNITS[unit], device=device)
        for width, unit, _ in layouts
    ]


def as_rows(
    units: torch.Tensor, num_tokens: int, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Return the first of flat units as ``[num_tokens, *shape]`` of a dtype."""
    if not num_tokens:  # torch cannot view no bytes as another dtype
        return units.new_empty((0, *shape), dtype=dtype)
    entries = units.view(dtype)
    return entries[: num_tokens * math.prod(shape)].view(num_tokens, *shape)
