"""Columns of a packed batch: all of them changed, one added, and the ends of turns."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trajpack.kernels.fields.units import UNITS
from trajpack.packing.conversion import check_memory
from trajpack.packing.ragged import compact_fields
from trajpack.packing.token_fields import TokenField, check_fields

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.credit.advantages import Batch


def mapped(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """Return what every column becomes by ``change``, which copies it, by name.

    `PackTables.is_whole` stays as it is, and ragged fields have only the values of the batch.
    """
    columns: dict[str, Any] = {name: change(one) for name, one in batch.tensors().items()}
    is_whole = batch.tables.is_whole(batch.loss_mask)
    mask = columns["loss_mask"] if is_whole else change(batch.tables.loss_mask)
    columns["tables"] = batch.tables.mapped(change, mask)
    several = zip(("fields", "ragged_values"), compact_fields(batch), strict=True)
    for key, tensors in several:
        columns[key] = {name: change(one) for name, one in tensors.items()}
    return columns


def with_field(  # noqa: D417 - a method of batches
    batch: PackedBatch, field: TokenField, rows: torch.Tensor
) -> PackedBatch:
    """Return the batch with an extra field that was computed after packing.

    For instance log-probabilities of a teacher. `trajpack.save` and `unpack` include the field.
    The new batch shares all other tensors.

    Args:
        field: Declaration with a new name.
        rows: ``[tokens, *field.shape]`` of ``field.dtype``, on the batch's device. If
            ``field.generated_only``, tokens that were not generated get ``field.fill``.

    Raises:
        TypeError: If ``field`` is no `TokenField`, or ``rows`` no tensor or of another dtype.
        ValueError: If the batch has a field of that name, the shape or the device differs,
            ``rows`` is sparse or its memory was freed, or the field is ragged.

    Example:
        >>> from trajpack import TokenField, Trajectory, Turn, pack
        >>> batch = pack([Trajectory("a", [Turn([1, 2], [3], [-0.5])])])
        >>> teacher = TokenField("teacher_logprobs", torch.float32)
        >>> batch = batch.with_field(teacher, torch.tensor([-1.0, -2.0, -3.0]))
        >>> batch.fields["teacher_logprobs"]
        tensor([ 0.,  0., -3.])
    """
    declared = check_fields([*batch.token_fields, field])
    if field.ragged:
        raise ValueError(f"field {field.name!r}: a ragged field must be packed")
    if not isinstance(rows, torch.Tensor) or rows.dtype != field.dtype:
        got = rows.dtype if isinstance(rows, torch.Tensor) else type(rows).__name__
        raise TypeError(f"field {field.name!r}: rows must be {field.dtype}, got {got}")
    expected = (batch.num_tokens, *field.shape)
    if tuple(rows.shape) != expected or rows.device != batch.device:
        raise ValueError(
            f"field {field.name!r}: rows must have shape {list(expected)} on {batch.device}, "
            f"got {list(rows.shape)} on {rows.device}"
        )
    if rows.layout != torch.strided:
        raise ValueError(f"field {field.name!r}: rows must be dense, got {rows.layout}")
    try:
        check_memory(rows)
    except ValueError as error:
        raise ValueError(f"field {field.name!r}: rows cannot be read: {error}") from error
    rows = rows.detach().resolve_conj().resolve_neg()
    if field.generated_only:
        is_context = batch.prompt_mask.reshape(-1, *[1] * len(field.shape))
        bits = rows.view(UNITS[field.dtype.itemsize])  # torch fills few dtypes
        fill = int.from_bytes(field.layout.fill, sys.byteorder, signed=True)
        rows = bits.masked_fill(is_context, fill).view(field.dtype)
    fields = {**batch.fields, field.name: rows}
    return dataclasses.replace(batch, fields=fields, token_fields=declared)


def turn_ends(batch: PackedBatch) -> list[list[int]]:
    """Return the ends of the turns in each sequence, in tokens from the sequence's start.

    A plan can truncate sequences there: ``plan_micro_batches(batch.seqlens, capacity,
    oversized="truncate_at_turn", turn_ends=batch.turn_ends())``.

    Example:
        >>> import trajpack
        >>> turns = [trajpack.Turn([1], [2], [-0.5]), trajpack.Turn([1, 2, 3], [4], [-0.5])]
        >>> trajpack.pack([trajpack.Trajectory("a", turns)]).turn_ends()
        [[2, 4]]
    """
    sequence = batch.turn_sequence.cpu().numpy()
    ends = batch.turn_spans[:, 1].cpu().numpy() - batch.host_lengths.starts[sequence]
    order = np.lexsort((ends, sequence))
    cuts = np.cumsum(np.bincount(sequence, minlength=len(batch)))[:-1]
    return [part.tolist() for part in np.split(ends[order], cuts)] if len(batch) else []
