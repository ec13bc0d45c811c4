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
from trajpack.packing.rows import layout, reading
from trajpack.packing.types import Trajectory

EARLY = frozenset({"values", "ref_logp", "prox_logp", "teacher_logp"})
"""Extra fields that AReaL takes from a forward pass: entry ``j`` belongs to token ``j + 1``."""
NEEDED = ("input_ids", "attention_mask", "loss_mask", "logprobs")
"""Keys that every padded dictionary has."""
COLUMNS = {"loss_mask": "mask"}
"""Arguments of `turns_of` that have another name there."""


def to_padded_dict(
    batch: PackedBatch, *, pad_token_id: int = 0, rewards: layout.Score = "returns"
) -> dict[str, torch.Tensor]:
    """Return the dictionary of a ``RolloutWorkflow``: a row for each sequence, right-padded.

    Entry ``j`` belongs to token ``j``, of the fields in ``EARLY`` to token ``j + 1``. Layout
    ``"turns"`` is AReaL's export ``"individual"``, ``"merged"`` is ``"concat"``. Only its
    turn-level GAE reads ``turn_ids``.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> turn = Turn([1, 2], [3], [-0.5], reward=1.0, version_start=4, version_end=4)
        >>> to_padded_dict(pack([Trajectory("a", [turn])]))["versions"]
        tensor([[-1, -1,  4]], dtype=torch.int32)
    """
    op = "to_padded_dict"
    layout.check_whole(op, batch)
    rows = layout.right_padded(batch)
    found = {
        "input_ids": rows.of(batch.input_ids.int(), pad_token_id),
        "attention_mask": rows.of(layout.ones_of(batch, torch.bool)),
        "loss_mask": rows.of(batch.loss_mask.int()),
        "logprobs": rows.of(batch.rollout_logprobs),
        "versions": rows.of(batch.policy_versions),
        "turn_ids": rows.of(_turns_in_rows(batch), -1),
        "rewards": layout.row_scores(batch, rewards),
    }
    layout.check_fields(op, batch, keys=found)
    early = layout.right_padded(batch, skip=1)
    for name, values in batch.fields.items():
        found[name] = (early if name in EARLY else rows).of(values)
    return found


def to_update_dict(
    batch: PackedBatch, *, pad_token_id: int = 0, rewards: layout.Score = "returns"
) -> dict[str, torch.Tensor]:
    """Return the input of ``PPOActor.ppo_update``: the padded dictionary with advantages.

    What AReaL's ``compute_advantages`` changes or adds is float32 ``[B, S]`` and one token early:
    entry ``j`` belongs to token ``j + 1``, and the last column is 0.
    """
    advantages = layout.advantages_of("to_update_dict", batch)
    found = to_padded_dict(batch, pad_token_id=pad_token_id, rewards=rewards)
    layout.check_fields("to_update_dict", batch, (), ("advantages", "tot_rewards", "kl_rewards"))
    columns = {
        "loss_mask": batch.loss_mask.float(),
        "logprobs": batch.rollout_logprobs,
        "advantages": advantages,
        "returns": batch.returns,
        "tot_rewards": layout.token_scores(batch),
    }
    early = layout.right_padded(batch, skip=1)
    found |= {key: early.of(packed) for key, packed in columns.items()}
    found.setdefault("prox_logp", found["logprobs"].clone())
    return found | {"kl_rewards": torch.zeros_like(found["logprobs"])}


def from_padded_dict(
    dicts: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    ids: Iterable[str] | None = None,
    groups: Iterable[str] | None = None,
    *,
    missing_reward: float | None = None,
) -> list[Trajectory]:
    """Return the trajectories of a padded dictionary or of several, one for each row.

    Turns are told apart by ``turn_ids`` if present; the row's reward goes to the last one. Lost:
    rewards of single turns, the discount, truncation, groups. Dictionaries after
    ``compute_advantages`` are shifted and cannot be read.

    Raises:
        TypeError: If a dictionary is none, such as the ``None`` of a rejected episode.
        ValueError: As in all formats.
    """
    op = "from_padded_dict"
    if isinstance(dicts, Mapping) or not isinstance(dicts, Iterable):
        named = {op: dicts}
    else:
        named = {f"{op}: dicts[{index}]": padded for index, padded in enumerate(dicts)}
    rows = [row for name in named for row in _rows(name, named[name], missing_reward)]
    labels = reading.labels_of(op, "groups", groups, len(rows))
    names = reading.row_ids(op, ids, labels)
    return [
        reading.trajectory_of(name, group, [row])
        for row, name, group in zip(rows, names, labels, strict=True)
    ]


