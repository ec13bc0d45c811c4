"""torchtitan's RL trainer: its training samples, and its micro-batches of packed rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.rows import layout


def to_training_microbatch(
    rows: layout.Packed | Iterable[layout.Packed],
    *,
    seq_len: int | None = None,
    pad_id: int = 0,
    per_sample_pad_multiple: int = 1,
    flat: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the keyword arguments of a ``TrainingMicrobatch``: rows of predictions.

    ``rows`` is a batch or micro-batch for each row, or a single one; ``seq_len`` the longest row's
    if ``None``. torchtitan 0.3.0 has rows; its development branch joins them to
    ``[rows * seq_len]``, which is ``flat=True``. Each sequence loses its last token before it is
    packed, so that no shift crosses a boundary.

    Raises:
        ValueError: As in all formats, and if there is no row, a row is longer than ``seq_len``, or
            the multiple is below 1.

    Example:
        >>> from trajpack import GroupEstimator, Trajectory, Turn, pack
        >>> turn = Turn([1, 2], [3], [-0.5])
        >>> batch = pack([Trajectory(name, [turn], group="g") for name in "ab"])
        >>> to_training_microbatch(batch.with_advantages(GroupEstimator("dr_grpo")))["labels"]
        tensor([[2, 3, 2, 3]])
    """
    op = "to_training_microbatch"
    batches = list(rows) if isinstance(rows, Iterable) else [rows]
    if not batches:
        raise ValueError(f"{op}: rows must have at least one batch, got none")
    multiple = per_sample_pad_multiple
    if multiple < 1:
        raise ValueError(f"{op}: per_sample_pad_multiple must be at least 1, got {multiple}")
    for batch in batches:
        layout.memory_of(batch)
    if seq_len is None:
        seq_len = max(_needed(batch, multiple) for batch in batches)
    packed = [_row(batch, seq_len, pad_id=pad_id, multiple=multiple) for batch in batches]
    join = torch.cat if flat else torch.stack
    return {name: join([row[name] for row in packed]) for name in packed[0]}


def to_training_samples(batch: PackedBatch) -> list[dict[str, Any]]:
    """Return the keyword arguments of a ``TrainingSample`` for each sequence.

    Without ``rollout_id``, the trainer's number of group and member.
    """
    layout.check_whole("to_training_samples", batch)
    columns = {
        "token_ids": batch.input_ids,
        "loss_mask": batch.loss_mask,
        "logprobs": layout.at_trained(batch, batch.rollout_logprobs),
        "advantage": layout.at_trained(batch, layout.advantages_of("to_training_samples", batch)),
    }
    columns["versions"] = batch.policy_versions
    samples = []
    for of in layout.pieces_of(batch, columns):
        sample: dict[str, Any] = {name: values.tolist() for name, values in of.items()}
        known = [version for version in sample.pop("versions") if version >= 0] or [0]
        samples.append(
            sample | {"min_policy_version": min(known), "max_policy_version": max(known)}
        )
    return samples


def _needed(batch: layout.Packed, multiple: int) -> int:
    """Return the tokens of a row that holds every sequence without its last token."""
    kept = (max(length - 1, 0) for length in layout.memory_of(batch).kept)
    return sum(-(-length // multiple) * multiple for length in kept)


def _row(
    batch: layout.Packed, width: int, *, pad_id: int, multiple: int
) -> dict[str, torch.Tensor]:
    """Return a row, of sequences without their last token; lengths stay on the device."""
    advantages = layout.advantages_of("to_training_microbatch", batch)
    (places, _, kept), needed = layout.memory_of(batch), _needed(batch, multiple)
    if needed > width:
        raise ValueError(f"the sequences take {needed} tokens, more than the row's {width}")
    count = len(kept)
    length = batch.cu_seqlens[: count + 1].diff().long()
    length[max(count - 1, 0) : count] = kept[-1] if count else 0  # the tail may extend it
    length = (length - 1).clamp(min=0)
    slots = (length + multiple - 1) // multiple * multiple
    # the rest of the row is one more sequence, without tokens
    slots = torch.cat([slots, slots.new_full((1,), width - needed)])
    length = torch.cat([length, length.new_zeros(1)])
    begin = torch.nn.functional.pad(places[:count].long(), (0, 1))
    first = slots.cumsum(0) - slots
    own = layout.Rows(first, begin, length, (width,))
    following = layout.Rows(first, begin + 1, length, (width,))
    starts = torch.repeat_interleave(first, slots, output_size=width)
    return {
        "token_ids": own.of(batch.input_ids, pad_id),
        "labels": following.of(batch.input_ids, pad_id),
        "positions": torch.arange(width, device=batch.device) - starts,
        "generator_logprobs": following.of(layout.at_trained(batch, batch.rollout_logprobs)),
        "loss_mask": following.of(batch.loss_mask, False),
        "advantages": following.of(layout.at_trained(batch, advantages)),
    }
