"""Selected tokens on the host, stretch by stretch with numpy: what is done for CPU tensors.

First touch of fresh memory dominates here, so nothing is written but the outputs. What all sources
share is worked out once: which stretches are copied or, where they are short, each token's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.fields.build import SHORT
from trajpack.kernels.rearrange.select_tokens import Segment
from trajpack.kernels.rearrange.token_rows import UNITS, Number, fill_bits
from trajpack.kernels.validation import values_to_check

Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
MANY = 64
"""Stretches of padding from which on it is cheaper to write padding everywhere, and then tokens."""


class Copies(NamedTuple):
    """Sources of the tokens: slices, or an index where slices would be short."""

    stretches: list[tuple[slice, slice]]
    """Slice of the result and slice of the source."""
    padding: list[slice]
    places: Ints | None
    """Source of each token; arbitrary for padding."""
    is_padding: npt.NDArray[np.bool_] | None
    """Padding tokens, if there is an index and padding."""


class HostSources:
    """Tensors over the same tokens as arrays, from which one table after another selects."""

    def __init__(self, sources: Sequence[torch.Tensor], fills: Sequence[Number]) -> None:
        self._dtypes = [source.dtype for source in sources]
        self._arrays = [_as_array(source) for source in sources]
        self._fills = [
            array.dtype.type(fill)
            if array.dtype.kind != "i" or not source.dtype.is_floating_point
            else array.dtype.type(fill_bits(fill, source.dtype, array.itemsize))
            for array, source, fill in zip(self._arrays, sources, fills, strict=True)
        ]
        self._counted = np.arange(0)

    def rows(self, table: torch.Tensor, num_tokens: int) -> list[torch.Tensor]:
        """Return the rows that a table selects.

        Raises:
            ValueError: If the table is ill-formed.
        """
        check_segments("select_tokens", table, num_tokens, len(self._arrays[0]))
        return self._rows(table.numpy().astype(np.int64), num_tokens)

    def select(self, table: torch.Tensor, num_tokens: int, positions: str) -> list[torch.Tensor]:
        """Return the rows that a table selects, then positions and segments.

        Raises:
            ValueError: If the table is ill-formed.
        """
        check_segments("select_tokens", table, num_tokens, len(self._arrays[0]))
        columns = table.numpy().astype(np.int64)
        rows = self._rows(columns, num_tokens)
        start = columns[Segment.START]
        lengths = np.diff(start)
        counted = self._positions(start[:-1], lengths, num_tokens)
        if positions == "zero":
            end = start[:-1] + columns[Segment.LENGTH, :-1]
            for begin, stop in zip(end.tolist(), start[1:].tolist(), strict=True):
                counted[begin:stop] = 0
        segments = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return [*rows, torch.from_numpy(counted), torch.from_numpy(segments)]

    def _rows(self, columns: Ints, num_tokens: int) -> list[torch.Tensor]:
        lengths = np.diff(columns[Segment.START])
        copies = _copies(columns, lengths, num_tokens)
        given = zip(self._arrays, self._fills, self._dtypes, strict=True)
        return [
            _as_tensor(_copied(array, fill, copies, num_tokens), dtype)
            for array, fill, dtype in given
        ]

    def _positions(self, starts: Ints, lengths: Ints, num_tokens: int) -> Ints:
        if num_tokens < SHORT * len(lengths):
            return np.arange(num_tokens) - np.repeat(starts, lengths)
        if len(self._counted) < lengths.max(initial=0):
            self._counted = np.arange(lengths.max())
        out = np.empty(num_tokens, np.int64)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            out[start : start + length] = self._counted[:length]
        return out


def _as_array(source: torch.Tensor) -> Array:
    source = source.detach().resolve_conj().resolve_neg().contiguous()
    try:
        return source.numpy()
    except TypeError:  # bfloat16 and narrower floats
        return source.view(UNITS[source.itemsize]).numpy()


def _as_tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def check_segments(op: str, table: torch.Tensor, num_tokens: int, num_sources: int) -> None:
    """Raise if a table can be read and does not select ``num_tokens`` tokens that there are."""
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


def _copies(columns: Ints, lengths: Ints, num_tokens: int) -> Copies:
    """Join segments that follow each other in the source as in the result."""
    start, source, given = columns[: len(Segment), :-1]
    padding = lengths - given
    taken = given > 0
    begin, origin, size = start[taken], source[taken], given[taken]
    follows = (begin[1:] == begin[:-1] + size[:-1]) & (origin[1:] == origin[:-1] + size[:-1])
    heads = np.flatnonzero(np.append(np.ones(min(len(size), 1), np.bool_), ~follows))
    if num_tokens < SHORT * len(heads):
        offset = np.arange(num_tokens) - np.repeat(start, lengths)
        index = offset + np.repeat(source, lengths)
        if not padding.any():
            return Copies([], [], index, None)
        is_padding = offset >= np.repeat(given, lengths)
        index[is_padding] = origin[0] if origin.size else 0
        return Copies([], [], index, is_padding)
    size = np.add.reduceat(size, heads) if heads.size else size
    begin, origin = begin[heads], origin[heads]
    return Copies(
        list(zip(_slices(begin, begin + size), _slices(origin, origin + size), strict=True)),
        _slices((start + given)[padding > 0], (start + lengths)[padding > 0]),
        None,
        None,
    )


def _slices(begin: Ints, end: Ints) -> list[slice]:
    return [slice(*pair) for pair in zip(begin.tolist(), end.tolist(), strict=True)]


def _copied(source: Array, fill: Any, copies: Copies, num_tokens: int) -> Array:
    """Return one source's rows."""
    if copies.places is not None and len(source):
        out: Array = source.take(copies.places, axis=0)
        if copies.is_padding is not None:
            out[copies.is_padding] = fill
        return out
    padding = copies.padding
    shape = (num_tokens, *source.shape[1:])
    if len(padding) > MANY or copies.places is not None:
        out, padding = np.full(shape, fill, source.dtype), []
    else:
        out = np.empty(shape, source.dtype)
    for here, there in copies.stretches:
        out[here] = source[there]
    for here in padding:
        out[here] = fill
    return out
