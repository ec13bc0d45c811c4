"""slime: samples as its rollout functions return them, and the lists its trainer is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.conversion import host_array
from trajpack.packing.rows.arrays import fields_of, reward_or_missing, routes_of_all
from trajpack.packing.rows.lists import RowLists
from trajpack.packing.rows.masked_tokens import MaskedTokens
from trajpack.packing.rows.names import row_ids
from trajpack.packing.rows.sampling_mask import (
    RaggedMask,
    as_integers,
    mask_rows,
    padded,
    ragged,
    widest,
)
from trajpack.packing.rows.scores import row_scores
from trajpack.packing.types import Trajectory

OPTIONAL = (
    *("rollout_routed_experts", "teacher_log_probs"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
)
"""What samples have of extra fields."""
SAMPLE_KEYS = {
    "routed_experts": "rollout_routed_experts",
    "teacher_log_probs": "teacher_log_probs",
    "sampling_mask": "rollout_top_p_token_ids",
}
"""Where a sample has an extra field."""
IMAGES = ("multimodal_inputs", "multimodal_train_inputs")
"""What a sample has of images, which no trajectory can have."""


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

    ``Sample.from_dict`` reads them. Extra fields of these names go along:

    - ``routed_experts`` as ``rollout_routed_experts``, a tensor ``[L - 1, layers, k]``: of L tokens
      no engine forwards the last. Declare the field with ``generated_only=False``.
    - ``teacher_log_probs``, list[float] of the response.
    - ``sampling_mask`` as ``rollout_top_p_token_ids``, an int32 tensor of all tokens of the
      response's masks, and ``rollout_top_p_token_offsets``, int32 ``[response_length + 1]``.

    Where nothing was generated the response is the last token, masked: slime cannot take one of
    no tokens. Not carried: which turn a reward belongs to, advantages, versions of single tokens,
    texts.

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
    for name, column in _optional(batch, rows).items():
        for sample, of in zip(samples, column, strict=True):
            sample[name] = of
    return samples


def to_train_data(
    batch: PackedBatch,
    *,
    rewards: torch.Tensor | Sequence[float] | None = None,
    source_names: str | Sequence[str] = "unknown",
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
    source_names         str         see ``source_names``
    ==================== =========== ======================================================

    Extra fields go along as in `to_samples`. slime itself makes
    tensors of them: tokens int64, masks int32, log-probabilities float32. Not carried: which
    turn a reward belongs to, advantages, versions.

    Args:
        batch: In any layout.
        rewards: One for each sequence, as slime's ``rewards`` are: compared within groups
            already, `trajpack.kernels.grpo` for one. As they were given if ``None``.
        source_names: Where each sequence comes from, for slime's logs, or one for all.

    Raises:
        ValueError: If there are more or fewer rewards or names than sequences, or the batch is
            padded.

    Cost: everything is read back to the host, which synchronises a device, and becomes lists.
    """
    samples = to_samples(batch)
    raw = [sample["reward"] for sample in samples]
    given = raw if rewards is None else [float(reward) for reward in rewards]
    if len(given) != len(samples):
        raise ValueError(
            f"to_train_data: rewards must be {len(samples)}, one a sequence, got {len(given)}"
        )
    one = isinstance(source_names, str)
    sources = [source_names] * len(samples) if one else list(source_names)
    if len(sources) != len(samples):
        raise ValueError(
            f"to_train_data: source_names must be {len(samples)}, one a sequence, "
            f"got {len(sources)}"
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
        "source_names": sources,
    }
    for name in OPTIONAL:
        if samples and name in samples[0]:
            found[name] = [sample[name] for sample in samples]
    return found


