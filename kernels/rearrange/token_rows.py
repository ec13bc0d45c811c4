"""How rows of tokens are moved by the kernels that only copy them: as integers, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch

Number: TypeAlias = bool | int | float
UNITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By its bytes, as what a unit of a row is moved; values are never looked at."""


class Rows(NamedTuple):
    """How a source's rows are moved."""

    width: int
    """Units of a row."""
    unit: int
    """Bytes of a unit."""
    fill: int
    """A unit of padding, as a signed integer."""


def rows_of(source: torch.Tensor, fill: Number) -> Rows:
    """Return how a source's rows are moved: in units as wide as rows and storage allow."""
    itemsize = source.dtype.itemsize
    row = math.prod(source.shape[1:]) * itemsize
    aligned = itemsize * source.storage_offset() if source.is_contiguous() else 0
    unit = 8 if itemsize == 8 else math.gcd(row, aligned, 4)
    return Rows(row // unit, unit, fill_bits(fill, source.dtype, unit))


def as_units(source: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return a source as a flat tensor of its units; a view where it is contiguous."""
    source = source.detach().resolve_conj().resolve_neg()
    return source.contiguous().view(-1).view(UNITS[rows.unit])


def as_rows(units: torch.Tensor, source: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return flat units as rows like those of ``source``."""
    shape = (num_tokens, *source.shape[1:])
    if num_tokens == 0:  # whose strides torch does not view as another dtype
        return source.new_empty(shape)
    return units.view(source.dtype).view(shape)


@lru_cache(maxsize=256)
def fill_bits(fill: Number, dtype: torch.dtype, unit: int) -> int:
    """Return a unit of rows that hold nothing but ``fill``, as a signed integer."""
    element = torch.full((1,), fill, dtype=dtype, device="cpu").view(torch.uint8)
    return int.from_bytes((bytes(element.tolist()) * 8)[:unit], "little", signed=True)


def layouts_of(numbers: Sequence[int]) -> list[Rows]:
    """Return what the operators are given as flat integers."""
    return [Rows(*numbers[at : at + 3]) for at in range(0, len(numbers), 3)]
