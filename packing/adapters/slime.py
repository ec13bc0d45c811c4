"""slime: samples as its rollout functions return them, and the lists its trainer is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from trajpack.packing.adapters.row_arrays import reward_for_missing
from trajpack.packing.adapters.row_lists import RowLists
from trajpack.packing.adapters.row_names import row_ids
from trajpack.packing.batch import PackedBatch
from trajpack.packing.conversion import as_number
from trajpack.packing.masked_tokens import MaskedTokens
from trajpack.packing.row_scores import row_scores
from trajpack.packing.types import Trajectory


def to_samples(batch: PackedBatch) -> list[dict[str, Any]]:
    """Return the fields of a ``Sample`` for each sequence, as rollout functions fill them.

    ================== ========= ==========================================================
    field              type      content
    ================== ========= ==========================================================
    tokens             list[int] the sequence
    response_length    int       tokens from the first generated one on; see below
    loss_mask          list[int] of the response; 1 where generated, 0 on observations
    rollout_log_probs  list      of the response, not shifted; 0.0 on observations
    reward             float     sum of the rewards of the sequence's turns
    status             str       "truncated" where its last turn was, else "completed"
    weight_versions    list[str] policy version at the end of each turn
    index              int       the sequence
    group_index        int       the group
    rollout_id         int       the trajectory: sequences of one share it
    ================== ========= ==========================================================

    ``Sample.from_dict`` reads them. Extra field ``routed_experts`` goes as
    ``rollout_routed_experts``, a tensor ``[sequence, *]``. Where nothing was generated the
    response is the last token, masked: slime cannot take one of no tokens. Not carried: which
    turn a reward belongs to, advantages, versions of single tokens, texts.

    Cost: everything is read back to the host, which synchronises a device, and becomes lists.
    """
    rows = RowLists(batch)
    rewards = row_scores(batch).tolist()
    groups = batch.group_ids.tolist()
    # slime slices responses by tokens[-response_length:], which of 0 is all tokens
    rows.spans = [
        (begin, max(end - 1, begin + 1) if split == end else split, end)
        for begin, split, end in rows.spans
    ]
    columns = zip(
        rows.wholes(batch.input_ids),
        rows.responses(batch.loss_mask.int()),
        rows.responses(batch.rollout_logprobs),
        rows.truncated(),
        rows.versions(),
        rows.trajectories,
        strict=True,
    )
    samples: list[dict[str, Any]] = []
    for row, (tokens, mask, logprobs, cut, versions, trajectory) in enumerate(columns):
        samples.append(
            {
                "tokens": tokens,
                "response_length": len(mask),
                "loss_mask": mask,
                "rollout_log_probs": logprobs,
                "reward": rewards[row],
                "status": "truncated" if cut else "completed",
                "weight_versions": [str(version) for version in versions],
                "index": row,
                "group_index": groups[trajectory],
                "rollout_id": trajectory,
            }
        )
    if "routed_experts" in batch.fields:
        pieces = batch.fields["routed_experts"].cpu().split(batch.seqlens)
        for sample, piece in zip(samples, pieces, strict=True):
            sample["rollout_routed_experts"] = piece
    return samples


def to_train_data(
    batch: PackedBatch, *, rewards: torch.Tensor | Sequence[float] | None = None
) -> dict[str, list[Any]]:
    """Return what ``custom_convert_samples_to_train_data_func`` returns: a list for each key.

    ==================== =========== ======================================================
    key                  entry       content
    ==================== =========== ======================================================
    tokens               list[int]   a sequence
    response_lengths     int         tokens from its first generated one on; see `to_samples`
    rewards              float       see ``rewards``
    raw_reward           float       sum of the rewards of the sequence's turns
    truncated            int         1 where its last turn was cut off
    sample_indices       int         the sequence
    rollout_ids          int         the trajectory: sequences of one share it
    loss_masks           list[int]   of the response; 1 where generated, 0 on observations
    rollout_mask_sums    int         generated tokens of all sequences of the trajectory
    rollout_log_probs    list[float] of the response, not shifted; 0.0 on observations
    ==================== =========== ======================================================

    Extra field ``routed_experts`` goes as ``rollout_routed_experts``. slime itself makes
    tensors of them: tokens int64, masks int32, log-probabilities float32. Not carried: which
    turn a reward belongs to, advantages, versions.

    Args:
        batch: In any layout.
        rewards: One for each sequence, as slime's ``rewards`` are: compared within groups
            already, `trajpack.kernels.grpo` for one. As they were given if ``None``.

    Raises:
        ValueError: If there are more or fewer rewards than sequences, or the batch is padded.

    Cost: everything is read back to the host, which synchronises a device, and becomes lists.
    """
    samples = to_samples(batch)
    raw = [sample["reward"] for sample in samples]
    given = raw if rewards is None else [float(reward) for reward in rewards]
    if len(given) != len(samples):
        raise ValueError(
            f"to_train_data: rewards must be {len(samples)}, one a sequence, got {len(given)}"
        )
    sums = [0] * len(batch.ids)
    for sample in samples:
        sums[sample["rollout_id"]] += sum(sample["loss_mask"])
    found: dict[str, list[Any]] = {
        "tokens": [sample["tokens"] for sample in samples],
        "response_lengths": [sample["response_length"] for sample in samples],
        "rewards": given,
        "raw_reward": raw,
        "truncated": [int(sample["status"] == "truncated") for sample in samples],
        "sample_indices": [sample["index"] for sample in samples],
        "rollout_ids": [sample["rollout_id"] for sample in samples],
        "loss_masks": [sample["loss_mask"] for sample in samples],
        "rollout_mask_sums": [sums[sample["rollout_id"]] for sample in samples],
        "rollout_log_probs": [sample["rollout_log_probs"] for sample in samples],
    }
    if "routed_experts" in batch.fields:
        found["rollout_routed_experts"] = [sample["rollout_routed_experts"] for sample in samples]
    return found


def from_samples(
    samples: Iterable[Any],
    ids: Iterable[str] | None = None,
    *,
    missing_reward: float | None = None,
) -> list[Trajectory]:
    """Return the trajectories of ``Sample`` objects, or of dictionaries with their fields.

    A sample is a trajectory: each run of its ``loss_mask`` a turn, with all before it as
    prompt; without a mask all of the response is one turn, and of a sample to be removed
    (``remove_sample``) none of it is trained. The reward goes to the last turn,
    which is truncated if the sample is; groups are the ``group_index``. Versions are those of
    ``weight_versions`` where these are numbers: one for each turn if there are as many, else
    the first and the last for all.

    What is not in it cannot come back: rewards of single turns, turns that generated nothing
    or had no observation between them, versions of single tokens, which samples are one rollout.

    Args:
        samples: Those of a rollout, in order.
        ids: Names of the trajectories; the group and a number if ``None``.
        missing_reward: The reward of a sample whose ``reward`` is missing or ``None``; such a
            sample is refused if ``None``.

    Raises:
        ValueError: If tokens, log-probabilities or a reward are missing, lengths disagree, or the
            reward is no number.
    """
    given = [sample if isinstance(sample, Mapping) else vars(sample) for sample in samples]
    groups = [None if (of := sample.get("group_index")) is None else str(of) for sample in given]
    names = row_ids("from_samples", ids, groups)
    return [
        _trajectory(sample, name, group, missing_reward=missing_reward)
        for sample, name, group in zip(given, names, groups, strict=True)
    ]


def from_train_data(
    train_data: Mapping[str, Sequence[Any]],
    ids: Iterable[str] | None = None,
    *,
    missing_reward: float | None = None,
) -> list[Trajectory]:
    """Return the trajectories of the lists that slime's trainer is given.

    As `from_samples`; rewards are those of ``raw_reward``. There are no groups and no versions.

    Raises:
        ValueError: If a key is missing or lengths disagree.
    """
    keys = {
        "tokens": "tokens",
        "response_length": "response_lengths",
        "loss_mask": "loss_masks",
        "rollout_log_probs": "rollout_log_probs",
        "reward": "raw_reward",
        "status": "truncated",
    }
    missing = [key for key in keys.values() if key not in train_data]
    if missing:
        raise ValueError(f"from_train_data: {missing} are missing, got {sorted(train_data)}")
    counts = {key: len(train_data[key]) for key in keys.values()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"from_train_data: lists must have one length, got {counts}")
    columns = zip(*(train_data[key] for key in keys.values()), strict=True)
    samples = [dict(zip(keys, row, strict=True)) for row in columns]
    for sample in samples:
        sample["status"] = "truncated" if sample["status"] else "completed"
    return from_samples(samples, ids, missing_reward=missing_reward)


def _trajectory(
    sample: Mapping[str, Any], name: str, group: str | None, *, missing_reward: float | None
) -> Trajectory:
    for key in ("tokens", "response_length", "rollout_log_probs"):
        if sample.get(key) is None:
            raise ValueError(f"trajectory {name!r}: {key} are missing")
    tokens, length = sample["tokens"], int(sample["response_length"])
    logprobs, mask = sample["rollout_log_probs"], sample.get("loss_mask")
    if not 0 <= length <= len(tokens):
        raise ValueError(
            f"trajectory {name!r}: response_length must be in [0, {len(tokens)}], got {length}"
        )
    reward = sample.get("reward")
    if reward is None:
        expected, of = "reward (raw_reward in train data)", f"trajectory {name!r}"
        reward = reward_for_missing("from_samples", missing_reward, expected=expected, of=of)
    if isinstance(reward, Mapping):
        raise ValueError(f"trajectory {name!r}: reward must be a number, got {reward!r}")
    if sample.get("remove_sample"):  # slime keeps its reward in the group
        mask = [0] * length
    status = sample.get("status")
    masked = MaskedTokens.of_response(
        tokens[: len(tokens) - length],
        tokens[len(tokens) - length :],
        [1] * length if mask is None else mask,
        logprobs,
        reward=as_number(f"trajectory {name!r}: reward", reward),
        truncated=getattr(status, "value", status) == "truncated",
        name=name,
    )
    return masked.with_turn_versions(_versions(sample)).trajectory(name, group=group)


def _versions(sample: Mapping[str, Any]) -> list[int]:
    """Return the versions of a sample; none where they are no numbers, as ``"default"`` is."""
    versions = [str(version) for version in sample.get("weight_versions") or ()]
    return [int(version) for version in versions] if all(map(str.isdecimal, versions)) else []
