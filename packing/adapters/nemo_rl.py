"""NeMo-RL: the ``BatchedDataDict`` of its policies and losses, and its message logs."""

from __future__ import annotations

from typing import Any

import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.rows import layout


def to_loss_inputs(
    batch: PackedBatch, *, pad_token_id: int = 0, sequence_multiple: int = 1
) -> dict[str, Any]:
    """Return the keys of ``ClippedPGLossDataDict``: a row for each sequence, right-padded.

    ``BatchedDataDict`` takes it. Column ``j`` belongs to token ``j``; the loss ignores column 0 and
    compares column ``j`` with the prediction at ``j - 1``. ``S`` is a multiple of
    ``sequence_multiple``, NeMo-RL's ``make_sequence_length_divisible_by``.

    Raises:
        ValueError: As in all formats, and if ``sequence_multiple`` is not positive.
    """
    op = "to_loss_inputs"
    advantages = layout.advantages_of(op, batch)
    if sequence_multiple < 1:
        raise ValueError(f"{op}: sequence_multiple must be 1 or more, got {sequence_multiple}")
    layout.check_whole(op, batch)
    rows = layout.right_padded(batch, -(-batch.max_seqlen // sequence_multiple) * sequence_multiple)
    found = {
        "input_ids": rows.of(batch.input_ids, pad_token_id),
        "input_lengths": batch.cu_seqlens.diff(),
        "generation_logprobs": rows.of(batch.rollout_logprobs),
        "advantages": rows.of(advantages),
        "token_mask": rows.of(batch.loss_mask.float()),
        "sample_mask": torch.ones(len(batch), device=batch.device),
    }
    layout.check_fields(op, batch, keys=found)
    fields = {"prev_logprobs": batch.rollout_logprobs, **batch.fields}
    return found | {name: rows.of(values) for name, values in fields.items()}


def to_message_logs(batch: PackedBatch, *, rewards: layout.Score = "rewards") -> dict[str, Any]:
    """Return the output of NeMo-RL's rollouts: a log of messages for each sequence.

    A message is a run of generated tokens (role ``"assistant"``) or of other tokens (``"user"``)
    with empty ``content``, since texts are unknown. NeMo-RL's
    ``batched_message_log_to_flat_message`` makes rows of them. Not carried: policy versions,
    rewards of single turns, extra fields.
    """
    rows = layout.RowLists("to_message_logs", batch)
    spans = batch.turn_spans.tolist()
    columns = {
        "token_ids": batch.input_ids,
        "token_loss_mask": batch.loss_mask.long(),
        "generation_logprobs": batch.rollout_logprobs,
    }
    logs = []
    for (first, _, end), turns in zip(rows.spans, rows.turns, strict=True):
        log, reached = [], first
        for start, stop in [*(spans[turn] for turn in turns), (end, end)]:
            for role, begin, limit in (("user", reached, start), ("assistant", start, stop)):
                if begin < limit:
                    message = {name: packed[begin:limit] for name, packed in columns.items()}
                    log.append({"role": role, "content": ""} | message)
            reached = max(reached, stop)
        logs.append(log)
    return {
        "message_log": logs,
        "length": torch.tensor([len(log[0]["token_ids"]) for log in logs], dtype=torch.int32),
        "total_reward": layout.row_scores(batch, rewards).cpu(),
        "loss_multiplier": torch.ones(len(logs)),
        "truncated": torch.tensor(rows.truncated, dtype=torch.bool),
        "idx": rows.trajectories,
    }