def _rows(op: str, padded: Any, missing_reward: float | None) -> list[dict[str, Any]]:
    """Return the arguments of `turns_of` for each row of a dictionary."""
    if not isinstance(padded, Mapping):
        raise TypeError(f"{op}: expected a dictionary of tensors, got {type(padded).__name__}")
    arrays = reading.host_arrays(op, padded, NEEDED, ("versions", "turn_ids", "rewards"))
    shape = arrays["input_ids"].shape
    reading.check_shapes(op, arrays, dict.fromkeys(arrays, shape) | {"rewards": shape[:1]})
    rewards = arrays.pop("rewards", None)
    columns = {COLUMNS.get(key, key): key for key in arrays.keys() - {"attention_mask"}}
    rows = reading.stretches(arrays, columns, arrays["attention_mask"])
    for index, row in enumerate(rows):
        reward, of = (None, "") if rewards is None else (rewards[index], f"row {index}")
        row["reward"] = reading.reward_or_missing(
            op, reward, missing_reward, expected="rewards [B]", of=of
        )
    return rows


def to_sequence_sample(batch: PackedBatch) -> dict[str, Any]:
    """Return the keyword arguments of a ``SequenceSample`` that holds a batch in layout "turns".

    One batch element for each trajectory, in it one sequence for each turn.

    Raises:
        ValueError: If the batch is in another layout, an id occurs twice, or only some
            trajectories have a birth time or a task id.
    """
    layout.check_whole("to_sequence_sample", batch)
    if batch.layout != "turns":
        raise ValueError(f"to_sequence_sample needs layout 'turns', got {batch.layout!r}")
    repeated = sorted(name for name, count in Counter(batch.ids).items() if count > 1)
    if repeated:
        raise ValueError(f"ids must differ within a SequenceSample, repeated: {repeated}")
    turns = [slice(begin, end) for begin, end in pairwise(batch.cu_turns.tolist())]
    lengths = [list(batch.seqlens[of]) for of in turns]
    once, each_turn = [[1] for _ in turns], [[1] * len(of) for of in lengths]
    starts, ends = list(accumulate(batch.seqlens, initial=0)), batch.turn_spans[:, 0].tolist()
    prompts = [slice(starts[of.start], ends[of.start]) for of in turns]
    fields: dict[str, tuple[torch.Tensor, list[list[int]]]] = {
        "packed_input_ids": (batch.input_ids, lengths),
        "prompt_mask": (batch.prompt_mask, lengths),
        # without the first entry of each sequence: entry j belongs to token j + 1
        "packed_logprobs": (
            batch.rollout_logprobs[batch.position_ids > 0],
            [[length - 1 for length in of] for of in lengths],
        ),
        "packed_prompts": (
            torch.cat([batch.input_ids[:0], *(batch.input_ids[of] for of in prompts)]),
            [[of.stop - of.start] for of in prompts],
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
        if all(label is None for label in labels):
            continue
        if None in labels:
            raise ValueError(
                f"{key} must be given for all trajectories or for none, "
                f"{batch.ids[labels.index(None)]!r} has none"
            )
        fields[key] = sent(np.array(labels, np.int64), batch.device), once
    return {
        "keys": set(fields),
        "ids": list(batch.ids),
        "dtypes": {key: values.dtype for key, (values, _) in fields.items()},
        "trailing_shapes": dict.fromkeys(fields, ()),
        "seqlens": {key: of for key, (_, of) in fields.items()},
        "data": {key: values for key, (values, _) in fields.items()},
    }


def _turns_in_rows(batch: PackedBatch) -> torch.Tensor:
    """Return the number of each token's turn in its row, of turns that generated any; else -1."""
    sequence, order = batch.turn_sequence.sort(stable=True)
    generates = (batch.turn_spans.diff(dim=1)[order, 0] > 0).int()
    before = generates.cumsum(0, dtype=torch.int32) - generates
    number = before.new_empty(batch.num_turns + 1)
    number[order] = before - before[torch.searchsorted(sequence, sequence)]
    number[-1:] = -1  # which the turn id -1 reads
    return number[batch.turn_ids.long()]
