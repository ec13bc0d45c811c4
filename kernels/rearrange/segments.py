"""Segments of a layout: their table, their rows as integer units, and their selection on the host.

The first touch of fresh memory dominates on the host, so only outputs are written there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.fields.build import SHORT
from trajpack.kernels.fields.gather_fields import UNITS
from trajpack.kernels.validation import values_to_check

Number: TypeAlias = bool | int | float
Ints: TypeAlias = npt.NDArray[np.int64]
Array: TypeAlias = npt.NDArray[Any]
MANY = 64
"""Number of padding stretches from which a whole output is filled before tokens are copied."""


class Segment(IntEnum):
    """Rows of the table of segments. A segment is a stretch of the result."""

    START = 0
    """Index of its first token in the result; the next column's START ends the segment."""
    SOURCE = 1
    """Index of its first token in the sources."""
    LENGTH = 2
    """Tokens that it takes from the sources; its other tokens are padding."""


class Rows(NamedTuple):
    """Layout of a source's rows in units, integers that are moved bit for bit."""

    width: int
    """Units of a row."""
    unit: int
    """Bytes of a unit."""
    fill: int
    """Unit of padding, as a signed integer."""


def rows_of(source: torch.Tensor, fill: Number) -> Rows:
    """Return the layout with the widest units that rows and storage offset allow."""
    itemsize = source.dtype.itemsize
    row = math.prod(source.shape[1:]) * itemsize
    aligned = itemsize * source.storage_offset() if source.is_contiguous() else 0
    unit = 8 if itemsize == 8 else math.gcd(row, aligned, 4)
    return Rows(row // unit, unit, _fill_of(fill, source.dtype, unit))


@lru_cache(maxsize=256)
def _fill_of(fill: Number, dtype: torch.dtype, unit: int) -> int:
    element = torch.full((1,), fill, dtype=dtype, device="cpu").view(torch.uint8)
    return int.from_bytes((bytes(element.tolist()) * 8)[:unit], "little", signed=True)


def as_units(source: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return a source as a flat tensor of its units; a view if it is contiguous."""
    source = source.detach().resolve_conj().resolve_neg()
    return source.contiguous().view(-1).view(UNITS[rows.unit])


def as_rows(units: torch.Tensor, source: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return flat units as rows like those of ``source``."""
    shape = (num_tokens, *source.shape[1:])
    if num_tokens == 0:  # torch cannot view an empty tensor as every dtype
        return source.new_empty(shape)
    return units.view(source.dtype).view(shape)


def check_segments(op: str, table: torch.Tensor, num_tokens: int, num_sources: int) -> None:
    """Raise if the values of a table can be read and it does not select ``num_tokens`` tokens."""
    readable = values_to_check(table)
    if readable is None:
        return
    start, source, given = readable.numpy().astype(np.int64)[: len(Segment)]
    lengths = np.diff(start)
    if start[0] != 0 or start[-1] != num_tokens or (lengths < 0).any():
        raise ValueError(
            f"{op}: segments must go from 0 to num_tokens {num_tokens} and never back, "
            f"they go from {start[0]} to {start[-1]}"
        )
    source, given = source[:-1], given[:-1]
    if (given < 0).any() or (given > lengths).any():
        raise ValueError(f"{op}: no segment may take fewer than 0 tokens or more than it has")
    taken = given > 0
    low, high = source[taken].min(initial=0), (source + given)[taken].max(initial=0)
    if low < 0 or high > num_sources:
        raise ValueError(
            f"{op}: segments must take tokens from 0 to {num_sources}, "
            f"they take some from {low} to {high}"
        )


def select_on_host(
    units: Sequence[torch.Tensor],
    table: torch.Tensor,
    num_tokens: int,
    rows: Sequence[Rows],
    positions: str,
) -> list[torch.Tensor]:
    """Return the selected units of each source, then positions and segments.

    Without ``positions`` it returns units alone. The table is valid.
    """
    start, source, given = table.numpy().astype(np.int64)[: len(Segment), :-1]
    lengths = np.diff(start, append=num_tokens)
    copied = _copier(start, source, given, lengths=lengths, num_tokens=num_tokens)
    outs = []
    for flat, row in zip(units, rows, strict=True):
        array = flat.numpy()
        shaped = array if row.width == 1 else array.reshape(-1, row.width)
        outs.append(torch.from_numpy(copied(shaped, row.fill)).view(-1))
    if not positions:
        return outs
    if num_tokens < SHORT * len(lengths):
        counted = np.arange(num_tokens) - np.repeat(start, lengths)
    else:
        counted = np.empty(num_tokens, np.int64)
        longest = np.arange(lengths.max(initial=0))
        for begin, length in zip(start.tolist(), lengths.tolist(), strict=True):
            counted[begin : begin + length] = longest[:length]
    if positions == "zero":
        for padding in _slices(start + given, start + lengths):
            counted[padding] = 0
    segments = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return [*outs, torch.from_numpy(counted), torch.from_numpy(segments)]


def _copier(
    start: Ints, source: Ints, given: Ints, *, lengths: Ints, num_tokens: int
) -> Callable[[Array, int], Array]:
    """Return a function that selects from a source's rows, given its padding unit.

    It copies slice by slice, or gathers by an index where slices would be short. Segments that
    are neighbours both in the source and in the result are one slice.
    """
    padding, taken = lengths - given, given > 0
    begin, origin, size = start[taken], source[taken], given[taken]
    follows = (begin[1:] == begin[:-1] + size[:-1]) & (origin[1:] == origin[:-1] + size[:-1])
    heads = np.flatnonzero(np.append(np.ones(min(len(size), 1), np.bool_), ~follows))
    if num_tokens < SHORT * len(heads):
        offset = np.arange(num_tokens) - np.repeat(start, lengths)
        index = offset + np.repeat(source, lengths)
        is_padding = offset >= np.repeat(given, lengths) if padding.any() else None
        if is_padding is not None:
            index[is_padding] = origin[0]

        def gathered(source: Array, fill: int) -> Array:
            out: Array = source.take(index, axis=0)
            if is_padding is not None:
                out[is_padding] = fill
            return out

        return gathered
    if heads.size:
        begin, origin, size = begin[heads], origin[heads], np.add.reduceat(size, heads)
    here, there = _slices(begin, begin + size), _slices(origin, origin + size)
    gaps = _slices((start + given)[padding > 0], (start + lengths)[padding > 0])

    def copied(source: Array, fill: int) -> Array:
        out = np.empty((num_tokens, *source.shape[1:]), source.dtype)
        for gap in gaps if len(gaps) <= MANY else [slice(None)]:
            out[gap] = fill
        for to, come in zip(here, there, strict=True):
            out[to] = source[come]
        return out

    return copied


def _slices(begin: Ints, end: Ints) -> list[slice]:
    return [slice(*pair) for pair in zip(begin.tolist(), end.tolist(), strict=True)]
