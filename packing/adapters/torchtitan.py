"""torchtitan's RL trainer: its training samples, and its micro-batches of packed rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.rows.packed import (
    Packed,
    advantages_of,
    at_trained,
    check_unpadded,
    check_whole,
    width_without_last,
    without_last,
)


def to_training_microbatch(
    rows: Packed | Iterable[Packed],
    *,
    seq_len: int | None = None,
    pad_id: int = 0,
    per_sample_pad_multiple: int = 1,
    flat: bool = False,
) -> dict[str, torch.Tensor]:
    """Return keyword arguments of a ``TrainingMicrobatch``: rows of what a token predicts.

    ================== ======= ================ ========================================= =======
    key                dtype   shape            content at place t of a sequence          padding
    ================== ======= ================ ========================================= =======
    token_ids          int64   [rows, seq_len]  its token t                               pad_id
    labels             int64   [rows, seq_len]  its token t + 1                           pad_id
    positions          int64   [rows, seq_len]  t                                         from 0
    generator_logprobs float32 [rows, seq_len]  log-probability of token t + 1            0
    loss_mask          bool    [rows, seq_len]  whether token t + 1 was generated         False
    advantages         float32 [rows, seq_len]  advantage of token t + 1                  0
    ================== ======= ================ ========================================= =======

    torchtitan 0.3.0 has rows; its development branch has them one after the other, ``[T]`` with
    ``T = rows * seq_len``, which is ``flat=True``.

    Each sequence gives up its last token before it is packed, so that nothing is shifted across
    a boundary. Log-probabilities and advantages are 0 where ``loss_mask`` is False.

    Not carried: versions (a ``TrainingBatch`` has `min_policy_versions` beside), returns.

    Args:
        rows: A batch or micro-batch for each row, or a single one.
        seq_len: Tokens of a row; of the longest row if ``None``.
        pad_id: Token and label at padding.
        per_sample_pad_multiple: Each sequence takes a multiple of this many tokens in its row.
        flat: Whether rows stand one after the other, in one dimension.

    Raises:
        ValueError: If there is no row, a row is longer than ``seq_len``, the batch has no
            advantages, or it is that of a `StaticBatch`; if the multiple is below 1.

    Cost: some launches over each row, no synchronisation.

    Example:
        >>> from trajpack import DrGRPO, Trajectory, Turn, pack
        >>> turn = Turn([1, 2], [3], [-0.5])
        >>> batch = pack([Trajectory(name, [turn], group="g") for name in "ab"])
        >>> to_training_microbatch(batch.with_advantages(DrGRPO()))["labels"]
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
        check_unpadded(batch)
    if seq_len is None:
        seq_len = max(width_without_last(batch, multiple) for batch in batches)
    packed = [_row(batch, seq_len, pad_id, multiple) for batch in batches]
    join = torch.cat if flat else torch.stack
    return {name: join([row[name] for row in packed]) for name in packed[0]}


def to_training_samples(batch: PackedBatch) -> list[dict[str, Any]]:
    """Return keyword arguments of a ``TrainingSample`` for each sequence, for its own batcher.

    All but ``rollout_id``, which numbers the group and its members as the trainer does:

    ============================ =========== ======================================================
    key                          type        content
    ============================ =========== ======================================================
    token_ids                    list[int]   tokens of the sequence
    loss_mask                    list[bool]  True on generated tokens
    logprobs                     list[float] log-probabilities, 0.0 on all others
    advantage                    list[float] advantages, 0.0 on all others
    min_policy_version           int         lowest version that sampled one of its tokens, or 0
    max_policy_version           int         highest, or 0
    ============================ =========== ======================================================

    Raises:
        TypeError: If it is no batch.
        ValueError: If the batch is padded or has no advantages.

    Cost: copies five tensors to the host (synchronises) and makes lists of them.
    """
    check_whole("to_training_samples", batch)
    columns = {
        "token_ids": batch.input_ids,
        "loss_mask": batch.loss_mask,
        "logprobs": at_trained(batch, batch.rollout_logprobs),
        "advantage": at_trained(batch, advantages_of("to_training_samples", batch)),
    }
    pieces = {name: column.cpu().split(batch.seqlens) for name, column in columns.items()}
    versions = batch.policy_versions.cpu().split(batch.seqlens)
    samples = []
    for sequence in range(len(batch)):
        sample: dict[str, Any] = {name: of[sequence].tolist() for name, of in pieces.items()}
        known = versions[sequence][versions[sequence] >= 0]
        sample["min_policy_version"] = int(known.min()) if known.numel() else 0
        sample["max_policy_version"] = int(known.max()) if known.numel() else 0
        samples.append(sample)
    return samples


def _row(batch: Packed, width: int, pad_id: int, multiple: int) -> dict[str, torch.Tensor]:
    kept = without_last(batch, multiple, width)
    advantages = advantages_of("to_training_microbatch", batch)
    following = kept.tokens + kept.holds

    def at(index: torch.Tensor, tensor: torch.Tensor, fill: float) -> torch.Tensor:
        if not batch.num_tokens:
            return tensor.new_full((width,), fill)
        return torch.where(kept.holds, tensor[index], fill)

    return {
        "token_ids": at(kept.tokens, batch.input_ids, pad_id),
        "labels": at(following, batch.input_ids, pad_id),
        "positions": kept.positions,
        "generator_logprobs": at(following, at_trained(batch, batch.rollout_logprobs), 0.0),
        "loss_mask": at(following, batch.loss_mask, False),
        "advantages": at(following, at_trained(batch, advantages), 0.0),
    }
