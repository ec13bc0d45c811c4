"""NeMo-RL: the ``BatchedDataDict`` of its policies and losses, and its message logs."""

from __future__ import annotations

from typing import Any

import torch

from trajpack.kernels.rearrange.pad import Number, pad
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.rows.lists import RowLists
from trajpack.packing.rows.names import check_field_names
from trajpack.packing.rows.scores import Score, row_scores


def to_loss_inputs(
    batch: PackedBatch, *, pad_token_id: int = 0, sequence_multiple: int = 1
) -> dict[str, Any]:
    """Return the keys of ``ClippedPGLossDataDict``: a row for each sequence, right-padded.

    ``B`` rows of ``S`` tokens. Column ``j`` belongs to token ``j``; the loss leaves out column
    0, in which there is nothing, and compares column ``j`` with what is predicted at ``j - 1``.

    ========================= ======= ====== ==============================================
    key                       dtype   shape  content, and what stands at padding
    ========================= ======= ====== ==============================================
    input_ids                 int64   [B, S] tokens; pad_token_id
    input_lengths             int32   [B]    tokens of each sequence
    generation_logprobs       float32 [B, S] of the rollout; 0
    prev_logprobs             float32 [B, S] extra field of that name, else the rollout's; 0
    reference_policy_logprobs float32 [B, S] extra field of that name, if there is one; 0
    advantages                float32 [B, S] of the batch; 0
    token_mask                float32 [B, S] 1 where generated; 0
    sample_mask               float32 [B]    1
    each other field          its own [B, S, *] 0
    ========================= ======= ====== ==============================================

    ``BatchedDataDict`` takes it. Not carried: rewards, returns, policy versions, truncation,
    which trajectory or group a row is of.

    Args:
        batch: With advantages, in any layout.
        pad_token_id: What stands at padding of token ids.
        sequence_multiple: ``S`` is a multiple of it (``make_sequence_length_divisible_by``).

    Raises:
        ValueError: If the batch has no advantages or is padded, ``sequence_multiple`` is not
            positive, or an extra field is named as another key.

    Cost: a launch for each key. No synchronisation.
    """
    if batch.advantages is None:
        raise ValueError("to_loss_inputs: the batch has no advantages, call with_advantages first")
    if sequence_multiple < 1:
        raise ValueError(
            f"to_loss_inputs: sequence_multiple must be 1 or more, got {sequence_multiple}"
        )
    batch.check_unpadded()
    width = -(-batch.max_seqlen // sequence_multiple) * sequence_multiple

    def padded(packed: torch.Tensor, value: Number = 0) -> torch.Tensor:
        return pad(packed, batch.cu_seqlens, width, value=value)

    fields = {"prev_logprobs": batch.rollout_logprobs, **batch.fields}
    found = {
        "input_ids": padded(batch.input_ids, pad_token_id),
        "input_lengths": batch.cu_seqlens.diff(),
        "generation_logprobs": padded(batch.rollout_logprobs),
        "advantages": padded(batch.advantages),
        "token_mask": padded(batch.loss_mask.float()),
        "sample_mask": torch.ones(len(batch), device=batch.device),
    }
    check_field_names("to_loss_inputs", batch, found)
    return found | {name: padded(values) for name, values in fields.items()}


def to_message_logs(batch: PackedBatch, *, rewards: Score = "rewards") -> dict[str, Any]:
    """Return what NeMo-RL's rollouts return: a log of messages for each sequence.

    ================ ============== ======= ===============================================
    key              entry          dtype   content
    ================ ============== ======= ===============================================
    message_log      list of dict           messages, in order; see below
    total_reward     float          float32 ``[B]``, see ``rewards``
    length           int            int32   ``[B]``: tokens of the first message
    loss_multiplier  float          float32 ``[B]``: 1
    truncated        bool           bool    ``[B]``: whether the last turn was cut off
    idx              int                    list: which trajectory of the batch it is of
    ================ ============== ======= ===============================================

    A message is a stretch of tokens that were generated, of role ``"assistant"``, or were not,
    of role ``"user"``: ``role``, ``content`` (empty: texts are not known), ``token_ids`` int64,
    ``token_loss_mask`` int64, ``generation_logprobs`` float32. NeMo-RL's
    ``batched_message_log_to_flat_message`` makes rows of them. Not carried: policy versions,
    rewards of single turns, extra fields.

    Args:
        batch: In any layout.
        rewards: ``"rewards"``: the sum over the sequence's turns; ``"returns"``: the return of
            its first turn, discounted.

    Raises:
        ValueError: If the batch is padded, or ``rewards`` is neither.

    Cost: boundaries are read back to the host, which synchronises a device; the messages'
    tensors are views of the batch.
    """
    rows = RowLists(batch)
    spans = batch.turn_spans.tolist()
    logs = []
    for (begin, _, end), turns in zip(rows.spans, rows.turns, strict=True):
        log, reached = [], begin
        for turn in turns:
            start, stop = spans[turn]
            log += _message(batch, "user", reached, start) + _message(
                batch, "assistant", start, stop
            )
            reached = max(reached, stop)
        logs.append(log + _message(batch, "user", reached, end))
    return {
        "message_log": logs,
        "length": torch.tensor([len(log[0]["token_ids"]) for log in logs], dtype=torch.int32),
        "total_reward": row_scores(batch, rewards).cpu(),
        "loss_multiplier": torch.ones(len(logs)),
        "truncated": torch.tensor(rows.truncated(), dtype=torch.bool),
        "idx": rows.trajectories,
    }


def _message(batch: PackedBatch, role: str, begin: int, end: int) -> list[dict[str, Any]]:
    """Return a message of these tokens, or none where there are none."""
    if begin >= end:
        return []
    of = slice(begin, end)
    return [
        {
            "role": role,
            "content": "",
            "token_ids": batch.input_ids[of],
            "token_loss_mask": batch.loss_mask[of].long(),
            "generation_logprobs": batch.rollout_logprobs[of],
        }
    ]
