"""AReaL: the padded dictionary of its workflows and trainers, and its legacy ``SequenceSample``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch

from trajpack.kernels.rearrange.pad import pad
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.rows.arrays import check_shapes, host_arrays, reward_or_missing
from trajpack.packing.rows.masked_tokens import MaskedTokens
from trajpack.packing.rows.names import check_field_names, given_groups, row_ids
from trajpack.packing.rows.scores import Score, row_scores, token_scores
from trajpack.packing.types import Trajectory

EARLY = frozenset({"values", "ref_logp", "prox_logp", "teacher_logp"})
"""Extra fields that AReaL has from a model's forward: entry ``j`` belongs to token ``j + 1``."""


def to_padded_dict(
    batch: PackedBatch, *, pad_token_id: int = 0, rewards: Score = "returns"
) -> dict[str, torch.Tensor]:
    """Return what a ``RolloutWorkflow`` returns: a row for each sequence, padded on the right.

    ``B`` rows of ``S`` tokens, as many as the longest sequence has. Entry ``j`` belongs to
    token ``j``; in extra fields that AReaL has from a model (`EARLY`) to token ``j + 1``.

    ================ ======= ========= ====================================================
    key              dtype   shape     content, and what stands at padding
    ================ ======= ========= ====================================================
    input_ids        int32   [B, S]    tokens; pad_token_id
    attention_mask   bool    [B, S]    True where there is a token; False
    loss_mask        int32   [B, S]    1 where generated; 0
    logprobs         float32 [B, S]    0 where not generated; 0
    versions         int32   [B, S]    of the policy, -1 where not generated; 0
    turn_ids         int32   [B, S]    turn within its trajectory, -1 where not generated; -1
    rewards          float32 [B]       see ``rewards``
    each extra field its own [B, S, *] 0
    ================ ======= ========= ====================================================

    ``turn_ids`` is read by AReaL's turn-level GAE alone; releases without it ignore the key.
    Not carried: which row belongs to which trajectory and group, rewards of single turns in a
    row of several, which turns were truncated. AReaL tells groups by their place in the batch.

    Args:
        batch: In layout ``"turns"`` for AReaL's export ``"individual"``, in ``"merged"`` for
            ``"concat"``.
        pad_token_id: What stands at padding of token ids.
        rewards: ``"returns"``: that of the row's first turn, discounted; ``"rewards"``: the sum
            over the row's turns, not discounted.

    Raises:
        ValueError: If the batch is padded, ``rewards`` is neither, or an extra field is named as
            another key.

    Cost: a launch for each key and some over the turns. No synchronisation.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> turn = Turn([1, 2], [3], [-0.5], reward=1.0, version_start=4, version_end=4)
        >>> to_padded_dict(pack([Trajectory("a", [turn])]))["versions"]
        tensor([[-1, -1,  4]], dtype=torch.int32)
    """
    batch.check_unpadded()
    packed = {
        "loss_mask": batch.loss_mask.int(),
        "logprobs": batch.rollout_logprobs,
        "versions": batch.policy_versions,
    }
    there = torch.ones_like(batch.loss_mask)
    found = {
        "input_ids": _padded(batch, batch.input_ids.int(), pad_token_id),
        "attention_mask": _padded(batch, there, False),
        "turn_ids": _padded(batch, _turns_of_trajectories(batch), -1),
        "rewards": row_scores(batch, rewards),
    }
    found |= {key: _padded(batch, values, 0) for key, values in packed.items()}
    check_field_names("to_padded_dict", batch, found)
    for name, values in batch.fields.items():
        found[name] = (_early if name in EARLY else _padded)(batch, values, 0)
    return found


