"""Properties of a whole batch or a micro-batch that formats of packed tokens need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.micro_batches.micro_batch import MicroBatch

Packed: TypeAlias = PackedBatch | MicroBatch


def check_sequences(batch: Packed) -> None:
    """Raise a `TypeError` unless a batch has sequences; every format reads it through this file."""
    if not isinstance(batch, PackedBatch | MicroBatch):
        raise TypeError(
            "the format takes a PackedBatch or a MicroBatch of sequences, got "
            f"{type(batch).__name__}; formats of trees are in docs/tree.md"
        )


def places_of(batch: Packed) -> torch.Tensor:
    """Return the boundaries of sequences in memory with their padding, int32 ``[n + 1]``."""
    check_sequences(batch)
    return batch.cu_seqlens if isinstance(batch, PackedBatch) else batch.cu_seqlens_padded


def lengths_in_memory(batch: Packed) -> tuple[int, ...]:
    """Return the length of each sequence with its padding."""
    check_sequences(batch)
    return batch.seqlens if isinstance(batch, PackedBatch) else batch.padded_seqlens


def num_kept_of(batch: Packed) -> tuple[int, ...]:
    """Return the length of each sequence without padding; a padding sequence is not counted."""
    check_sequences(batch)
    return batch.seqlens if isinstance(batch, PackedBatch) else batch.num_kept


def holds_token(batch: Packed) -> torch.Tensor:
    """Return where there is a token and no padding, bool ``[tokens]``."""
    check_sequences(batch)
    return batch.prompt_mask | (batch.turn_ids >= 0)


def check_whole(op: str, batch: PackedBatch) -> None:
    """Raise a `TypeError` for a micro-batch."""
    check_sequences(batch)
    if not isinstance(batch, PackedBatch):
        raise TypeError(f"{op}: batch must be a PackedBatch, got {type(batch).__name__}")


def check_not_ragged(op: str, batch: Packed, names: Iterable[str]) -> None:
    """Raise a `ValueError` if one of the named fields is ragged, which the format cannot hold."""
    ragged = sorted(set(names) & set(batch.ragged_values))
    if ragged:
        raise ValueError(f"{op}: extra fields must have a row for each token, {ragged} are ragged")


def advantages_of(op: str, batch: Packed) -> torch.Tensor:
    """Return the advantages; raise a `ValueError` if there are none."""
    if batch.advantages is None:
        raise ValueError(f"{op}: the batch has no advantages, call with_advantages first")
    return batch.advantages


def at_trained(batch: Packed, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with 0 where `loss_mask` is False; a caller's mask may drop tokens."""
    return torch.where(batch.loss_mask, tensor, 0.0)


def pieces_of(
    batch: PackedBatch, columns: Mapping[str, torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """Copy tensors over the tokens to the host, and return those of each sequence."""
    pieces = (column.cpu().split(batch.seqlens) for column in columns.values())
    return [dict(zip(columns, of, strict=True)) for of in zip(*pieces, strict=True)]
