"""OpenRLHF: the ``Experience`` that its replay buffer holds and its trainers take."""

from __future__ import annotations

from typing import Any

import torch

from trajpack.kernels.rearrange.pad import Number, pad
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.optional import require
from trajpack.packing.rows.names import row_groups
from trajpack.packing.rows.rows import prompt_lengths_of
from trajpack.packing.rows.scores import Score, row_scores


def to_experience_dict(
    batch: PackedBatch, *, pad_token_id: int = 0, rewards: Score = "rewards"
) -> dict[str, Any]:
    """Return the fields of an ``Experience``: a row for each sequence, padded on the right.

    ``B`` rows of ``T`` tokens, as many as the longest sequence has. What is of actions is
    ``[B, T - 1]`` and one token early: entry ``j`` belongs to token ``j + 1``.

    =================== ======= ========== ==================================================
    field               dtype   shape      content, and what stands at padding
    =================== ======= ========== ==================================================
    sequences           int64   [B, T]     tokens; pad_token_id
    attention_mask      int64   [B, T]     1 where there is a token; 0
    action_mask         int64   [B, T - 1] 1 where generated; 0
    rollout_log_probs   float32 [B, T - 1] 0 where not generated; 0
    advantages, returns float32 [B, T - 1] if the batch has advantages; 0
    rewards, scores     float32 [B]        see ``rewards``
    response_length     int64   [B]        from the first generated token to the last
    truncated           bool    [B]        whether the last turn was cut off
    total_length        float32 [B]        tokens of the sequence
    info                dict               reward: float32 [B], for its logs
    prompts, labels     list[str]          the group or else the id; nothing
    each extra field    its own [B, T - 1] 0; where it is one number a token
    =================== ======= ========== ==================================================

    Masks are integers, as its own sample generator makes them. An extra field named as one of
    an ``Experience`` (``values``, ``action_log_probs``, ``base_action_log_probs``, ``kl``) is
    that; no other goes along. Not carried: rewards of single turns, policy versions.

    Args:
        batch: In any layout.
        pad_token_id: What stands at padding of token ids.
        rewards: ``"rewards"``: the sum over the row's turns; ``"returns"``: the return of its
            first turn, discounted.

    Raises:
        ValueError: If the batch is padded, or ``rewards`` is neither.

    Cost: a launch for each field and a copy of the shifted ones, and some launches over the
    turns. Nothing is read back but which trajectory a row is of, where these are several rows.
    """
    batch.check_unpadded()
    ones = torch.ones_like(batch.input_ids)
    lengths = batch.cu_seqlens.diff()
    scores = row_scores(batch, rewards)
    found: dict[str, Any] = {
        "sequences": _padded(batch, batch.input_ids, pad_token_id),
        "attention_mask": _padded(batch, ones),
        "action_mask": _early(batch, batch.loss_mask.long()),
        "rollout_log_probs": _early(batch, batch.rollout_logprobs),
        "rewards": scores,
        "scores": scores.clone(),
        "response_length": _response_lengths(batch),
        "truncated": _truncated(batch),
        "total_length": lengths.float(),
        "info": {"reward": scores.clone()},
        "prompts": row_groups(batch),
        "labels": [""] * len(batch),
    }
    if batch.advantages is not None:
        found["advantages"] = _early(batch, batch.advantages)
        found["returns"] = _early(batch, batch.returns)
    for name in ("values", "action_log_probs", "base_action_log_probs", "kl"):
        if name in batch.fields:
            found[name] = _early(batch, batch.fields[name])
    return found


def to_experience(batch: PackedBatch, **options: Any) -> Any:
    """Return an OpenRLHF ``Experience`` of the batch; needs OpenRLHF.

    Args:
        batch: In any layout.
        options: Those of `to_experience_dict`, which says what is in it and what it costs.

    Raises:
        ModuleNotFoundError: If OpenRLHF is not installed.
    """
    require("openrlhf")
    from openrlhf.trainer.ppo_utils.experience import Experience

    return Experience(**to_experience_dict(batch, **options))


def _padded(batch: PackedBatch, packed: torch.Tensor, value: Number = 0) -> torch.Tensor:
    return pad(packed, batch.cu_seqlens, batch.max_seqlen, value=value)


def _early(batch: PackedBatch, packed: torch.Tensor) -> torch.Tensor:
    """Lay out without the first token, which no model predicts."""
    return _padded(batch, packed)[:, 1:].contiguous()


def _response_lengths(batch: PackedBatch) -> torch.Tensor:
    """Return the tokens from each sequence's first generated one to its last, int64."""
    begin = batch.cu_seqlens[:-1].long()
    ends = batch.turn_spans[:, 1].long()
    generated = ends > batch.turn_spans[:, 0]
    last = begin + prompt_lengths_of(batch)
    given = torch.where(generated, ends, 0)
    ends = last.scatter_reduce(0, batch.turn_sequence.long(), given, "amax")
    return ends - last


def _truncated(batch: PackedBatch) -> torch.Tensor:
    """Return whether each sequence's last turn was cut off, bool."""
    turn = torch.arange(batch.num_turns, device=batch.device)
    last = turn.new_zeros(len(batch)).scatter_reduce(0, batch.turn_sequence.long(), turn, "amax")
    return batch.turn_truncated[last]
