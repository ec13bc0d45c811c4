"""Selected tokens on the host, stretch by stretch with numpy: what is done for CPU tensors.

First touch of fresh memory dominates here, so nothing is written but the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.build_host import copy_stretches
from trajpack.kernels.select_tokens import UNITS, Rows, Segment

Ints = npt.NDArray[np.int64]
NUMPY_UNITS = {
    size: torch.empty(0, dtype=dtype, device="cpu").numpy().dtype for size, dtype in UNITS.items()
}

MANY = 64
"""Stretches of padding from which on it is cheaper to begin with nothing else."""


class Stretches(NamedTuple):
    """What lies together in the source and in the result, and what is padding."""

    start: Ints
    source: Ints
    length: Ints
    padding_start: Ints
    padding_length: Ints


def select_on_host(
    sources: Sequence[torch.Tensor],
    table: torch.Tensor,
    num_tokens: int,
    rows: Sequence[Rows],
    positions: str,
) -> list[torch.Tensor]:
    """Do what `trajpack.kernels.select_tokens` does, for flat sources of units.

    Raises:
        ValueError: If the table is ill-formed.
    """
    columns = table.numpy().astype(np.int64)
    start, given = columns[Segment.START], columns[Segment.LENGTH, :-1]
    copied = rows_on_host(sources, table, num_tokens, rows)
    lengths = np.diff(start)
    counted = _positions(start[:-1], lengths, num_tokens)
    if positions == "zero":
        for begin, end in zip((start[:-1] + given).tolist(), start[1:].tolist(), strict=True):
            counted[begin:end] = 0
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return [*copied, torch.from_numpy(counted), torch.from_numpy(ids)]


def rows_on_host(
    sources: Sequence[torch.Tensor], table: torch.Tensor, num_tokens: int, rows: Sequence[Rows]
) -> list[torch.Tensor]:
    """Return the sources' rows alone, as flat units.

    Raises:
        ValueError: If the table is ill-formed.
    """
    columns = table.numpy().astype(np.int64)
    lengths = np.diff(columns[Segment.START])
    _check_table(columns, lengths, num_tokens, sources[0].shape[0] // rows[0].width)
    stretches = _stretches(columns, lengths)
    return [
        torch.from_numpy(_copy_rows(source.numpy(), row, stretches, num_tokens))
        for source, row in zip(sources, rows, strict=True)
    ]


def _check_table(columns: Ints, lengths: Ints, num_tokens: int, num_sources: int) -> None:
    start, source, given = columns[: len(Segment)]
    if start[0] != 0 or start[-1] != num_tokens or (lengths < 0).any():
        raise ValueError(
            f"select_tokens: segments must go from 0 to num_tokens {num_tokens} and never back, "
            f"they go from {start[0]} to {start[-1]}"
        )
    source, given = source[:-1], given[:-1]
    if (given < 0).any() or (given > lengths).any():
        raise ValueError(
            "select_tokens: no segment may take fewer than 0 tokens or more than it has"
        )
    taken = given > 0
    low, high = source[taken].min(initial=0), (source + given)[taken].max(initial=0)
    if low < 0 or high > num_sources:
        raise ValueError(
            f"select_tokens: segments must take tokens from 0 to {num_sources}, "
            f"they take some from {low} to {high}"
        )


def _stretches(columns: Ints, lengths: Ints) -> Stretches:
    """Join segments that follow each other in the source as in the result."""
    start, source, given = columns[: len(Segment), :-1]
    padding = lengths - given
    padded = padding > 0
    taken = given > 0
    begin, origin, size = start[taken], source[taken], given[taken]
    follows = (begin[1:] == begin[:-1] + size[:-1]) & (origin[1:] == origin[:-1] + size[:-1])
    heads = np.flatnonzero(np.append(np.ones(min(len(size), 1), np.bool_), ~follows))
    return Stretches(
        begin[heads],
        origin[heads],
        np.add.reduceat(size, heads) if heads.size else size,
        (start + given)[padded],
        padding[padded],
    )


def _copy_rows(
    source: npt.NDArray[Any], row: Rows, stretches: Stretches, num_tokens: int
) -> npt.NDArray[Any]:
    """Return one source's rows, as flat units."""
    width = row.width
    out = np.empty(num_tokens * width, NUMPY_UNITS[row.unit])
    begins, ends = stretches.padding_start, stretches.padding_start + stretches.padding_length
    if begins.size > MANY:
        out[:] = row.fill
        begins = begins[:0]
    copy_stretches(
        out,
        stretches.start * width,
        source,
        stretches.source * width,
        stretches.length * width,
    )
    for begin, end in zip((begins * width).tolist(), (ends * width).tolist(), strict=False):
        out[begin:end] = row.fill
    return out


def _positions(starts: Ints, lengths: Ints, num_tokens: int) -> Ints:
    out = np.empty(num_tokens, np.int64)
    counted = np.arange(lengths.max(initial=0))
    copy_stretches(out, starts, counted, np.zeros_like(starts), lengths)
    return out