def to_update_dict(
    batch: PackedBatch, *, pad_token_id: int = 0, rewards: Score = "returns"
) -> dict[str, torch.Tensor]:
    """Return what ``PPOActor.ppo_update`` takes: the padded dictionary with advantages.

    As `to_padded_dict`, with what AReaL's ``compute_advantages`` changes and adds, all float32
    ``[B, S]`` and shifted: entry ``j`` belongs to token ``j + 1``, and the last column is 0.
    ``versions`` and extra fields are as in `to_padded_dict`, as in AReaL.

    ==================== ===============================================================
    key                  content
    ==================== ===============================================================
    loss_mask, logprobs  as before, shifted
    prox_logp            extra field of that name, else the rollout's log-probabilities
    advantages, returns  of the batch
    tot_rewards          each turn's reward at its last token
    kl_rewards           0
    ==================== ===============================================================

    Raises:
        ValueError: If the batch has no advantages, and as `to_padded_dict`.

    Cost: as `to_padded_dict`, and a copy of each shifted key.
    """
    if batch.advantages is None:
        raise ValueError("to_update_dict: the batch has no advantages, call with_advantages first")
    found = to_padded_dict(batch, pad_token_id=pad_token_id, rewards=rewards)
    check_field_names("to_update_dict", batch, ("advantages", "tot_rewards", "kl_rewards"))
    for key, values in (
        ("loss_mask", batch.loss_mask.float()),
        ("logprobs", batch.rollout_logprobs),
        ("advantages", batch.advantages),
        ("returns", batch.returns),
        ("tot_rewards", token_scores(batch)),
    ):
        found[key] = _early(batch, values, 0)
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
    """Return the trajectories of padded dictionaries, as workflows return them.

    A row is a trajectory: each run of its ``loss_mask`` a turn, or each turn of ``turn_ids``
    if it has that, with all before it as prompt. Log-probabilities and versions are those of
    the tokens; the row's reward goes to its last turn.

    What is not in it cannot come back: rewards of single turns, the discount, turns that
    generated nothing, truncation, groups. A dictionary that went through
    ``compute_advantages`` is shifted, and is not what this reads.

    Args:
        dicts: A dictionary of ``B`` rows, or several.
        ids: Names of the trajectories; their group and a number if ``None``.
        groups: Their groups; none if ``None``.
        missing_reward: The reward of each row of a dictionary without ``rewards``, and of each row
            whose own is ``None``; such a dictionary is refused if ``None``.

    Raises:
        TypeError: If a dictionary is none, such as the ``None`` of a rejected episode.
        ValueError: If a key or a reward is missing, a reward is not finite, shapes disagree, or a
            row's first token was generated.

    Cost: copies the tensors to the host, which synchronises a device.
    """
    op = "from_padded_dict"
    if isinstance(dicts, Mapping) or not isinstance(dicts, Iterable):
        rows = _rows(op, dicts, missing_reward)
    else:
        rows = [
            row
            for index, one in enumerate(dicts)
            for row in _rows(f"{op}: dicts[{index}]", one, missing_reward)
        ]
    of = given_groups("from_padded_dict", groups, len(rows))
    names = row_ids("from_padded_dict", ids, of)
    return [
        row.trajectory(name, group=group) for row, name, group in zip(rows, names, of, strict=True)
    ]


def to_sequence_sample(batch: PackedBatch) -> dict[str, Any]:
    """Return the keyword arguments of a ``SequenceSample`` that holds the batch.

    One batch element for each trajectory, in it one sequence for each turn:

    ================== ======= ================ =============================================
    key                dtype   length           content
    ================== ======= ================ =============================================
    packed_input_ids   int64   L, each turn     prompt and completion
    prompt_mask        bool    L, each turn     True on the prompt
    packed_logprobs    float32 L - 1, each turn entry j belongs to token j + 1; 0 on prompts
    seq_no_eos_mask    bool    1, each turn     True where no end of sequence was sampled
    rewards            float32 1, each turn     discounted backward over the turns
    version_start      int32   1, each turn     policy version of the first sampled token
    version_end        int32   1, each turn     policy version of the last sampled token
    packed_prompts     int64   once             the first turn's prompt
    birth_time         int64   once             milliseconds since the epoch, if all have one
    task_ids           int64   once             kind of task, if all have one
    ================== ======= ================ =============================================

    Not carried: groups, per-token versions, undiscounted rewards.

    Args:
        batch: In layout ``"turns"``.

    Returns:
        ``keys, ids, dtypes, trailing_shapes, seqlens, data``; tensors on the batch's device.

    Raises:
        ValueError: If the batch is in another layout or padded, an id occurs twice, or only some
            trajectories have a birth time or a task id.

    Cost: reads the turn tables back to the host, which synchronises a device; one gather.
    """
    batch.check_unpadded()
    if batch.layout != "turns":
        raise ValueError(f"to_sequence_sample needs layout 'turns', got {batch.layout!r}")
    repeated = sorted(name for name, count in Counter(batch.ids).items() if count > 1)
    if repeated:
        raise ValueError(f"ids must differ within a SequenceSample, repeated: {repeated}")
    bounds = batch.cu_turns.tolist()
    turns = [slice(begin, end) for begin, end in pairwise(bounds)]
    lengths = [list(batch.seqlens[of]) for of in turns]
    starts = list(accumulate(batch.seqlens, initial=0))
    completions = batch.turn_spans[:, 0].tolist()
    prompts = [batch.input_ids[starts[of.start] : completions[of.start]] for of in turns]
    fields: dict[str, tuple[torch.Tensor, list[list[int]]]] = {
        "packed_input_ids": (batch.input_ids, lengths),
        "prompt_mask": (batch.prompt_mask, lengths),
        "packed_logprobs": (_shifted_logprobs(batch), [[n - 1 for n in of] for of in lengths]),
        "packed_prompts": (_concatenated(batch, prompts), [[len(prompt)] for prompt in prompts]),
    }
    for key, values in (
        ("seq_no_eos_mask", batch.turn_truncated),
        ("rewards", batch.turn_returns),
        ("version_start", batch.turn_version_start),
        ("version_end", batch.turn_version_end),
    ):
        fields[key] = values, [[1] * len(of) for of in lengths]
    for key, labels in (("birth_time", batch.birth_times_ms), ("task_ids", batch.task_ids)):
        column = _labels(batch, key, labels)
        if column is not None:
            fields[key] = column, [[1] for _ in lengths]
    return {
        "keys": set(fields),
        "ids": list(batch.ids),
        "dtypes": {key: values.dtype for key, (values, _) in fields.items()},
        "trailing_shapes": dict.fromkeys(fields, ()),
        "seqlens": {key: of for key, (_, of) in fields.items()},
        "data": {key: values for key, (values, _) in fields.items()},
    }