def from_samples(
    samples: Iterable[Any],
    ids: Iterable[str] | None = None,
    *,
    fields: Sequence[str] = (),
    sampling_mask_width: int | None = None,
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
        fields: What turns take over as `Turn.fields`: ``"teacher_log_probs"``; ``"sampling_mask"``
            (of the top-p tokens); ``"routed_experts"`` (rows of prompt and completion, experts 0,
            1, 2, ... at the last token; declare the `TokenField` with ``generated_only=False``).
            Routes are left out where they are not named.
        sampling_mask_width: Tokens that a row of ``"sampling_mask"`` holds; as many as the longest
            of these samples has if ``None``.
        missing_reward: The reward of a sample whose ``reward`` is missing or ``None``; such a
            sample is refused if ``None``.

    Raises:
        ValueError: If tokens, log-probabilities or a reward are missing, lengths disagree, or the
            reward is no number; if one of ``fields`` is missing or another name, or a sample has
            images, or teacher's log-probabilities or top-p tokens that ``fields`` does not name.
    """
    unknown = sorted(set(fields) - {"routed_experts", "sampling_mask", "teacher_log_probs"})
    if unknown:
        raise ValueError(
            "from_samples: fields must be of routed_experts, sampling_mask, teacher_log_probs, "
            f"got {unknown}"
        )
    given = [
        fields_of(f"from_samples: samples[{index}]", sample) for index, sample in enumerate(samples)
    ]
    groups = [None if (of := sample.get("group_index")) is None else str(of) for sample in given]
    names = row_ids("from_samples", ids, groups)
    for sample, name in zip(given, names, strict=True):
        _check_carried(sample, name, fields)
    masks = [_mask(sample) for sample in given] if "sampling_mask" in fields else []
    width = widest(masks, sampling_mask_width)
    found = []
    for number, (sample, name, group) in enumerate(zip(given, names, groups, strict=True)):
        rows = {field: host_array(sample[SAMPLE_KEYS[field]]) for field in fields}
        if masks:
            rows["sampling_mask"] = padded(f"trajectory {name!r}", masks[number], width)
        found.append(_trajectory(sample, name, group, fields=rows, missing_reward=missing_reward))
    return found


def from_train_data(
    train_data: Mapping[str, Sequence[Any]],
    ids: Iterable[str] | None = None,
    **options: Any,
) -> list[Trajectory]:
    """Return the trajectories of the lists that slime's trainer is given.

    As `from_samples`; rewards are those of ``raw_reward``. There are no groups and no versions.

    Args:
        train_data: A list for each key.
        ids: Names of the trajectories; their numbers if ``None``.
        options: ``fields``, ``sampling_mask_width`` and ``missing_reward``, as in `from_samples`;
            the last also where all of ``raw_reward`` is missing.

    Raises:
        ValueError: If a key or a reward is missing or lengths disagree.
    """
    keys = {
        "tokens": "tokens",
        "response_length": "response_lengths",
        "loss_mask": "loss_masks",
        "rollout_log_probs": "rollout_log_probs",
        "status": "truncated",
    }
    there = {key for key, column in train_data.items() if column is not None}
    keys |= {key: key for key in (*OPTIONAL, *IMAGES) if key in there}
    keys |= {"reward": "raw_reward"} if "raw_reward" in there else {}
    missing = [key for key in keys.values() if key not in there]
    if missing:
        raise ValueError(f"from_train_data: {missing} are missing, got {sorted(there)}")
    counts = {key: len(train_data[key]) for key in keys.values()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"from_train_data: lists must have one length, got {counts}")
    columns = zip(*(train_data[key] for key in keys.values()), strict=True)
    samples = [dict(zip(keys, row, strict=True)) for row in columns]
    for sample in samples:
        sample["status"] = "truncated" if sample["status"] else "completed"
    return from_samples(samples, ids, **options)


def _optional(batch: PackedBatch, rows: RowLists) -> dict[str, list[Any]]:
    """Return what samples have of extra fields, an entry for each sequence."""
    found: dict[str, list[Any]] = {}
    if "routed_experts" in batch.fields:
        routes = batch.fields["routed_experts"].cpu()
        found["rollout_routed_experts"] = [routes[begin : end - 1] for begin, _, end in rows.spans]
    if "teacher_log_probs" in batch.fields:
        found["teacher_log_probs"] = rows.responses(batch.fields["teacher_log_probs"])
    if "sampling_mask" in batch.fields:
        every = mask_rows("to_samples", batch).cpu()
        masks = [ragged(every[split:end]) for _, split, end in rows.spans]
        found["rollout_top_p_token_ids"] = [torch.from_numpy(mask.ids) for mask in masks]
        found["rollout_top_p_token_offsets"] = [
            torch.from_numpy(np.cumsum([0, *mask.counts], dtype=np.int32)) for mask in masks
        ]
    return found


def _check_carried(sample: Mapping[str, Any], name: str, fields: Sequence[str]) -> None:
    """Raise where a sample has what its loss needs, and trajectories are not to have."""
    for key in IMAGES:
        if sample.get(key):
            raise ValueError(f"trajectory {name!r}: {key} are there, which are not carried")
    for field, key in SAMPLE_KEYS.items():
        there = sample.get(key) is not None
        if field in fields and not there:
            raise ValueError(f"trajectory {name!r}: {key} are missing")
        if there and field not in (*fields, "routed_experts"):
            raise ValueError(
                f"trajectory {name!r}: {key} are there: name {field} in fields, or take them out"
            )


def _mask(sample: Mapping[str, Any]) -> RaggedMask:
    offsets = as_integers(sample["rollout_top_p_token_offsets"])
    return RaggedMask(as_integers(sample["rollout_top_p_token_ids"]), np.diff(offsets))


def _trajectory(
    sample: Mapping[str, Any],
    name: str,
    group: str | None,
    *,
    fields: dict[str, Any],
    missing_reward: float | None,
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
    reward = reward_or_missing(
        "from_samples", sample.get("reward"), missing_reward,
        expected="reward (raw_reward in train data)", of=f"trajectory {name!r}",
    )  # fmt: skip
    if isinstance(reward, Mapping):
        raise ValueError(f"trajectory {name!r}: reward must be a number, got {reward!r}")
    if sample.get("remove_sample"):  # slime keeps its reward in the group
        mask = [0] * length
    if "routed_experts" in fields:
        routes = routes_of_all(f"trajectory {name!r}", fields["routed_experts"], len(tokens))
        fields = fields | {"routed_experts": routes}
    status = sample.get("status")
    masked = MaskedTokens.of_response(
        tokens[: len(tokens) - length],
        tokens[len(tokens) - length :],
        [1] * length if mask is None else mask,
        logprobs,
        reward=reward,
        truncated=getattr(status, "value", status) == "truncated",
        fields=fields,
        name=name,
    )
    return masked.with_turn_versions(_versions(sample)).trajectory(name, group=group)


def _versions(sample: Mapping[str, Any]) -> list[int]:
    """Return the versions of a sample; none where they are no numbers, as ``"default"`` is."""
    versions = [str(version) for version in sample.get("weight_versions") or ()]
    return [int(version) for version in versions] if all(map(str.isdecimal, versions)) else []
