"""Properties of a whole batch or a micro-batch that formats of packed tokens need."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from trajpack.packing.batch.batch import PackedBatch

if TYPE_CHECKING:
    from trajpack.packing.micro_batches.micro_batch import MicroBatch

Packed: TypeAlias = "PackedBatch | MicroBatch"


def places_of(batch: Packed) -> torch.Tensor:
    """Return the boundaries of sequences in memory, int32 ``[sequences + 1]``.

    Padding behind a sequence belongs to it. Differs from `cu_seqlens` only in a micro-batch that
    pads its sequences.
    """
    return batch.cu_seqlens if isinstance(batch, PackedBatch) else batch.cu_seqlens_padded


def lengths_in_memory(batch: Packed) -> tuple[int, ...]:
    """Return the length of each sequence with its padding; known to the host."""
    return batch.seqlens if isinstance(batch, PackedBatch) else batch.padded_seqlens


def num_kept_of(batch: Packed) -> tuple[int, ...]:
    """Return the length of each real sequence, without padding; known to the host.

    Sequences of padding alone come last and are not counted.
    """
    return batch.seqlens if isinstance(batch, PackedBatch) else batch.num_kept


def holds_token(batch: Packed) -> torch.Tensor:
    """Return where there is a token and no padding, bool ``[tokens]``.

    The padding of a `StaticBatch` looks like a prompt: see `check_unpadded`.
    """
    return batch.prompt_mask | (batch.turn_ids >= 0)


def check_unpadded(batch: Packed) -> None:
    """Raise a `ValueError` for a padded batch; a micro-batch knows its padding and passes."""
    if isinstance(batch, PackedBatch):
        batch.check_unpadded()


def check_whole(op: str, batch: PackedBatch) -> None:
    """Raise unless it is a whole batch without padding.

    Raises:
        TypeError: If it is a micro-batch, or anything else.
        ValueError: If it is padded.
    """
    if not isinstance(batch, PackedBatch):
        raise TypeError(f"{op}: batch must be a PackedBatch, got {type(batch).__name__}")
    batch.check_unpadded()


def advantages_of(op: str, batch: Packed) -> torch.Tensor:
    """Return the advantages; raise a `ValueError` if there are none."""
    if batch.advantages is None:
        raise ValueError(f"{op}: the batch has no advantages, call with_advantages first")
    return batch.advantages


def at_trained(batch: Packed, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with 0 where `loss_mask` is False; a caller's mask may drop tokens."""
    return torch.where(batch.loss_mask, tensor, 0.0)