def _shifted_logprobs(batch: PackedBatch) -> torch.Tensor:
    """Drop each sequence's first entry, so that entry j belongs to token j + 1."""
    kept = batch.num_tokens - len(batch)
    sequence = torch.repeat_interleave(batch.cu_seqlens.diff() - 1, output_size=kept)
    index = torch.arange(1, kept + 1, device=batch.device) + sequence
    return batch.rollout_logprobs[index]


def _concatenated(batch: PackedBatch, pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(pieces) if pieces else batch.input_ids[:0]


def _labels(batch: PackedBatch, key: str, labels: tuple[int | None, ...]) -> torch.Tensor | None:
    present = [label for label in labels if label is not None]
    if not present:
        return None
    if len(present) != len(labels):
        missing = batch.ids[labels.index(None)]
        raise ValueError(
            f"{key} must be given for all trajectories or for none, {missing!r} has none"
        )
    return torch.tensor(present, dtype=torch.int64, device=batch.device)


def _padded(batch: PackedBatch, packed: torch.Tensor, value: float) -> torch.Tensor:
    return pad(packed, batch.cu_seqlens, batch.max_seqlen, value=value)


def _early(batch: PackedBatch, packed: torch.Tensor, value: float) -> torch.Tensor:
    """Lay out one token early: without the first, and with a last entry of padding."""
    padded = _padded(batch, packed, value)
    return torch.cat([padded[:, 1:], torch.full_like(padded[:, :1], value)], 1)


def _turns_of_trajectories(batch: PackedBatch) -> torch.Tensor:
    """Return each token's turn, counted from its trajectory's first, or -1."""
    turns = torch.arange(batch.num_turns, device=batch.device)
    trajectory = torch.searchsorted(batch.cu_turns[1:].long(), turns, right=True)
    within = (turns - batch.cu_turns[trajectory]).int()
    within = torch.cat([within, within.new_full((1,), -1)])  # where an index of -1 leads
    return within[batch.turn_ids.long()]


def _rows(op: str, padded: Any, missing_reward: float | None) -> list[MaskedTokens]:
    if not isinstance(padded, Mapping):
        raise TypeError(f"{op}: expected a dictionary of tensors, got {type(padded).__name__}")
    needed = ("input_ids", "attention_mask", "loss_mask", "logprobs")
    optional = ("versions", "turn_ids", "rewards")
    arrays = host_arrays(op, padded, needed, optional)
    shape = arrays["input_ids"].shape
    expected = dict.fromkeys((*needed, "versions", "turn_ids"), shape)
    check_shapes(op, arrays, expected | {"rewards": shape[:1]})
    rewards, there = arrays.pop("rewards", None), arrays.pop("attention_mask") != 0
    found = []
    for row, of in enumerate(there):
        ids, mask, logprobs, *rest = (values[row][of] for values in arrays.values())
        names = [*arrays][3:]
        given = dict(zip(names, rest, strict=True))
        reward = reward_or_missing(
            op, None if rewards is None else rewards[row], missing_reward,
            expected="rewards [B]", of="" if rewards is None else f"row {row}",
        )  # fmt: skip
        found.append(MaskedTokens(ids, mask, logprobs, reward=reward, **given))
    return found
