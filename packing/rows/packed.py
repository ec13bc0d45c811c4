"""What formats of packed tokens have in common, whether of a whole batch or of a micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from trajpack.packing.batch.batch import PackedBatch

if TYPE_CHECKING:
    from trajpack.packing.micro_batches.micro_batch import MicroBatch

Packed: TypeAlias = "PackedBatch | MicroBatch"
"""What a packed format is made from."""


def places_of(batch: Packed) -> torch.Tensor:
    """Return where sequences lie in memory, int32 ``[sequences + 1]``, padding behind each counted.

    Other than `cu_seqlens` only in a micro-batch that pads its sequences.
    """
    return batch.cu_seqlens if isinstance(batch, PackedBatch) else batch.cu_seqlens_padded


def lengths_in_memory(batch: Packed) -> tuple[int, ...]:
    """Return what each sequence takes, padding behind it counted; from the host."""
    return batch.seqlens if isinstance(batch, PackedBatch) else batch.padded_seqlens


def num_kept_of(batch: Packed) -> tuple[int, ...]:
    """Return the tokens of each sequence that is no padding, without the padding behind it.

    From the host. Those sequences come first.
    """
    return batch.seqlens if isinstance(batch, PackedBatch) else batch.num_kept


def holds_token(batch: Packed) -> torch.Tensor:
    """Return where there is a token and no padding, bool ``[tokens]``.

    Generated tokens too that a mask of the caller's leaves out. The padding of a `StaticBatch`
    looks like a prompt: see `check_unpadded`.
    """
    return batch.prompt_mask | (batch.turn_ids >= 0)


def check_unpadded(batch: Packed) -> None:
    """Raise where a batch is padded, and a micro-batch shall be taken that knows its padding.

    Raises:
        ValueError: That names the way out.
    """
    if isinstance(batch, PackedBatch):
        batch.check_unpadded()


def check_whole(op: str, batch: PackedBatch) -> None:
    """Raise unless it is a whole batch without padding, of which each sequence is taken alone.

    Raises:
        TypeError: If it is a micro-batch, or anything else.
        ValueError: If it is padded.
    """
    if not isinstance(batch, PackedBatch):
        raise TypeError(f"{op}: batch must be a PackedBatch, got {type(batch).__name__}")
    batch.check_unpadded()


def advantages_of(op: str, batch: Packed) -> torch.Tensor:
    """Return the advantages, which the format needs.

    Raises:
        ValueError: If there are none.
    """
    if batch.advantages is None:
        raise ValueError(f"{op}: the batch has no advantages: call with_advantages first")
    return batch.advantages


def at_trained(batch: Packed, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` over the tokens with 0 where `loss_mask` is False.

    So it is already, unless a mask of the caller's leaves generated tokens out.
    """
    return torch.where(batch.loss_mask, tensor, 0.0)


def check_over_tokens(op: str, name: str, tensor: torch.Tensor, batch: Packed) -> None:
    """Raise unless ``tensor`` has an entry for each token and is on the batch's device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.shape[:1] != (batch.num_tokens,):
        raise ValueError(
            f"{op}: {name} must be over {batch.num_tokens} tokens, got shape {list(tensor.shape)}"
        )
    if tensor.device != batch.device:
        raise ValueError(f"{op}: {name} is on {tensor.device} but the batch is on {batch.device}")


class Kept(NamedTuple):
    """A new row of tokens: the first tokens of each sequence, one after the other."""

    tokens: torch.Tensor
    """int64 ``[width]``: which token of the batch stands there; at padding one that does not."""
    holds: torch.Tensor
    """bool ``[width]``: False at padding."""
    positions: torch.Tensor
    """int64 ``[width]``: from 0 in every sequence, on over its padding, and in the tail."""


def width_without_last(batch: Packed, multiple: int = 1) -> int:
    """Return how many tokens `without_last` needs; from the host."""
    kept = (max(length - 1, 0) for length in num_kept_of(batch))
    return sum(-(-length // multiple) * multiple for length in kept)


def without_last(batch: Packed, multiple: int = 1, width: int | None = None) -> Kept:
    """Say where the tokens go when each sequence gives up its last one, which has no successor.

    Args:
        batch: Its own padding is left out.
        multiple: Each sequence takes a multiple of this many tokens.
        width: Tokens of the row; as many as needed if ``None``.

    Raises:
        ValueError: If they are more than ``width``.

    Cost: some launches over the row, no synchronisation.
    """
    lengths, taken = num_kept_of(batch), width_without_last(batch, multiple)
    count = len(lengths)
    width = taken if width is None else width
    if taken > width:
        raise ValueError(f"the sequences take {taken} tokens, more than the row's {width}")
    device = batch.device
    begin = places_of(batch)[:count].long()
    length = batch.cu_seqlens[: count + 1].diff().long()
    length[max(count - 1, 0) : count] = lengths[-1] if count else 0  # the tail may extend it
    length = (length - 1).clamp(min=0)
    slots = (length + multiple - 1) // multiple * multiple
    # the tail is one more sequence, that has no tokens
    slots = torch.cat([slots, slots.new_full((1,), width - taken)])
    length = torch.cat([length, length.new_zeros(1)])
    begin = torch.cat([begin, begin.new_zeros(1)])
    sequence = torch.repeat_interleave(slots, output_size=width)
    positions = torch.arange(width, device=device) - (slots.cumsum(0) - slots)[sequence]
    holds = positions < length[sequence]
    index = torch.where(holds, begin[sequence] + positions, 0)
    return Kept(index, holds, positions)
