"""NeMo-RL: the ``BatchedDataDict`` of its policies and losses, and its message logs."""

from __future__ import annotations

from typing import Any

import torch

from trajpack.kernels.rearrange.pad import Number
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.rows.packed import advantages_of, check_not_ragged, check_whole
from trajpack.packing.rows.rows import RowLists, Score, check_field_names, right_padded, row_scores


def to_loss_inputs(
    batch: PackedBatch, *, pad_token_id: int = 0, sequence_multiple: int = 1
) -> dict[str, Any]:
    """Return the keys of ``ClippedPGLossDataDict``: a row for each sequence, right-padded.

    Column ``j`` belongs to token ``j``; the loss ignores column 0 and
    compares column ``j`` with the prediction at ``j - 1``.

    Keys, dtypes and shapes are those of ``docs/formats/nemo_rl.md``.

    ``BatchedDataDict`` takes it. ``S`` is a multiple of ``sequence_multiple``, NeMo-RL's
    ``make_sequence_length_divisible_by``.

    Raises:
        ValueError: As in all formats, and if ``sequence_multiple`` is not positive.
    """
    advantages = advantages_of("to_loss_inputs", batch)
    if sequence_multiple < 1:
        raise ValueError(
            f"to_loss_inputs: sequence_multiple must be 1 or more, got {sequence_multiple}"
        )
    check_whole("to_loss_inputs", batch)
    width = -(-batch.max_seqlen // sequence_multiple) * sequence_multiple

    def padded(packed: torch.Tensor, value: Number = 0) -> torch.Tensor:
        return right_padded(batch, packed, value, width=width)

    found = {
        "input_ids": padded(batch.input_ids, pad_token_id),
        "input_lengths": batch.cu_seqlens.diff(),
        "generation_logprobs": padded(batch.rollout_logprobs),
        "advantages": padded(advantages),
        "token_mask": padded(batch.loss_mask.float()),
        "sample_mask": torch.ones(len(batch), device=batch.device),
    }
    check_field_names("to_loss_inputs", batch, found)
    check_not_ragged("to_loss_inputs", batch, batch.fields)
    fields = {"prev_logprobs": batch.rollout_logprobs, **batch.fields}
    return found | {name: padded(values) for name, values in fields.items()}


def to_message_logs(batch: PackedBatch, *, rewards: Score = "rewards") -> dict[str, Any]:
    """Return the output of NeMo-RL's rollouts: a log of messages for each sequence.

    Keys, dtypes and shapes are those of ``docs/formats/nemo_rl.md``.

    A message is a run of generated tokens (role ``"assistant"``) or of other tokens (``"user"``):
    ``role``, ``content`` (empty, since texts are unknown), ``token_ids`` int64, ``token_loss_mask``
    int64, ``generation_logprobs`` float32. NeMo-RL's ``batched_message_log_to_flat_message`` makes
    rows of them. Not carried: policy versions, rewards of single turns, extra fields.
    """
    rows = RowLists(batch)
    spans = batch.turn_spans.tolist()
    logs = []
    for (first, _, end), turns in zip(rows.spans, rows.turns, strict=True):
        log, reached = [], first
        for start, stop in [*(spans[turn] for turn in turns), (end, end)]:
            for role, begin, limit in (("user", reached, start), ("assistant", start, stop)):
                if begin < limit:
                    of = slice(begin, limit)
                    log.append(
                        {
                            "role": role,
                            "content": "",
                            "token_ids": batch.input_ids[of],
                            "token_loss_mask": batch.loss_mask[of].long(),
                            "generation_logprobs": batch.rollout_logprobs[of],
                        }
                    )
            reached = max(reached, stop)
        logs.append(log)
    return {
        "message_log": logs,
        "length": torch.tensor([len(log[0]["token_ids"]) for log in logs], dtype=torch.int32),
        "total_reward": row_scores(batch, rewards).cpu(),
        "loss_multiplier": torch.ones(len(logs)),
        "truncated": torch.tensor(rows.truncated, dtype=torch.bool),
        "idx": rows.trajectories,
    }
