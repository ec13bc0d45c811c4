"""OpenRLHF: the ``Experience`` that its replay buffer holds and its trainers take."""

from __future__ import annotations

from typing import Any

import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.optional import require
from trajpack.packing.rows.packed import check_not_ragged, check_whole
from trajpack.packing.rows.rows import (
    Score,
    prompt_lengths_of,
    right_padded,
    row_groups,
    row_owners,
    row_scores,
)

FIELDS = ("values", "action_log_probs", "base_action_log_probs", "kl")
"""Extra fields that an ``Experience`` has under the same name."""


def to_experience_dict(
    batch: PackedBatch, *, pad_token_id: int = 0, rewards: Score = "rewards"
) -> dict[str, Any]:
    """Return the fields of an ``Experience``: a row for each sequence, right-padded.

    ``T`` is the longest sequence. Fields of actions are ``[B, T - 1]`` and one token early: entry
    ``j`` belongs to token ``j + 1``.

    Keys, dtypes and shapes are those of ``docs/formats/openrlhf.md``.

    The extra fields are ``values``, ``action_log_probs``, ``base_action_log_probs`` and ``kl``.
    Masks are integers, as in OpenRLHF's own sample generator. Not carried: rewards of single turns,
    policy versions, other extra fields.
    """
    check_whole("to_experience_dict", batch)
    scores = row_scores(batch, rewards)
    sequence = batch.turn_sequence.long()
    begin, end = batch.turn_spans[:, 0].long(), batch.turn_spans[:, 1].long()
    first = batch.cu_seqlens[:-1].long() + prompt_lengths_of(batch)
    last = first.scatter_reduce(0, sequence, torch.where(end > begin, end, 0), "amax")
    found: dict[str, Any] = {
        "sequences": right_padded(batch, batch.input_ids, pad_token_id),
        "attention_mask": right_padded(batch, torch.ones_like(batch.input_ids)),
        "action_mask": _early(batch, batch.loss_mask.long()),
        "rollout_log_probs": _early(batch, batch.rollout_logprobs),
        "rewards": scores,
        "scores": scores.clone(),
        "response_length": last - first,
        "truncated": batch.truncated[row_owners(batch)],
        "total_length": batch.cu_seqlens.diff().float(),
        "info": {"reward": scores.clone()},
        "prompts": row_groups(batch),
        "labels": [""] * len(batch),
    }
    if batch.advantages is not None:
        found["advantages"] = _early(batch, batch.advantages)
        found["returns"] = _early(batch, batch.returns)
    check_not_ragged("to_experience_dict", batch, FIELDS)
    fields = {name: batch.fields[name] for name in FIELDS if name in batch.fields}
    return found | {name: _early(batch, values) for name, values in fields.items()}


def to_experience(batch: PackedBatch, **options: Any) -> Any:
    """Return an OpenRLHF ``Experience`` with the fields and options of `to_experience_dict`."""
    require("openrlhf")
    from openrlhf.trainer.ppo_utils.experience import Experience

    return Experience(**to_experience_dict(batch, **options))


def _early(batch: PackedBatch, packed: torch.Tensor) -> torch.Tensor:
    """Lay out without the first token, which no model predicts."""
    return right_padded(batch, packed)[:, 1:].contiguous()
