"""Ragged rows: several values a token, as many as each token has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from trajpack.packing.conversion import INT32_MAX, host_tensor, several, shown
from trajpack.packing.representation import brief_repr

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.micro_batches.micro_batch import MicroBatch
    from trajpack.packing.tree.entries import Entries


class Ragged(NamedTuple):
    """Rows of different lengths: row ``i`` is ``values[cu[i]:cu[i + 1]]``.

    In `Turn.fields` these are arrays of any kind, with a row for each token of the completion.
    `PackedBatch.generated` has tensors on the batch's device, with a row for each generated token:
    the ``support`` of `trajpack.kernels.token_logprobs`.

    Attributes:
        cu: int32 ``[rows + 1]``: number of values before each row; starts at 0, ends at the total.
        values: ``[total, *shape]``: values of all rows, one behind the other.

    Example:
        >>> from trajpack import TokenField, Trajectory, Turn, pack
        >>> mask = TokenField("sampling_mask", torch.int32, ragged=True)
        >>> given = {"sampling_mask": [[3], [4, 9]]}  # or Ragged([0, 1, 3], [3, 4, 9])
        >>> turn = Turn([1, 2], [3, 4], [-0.5, -0.5], fields=given)
        >>> pack([Trajectory("a", [turn])], fields=[mask]).generated["sampling_mask"]
        Ragged(cu=tensor([0, 1, 3]), values=tensor([3, 4, 9]))
    """

    cu: Any
    values: Any

    def __repr__(self) -> str:
        return brief_repr(self)


def flattened(values: Any) -> Ragged:
    """Return rows with int64 boundaries, and with all values in one container of any kind.

    Args:
        values: `Ragged`, or several rows.

    Raises:
        TypeError: If boundaries are no integers, or rows no sequences.
        ValueError: If boundaries are not one-dimensional, do not start at 0, decrease, or do not
            end at the number of values.
    """
    if isinstance(values, Ragged):
        given, total = host_tensor(values.cu), len(values.values)
        if given.dtype.is_floating_point or given.dtype.is_complex or given.dtype == torch.bool:
            raise TypeError(f"cu must be integers, got {given.dtype}")
        bounds = given.numpy().astype(np.int64)
        counts = np.diff(bounds) if bounds.ndim == 1 else bounds
        if bounds.ndim != 1 or not bounds.size or bounds[0] or (counts < 0).any():
            raise ValueError(f"cu must grow from 0, got {shown(bounds)}")
        if bounds[-1] != total or total > INT32_MAX:
            raise ValueError(f"cu must end at the {total} values, got {bounds[-1]}")
        return Ragged(bounds, values.values)
    rows = several("rows must be several sequences", values)
    cu = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    if all(type(row) is list or type(row) is tuple for row in rows):
        return Ragged(cu, [value for row in rows for value in row])
    filled = [host_tensor(row) for row in rows if len(row)]
    return Ragged(cu, torch.cat(filled) if filled else [])


def part(rows: Any, begin: int, end: int) -> Any:
    """Return some rows of a field on the host, as views; of a `Ragged` with new boundaries."""
    if not isinstance(rows, Ragged):
        return rows[begin:end]
    cu = rows.cu[begin : end + 1]
    return Ragged(cu - cu[0], rows.values[int(cu[0]) : int(cu[-1])])


def concatenated(pieces: Sequence[Ragged]) -> Ragged:
    """Return the rows of one or more `Ragged` of arrays as one."""
    counts = np.concatenate([np.diff(one.cu) for one in pieces])
    values = np.concatenate([one.values for one in pieces])
    return Ragged(np.append(0, counts).cumsum(), values)


def ragged_rows(
    batch: PackedBatch | MicroBatch | Entries, name: str, index: torch.Tensor | None = None
) -> Ragged:
    """Return the values of a ragged field for some tokens of a batch, for all by default.

    On a device the number of values is that of all generated tokens: nothing is read.
    """
    spans = batch.fields[name] if index is None else batch.fields[name][index]
    on_host = spans.device.type == "cpu"  # where the exact number costs nothing
    total = int(spans[:, 1].sum()) if on_host else batch.value_counts[name][0]
    return gathered(spans, batch.ragged_values[name], total)


def compact_fields(
    batch: PackedBatch | Entries,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return `fields` and `ragged_values` that hold the values in the order of the tokens."""
    fields, values = dict(batch.fields), {}
    for name in batch.ragged_values:
        cu, values[name] = ragged_rows(batch, name)
        counts = fields[name][:, 1]
        fields[name] = torch.stack([torch.where(counts > 0, cu[:-1], 0), counts], 1)
    return fields, values


def gathered(spans: torch.Tensor, values: torch.Tensor, total: int) -> Ragged:
    """Return the values of some rows, one behind the other.

    Args:
        spans: int32 ``[rows, 2]``: first value of each row, and number of its values.
        values: ``[any, *shape]``
        total: Number of values of all rows, or more: the last row takes what is left over, with
            any values.
    """
    first, counts = spans.unbind(1)
    cu = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    if spans.shape[0]:
        cu[-1] = total
    place = torch.arange(total, device=spans.device)
    row = torch.searchsorted(cu[1:].long(), place, right=True)
    place += (first - cu[:-1])[row]
    return Ragged(cu, values[place.clamp(max=values.shape[0] - 1)])
