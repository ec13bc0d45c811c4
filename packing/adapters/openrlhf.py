"""OpenRLHF: the ``Experience`` that its replay buffer holds and its trainers take."""

from __future__ import annotations

from typing import Any

import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.optional import require
from trajpack.packing.rows import layout

FIELDS = ("values", "action_log_probs", "base_action_log_probs", "kl")
"""Extra fields that an ``Experience`` has under the same name."""


def to_experience_dict(
    batch: PackedBatch, *, pad_token_id: int = 0, rewards: layout.Score = "rewards"
) -> dict[str, Any]:
    """Return the fields of an ``Experience``: a row for each sequence, right-padded.

    Fields of actions are one token early: entry ``j`` belongs to token ``j + 1``. Masks are
    integers, as in OpenRLHF's own sample generator. Not carried: rewards of single turns, policy
    versions, extra fields other than ``FIELDS``.
    """
    op = "to_experience_dict"
    layout.check_whole(op, batch)
    layout.check_fields(op, batch, FIELDS)
    scores = layout.row_scores(batch, rewards)
    begin, end = batch.turn_spans.long().unbind(1)
    first = batch.cu_seqlens[:-1].long() + layout.prompt_lengths_of(batch)
    ends = torch.where(end > begin, end, 0)
    last = first.scatter_reduce(0, batch.turn_sequence.long(), ends, "amax")
    actions = {"action_mask": batch.loss_mask.long(), "rollout_log_probs": batch.rollout_logprobs}
    if batch.advantages is not None:
        actions |= {"advantages": batch.advantages, "returns": batch.returns}
    actions |= {name: batch.fields[name] for name in FIELDS if name in batch.fields}
    rows = layout.right_padded(batch)
    early = layout.right_padded(batch, max(batch.max_seqlen - 1, 0), skip=1)
    return {
        "sequences": rows.of(batch.input_ids, pad_token_id),
        "attention_mask": rows.of(layout.ones_of(batch)),
        "rewards": scores,
        "scores": scores.clone(),
        "response_length": last - first,
        "truncated": batch.truncated[layout.row_owners(batch)],
        "total_length": batch.cu_seqlens.diff().float(),
        "info": {"reward": scores.clone()},
        "prompts": layout.row_groups(batch),
        "labels": [""] * len(batch),
        **{name: early.of(packed) for name, packed in actions.items()},
    }


def to_experience(batch: PackedBatch, **options: Any) -> Any:
    """Return an OpenRLHF ``Experience`` with the fields and options of `to_experience_dict`."""
    require("openrlhf")
    from openrlhf.trainer.ppo_utils.experience import Experience

    return Experience(**to_experience_dict(batch, **options))
