"""The table of segments that a layout takes from tensors, and their selection on the host."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch

from trajpack.kernels.fields.stretches import copier, count_up, slices
from trajpack.kernels.fields.units import Rows
from trajpack.kernels.validation import check_boundaries, values_to_check


class Segment(IntEnum):
    """Rows of the table of segments. A segment is a stretch of the result."""

    START = 0
    """Index of its first token in the result; the next column's START ends the segment."""
    SOURCE = 1
    """Index of its first token in the sources."""
    LENGTH = 2
    """Tokens that it takes from the sources; its other tokens are padding."""


def check_segments(op: str, table: torch.Tensor, num_tokens: int, num_sources: int) -> None:
    """Raise if the values of a table can be read and it does not select ``num_tokens`` tokens."""
    readable = values_to_check(table)
    if readable is None:
        return
    start, source, given = readable.numpy().astype(np.int64)[: len(Segment)]
    check_boundaries(op, readable[Segment.START], num_tokens, name="START of segments")
    lengths, source, given = np.diff(start), source[:-1], given[:-1]
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
    copied, outs = copier(num_tokens, start, source, given), []
    for flat, row in zip(units, rows, strict=True):
        array, rest = flat.numpy(), () if row.width == 1 else (row.width,)
        out = np.empty((num_tokens, *rest), array.dtype)
        copied(out, array.reshape(-1, *rest), row.fill)
        outs.append(torch.from_numpy(out).view(-1))
    if not positions:
        return outs
    counted, some = np.empty(num_tokens, np.int64), lengths > 0
    count_up(counted, start[some], np.zeros_like(start[some]), lengths[some])
    if positions == "zero":
        for padding in slices(start + given, start + lengths):
            counted[padding] = 0
    segments = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return [*outs, torch.from_numpy(counted), torch.from_numpy(segments)]
