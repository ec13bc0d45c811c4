"""AReaL: the padded dictionary of its workflows and trainers, and its legacy ``SequenceSample``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.conversion import sent
from trajpack.packing.rows import reading
from trajpack.packing.rows.masked_tokens import masked_trajectory
from trajpack.packing.rows.packed import advantages_of, check_not_ragged, check_whole
from trajpack.packing.rows.rows import (
    Score,
    check_field_names,
    right_padded,
    row_scores,
    token_scores,
    turn_trajectories,
)
from trajpack.packing.types import Trajectory

EARLY = frozenset({"values", "ref_logp", "prox_logp", "teacher_logp"})
"""Extra fields that AReaL takes from a forward pass: entry ``j`` belongs to token ``j + 1``."""


def to_padded_dict(
    batch: PackedBatch, *, pad_token_id: int = 0, rewards: Score = "returns"
) -> dict[str, torch.Tensor]:
    """Return the dictionary of a ``RolloutWorkflow``: a row for each sequence, right-padded.

    ``S`` is the longest sequence. Entry ``j`` belongs to token ``j``, in the extra fields
    ``values``, ``ref_logp``, ``prox_logp`` and ``teacher_logp`` to token ``j + 1``.

    Keys, dtypes and shapes are those of ``docs/formats/areal.md``.

    Layout ``"turns"`` is AReaL's export ``"individual"``, ``"merged"`` is ``"concat"``. Only
    AReaL's turn-level GAE reads ``turn_ids``; releases without it ignore the key.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> turn = Turn([1, 2], [3], [-0.5], reward=1.0, version_start=4, version_end=4)
        >>> to_padded_dict(pack([Trajectory("a", [turn])]))["versions"]
        tensor([[-1, -1,  4]], dtype=torch.int32)
    """
    check_whole("to_padded_dict", batch)
    turns = torch.arange(batch.num_turns, device=batch.device)
    within = (turns - batch.cu_turns[turn_trajectories(batch)]).int()
    within = torch.cat([within, within.new_full((1,), -1)])  # index -1 reads this entry
    found = {
        "input_ids": right_padded(batch, batch.input_ids.int(), pad_token_id),
        "attention_mask": right_padded(batch, torch.ones_like(batch.loss_mask), False),
        "loss_mask": right_padded(batch, batch.loss_mask.int()),
        "logprobs": right_padded(batch, batch.rollout_logprobs),
        "versions": right_padded(batch, batch.policy_versions),
        "turn_ids": right_padded(batch, within[batch.turn_ids.long()], -1),
        "rewards": row_scores(batch, rewards),
    }
    check_field_names("to_padded_dict", batch, found)
    check_not_ragged("to_padded_dict", batch, batch.fields)
    for name, values in batch.fields.items():
        found[name] = (_early if name in EARLY else right_padded)(batch, values)
    return found


def to_update_dict(
    batch: PackedBatch, *, pad_token_id: int = 0, rewards: Score = "returns"
) -> dict[str, torch.Tensor]:
    """Return the input of ``PPOActor.ppo_update``: the padded dictionary with advantages.

    As `to_padded_dict`, with the keys that AReaL's ``compute_advantages`` changes or adds, float32
    ``[B, S]`` and shifted: entry ``j`` belongs to token ``j + 1``, and the last column is 0.

    Keys, dtypes and shapes are those of ``docs/formats/areal.md``.
    """
    advantages = advantages_of("to_update_dict", batch)
    found = to_padded_dict(batch, pad_token_id=pad_token_id, rewards=rewards)
    check_field_names("to_update_dict", batch, ("advantages", "tot_rewards", "kl_rewards"))
    found |= {
        "loss_mask": _early(batch, batch.loss_mask.float()),
        "logprobs": _early(batch, batch.rollout_logprobs),
        "advantages": _early(batch, advantages),
        "returns": _early(batch, batch.returns),
        "tot_rewards": _early(batch, token_scores(batch)),
    }
    found.setdefault("prox_logp", found["logprobs"].clone())
    found["kl_rewards"] = torch.zeros_like(found["logprobs"])
    return found


def from_padded_dict(
    dicts: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    ids: Iterable[str] | None = None,
    groups: Iterable[str] | None = None,
    *,
    missing_reward: float | None = None,
) -> list[Trajectory]:
    """Return the trajectories of a padded dictionary or of several, as workflows return them.

    A row is a trajectory, with its turns by ``turn_ids`` if present. The row's reward goes to its
    last turn.

    Lost in the format: rewards of single turns, the discount, truncation, groups. Dictionaries
    after ``compute_advantages`` are shifted and cannot be read.

    Raises:
        TypeError: If a dictionary is none, such as the ``None`` of a rejected episode.
        ValueError: As in all formats.
    """
    op = "from_padded_dict"
    if isinstance(dicts, Mapping) or not isinstance(dicts, Iterable):
        named = [(op, dicts)]
    else:
        named = [(f"{op}: dicts[{index}]", one) for index, one in enumerate(dicts)]
    rows = [row for name, one in named for row in _rows(name, one, missing_reward)]
    of = reading.labels_of(op, "groups", groups, len(rows))
    names = reading.row_ids(op, ids, of)
    return [
        masked_trajectory(name, **row, group=group)
        for row, name, group in zip(rows, names, of, strict=True)
    ]


def _rows(op: str, padded: Any, missing_reward: float | None) -> list[dict[str, Any]]:
    """Return the arguments of `masked_trajectory` for each row of a dictionary."""
    if not isinstance(padded, Mapping):
        raise TypeError(f"{op}: expected a dictionary of tensors, got {type(padded).__name__}")
    needed = ("input_ids", "attention_mask", "loss_mask", "logprobs")
    arrays = reading.host_arrays(op, padded, needed, ("versions", "turn_ids", "rewards"))
    shape = arrays["input_ids"].shape
    reading.check_shapes(op, arrays, dict.fromkeys(arrays, shape) | {"rewards": shape[:1]})
    rewards, there = arrays.pop("rewards", None), arrays.pop("attention_mask") != 0
    arrays["mask"] = arrays.pop("loss_mask")
    found = []
    for row, of in enumerate(there):
        reward = reading.reward_or_missing(
            op,
            None if rewards is None else rewards[row],
            missing_reward,
            expected="rewards [B]",
            of="" if rewards is None else f"row {row}",
        )
        found.append({name: values[row][of] for name, values in arrays.items()})
        found[-1]["reward"] = reward
    return found


def to_sequence_sample(batch: PackedBatch) -> dict[str, Any]:
    """Return the keyword arguments of a ``SequenceSample`` that holds a batch in layout "turns".

    They are ``keys, ids, dtypes, trailing_shapes, seqlens, data``, of one batch element for each
    trajectory, in it one sequence for each turn:

    ================== ======= ================ =============================================
    key                dtype   length           content
    ================== ======= ================ =============================================
    packed_input_ids   int64   L, each turn     prompt and completion
    prompt_mask        bool    L, each turn     True on the prompt
    packed_logprobs    float32 L - 1, each turn entry j belongs to token j + 1; 0 on prompts
    seq_no_eos_mask    bool    1, each turn     True where cut off, the last as its trajectory
    rewards            float32 1, each turn     discounted backward over the turns
    version_start      int32   1, each turn     policy version of the first sampled token
    version_end        int32   1, each turn     policy version of the last sampled token
    packed_prompts     int64   once             the first turn's prompt
    birth_time         int64   once             milliseconds since the epoch, if all have one
    task_ids           int64   once             kind of task, if all have one
    ================== ======= ================ =============================================

    Raises:
        ValueError: If the batch is in another layout, an id occurs twice, or only some
            trajectories have a birth time or a task id.
    """
    check_whole("to_sequence_sample", batch)
    if batch.layout != "turns":
        raise ValueError(f"to_sequence_sample needs layout 'turns', got {batch.layout!r}")
    repeated = sorted(name for name, count in Counter(batch.ids).items() if count > 1)
    if repeated:
        raise ValueError(f"ids must differ within a SequenceSample, repeated: {repeated}")
    turns = [slice(begin, end) for begin, end in pairwise(batch.cu_turns.tolist())]
    lengths = [list(batch.seqlens[of]) for of in turns]
    once, each_turn = [[1] for _ in turns], [[1] * len(of) for of in lengths]
    starts = list(accumulate(batch.seqlens, initial=0))
    completions = batch.turn_spans[:, 0].tolist()
    prompts = [batch.input_ids[starts[of.start] : completions[of.start]] for of in turns]
    # the first entry of each sequence is dropped, so that entry j belongs to token j + 1
    shifted = batch.rollout_logprobs[batch.position_ids > 0]
    fields: dict[str, tuple[torch.Tensor, list[list[int]]]] = {
        "packed_input_ids": (batch.input_ids, lengths),
        "prompt_mask": (batch.prompt_mask, lengths),
        "packed_logprobs": (shifted, [[length - 1 for length in of] for of in lengths]),
        "packed_prompts": (
            torch.cat([batch.input_ids[:0], *prompts]),
            [[len(prompt)] for prompt in prompts],
        ),
        "seq_no_eos_mask": (
            batch.turn_truncated.index_copy(0, batch.cu_turns[1:].long() - 1, batch.truncated),
            each_turn,
        ),
        "rewards": (batch.turn_returns, each_turn),
        "version_start": (batch.turn_version_start, each_turn),
        "version_end": (batch.turn_version_end, each_turn),
    }
    for key, labels in (("birth_time", batch.birth_times_ms), ("task_ids", batch.task_ids)):
        known = [label for label in labels if label is not None]
        if known and len(known) != len(labels):
            raise ValueError(
                f"{key} must be given for all trajectories or for none, "
                f"{batch.ids[labels.index(None)]!r} has none"
            )
        if known:
            fields[key] = sent(np.array(known, np.int64), batch.device), once
    return {
        "keys": set(fields),
        "ids": list(batch.ids),
        "dtypes": {key: values.dtype for key, (values, _) in fields.items()},
        "trailing_shapes": dict.fromkeys(fields, ()),
        "seqlens": {key: of for key, (_, of) in fields.items()},
        "data": {key: values for key, (values, _) in fields.items()},
    }


def _early(batch: PackedBatch, packed: torch.Tensor) -> torch.Tensor:
    """Lay out one token early: without the first column, with a last column of 0."""
    padded = right_padded(batch, packed)
    return torch.cat([padded[:, 1:], torch.zeros_like(padded[:, :1])], 1)
