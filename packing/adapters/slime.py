"""slime: samples as its rollout functions return them, and the lists its trainer is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.conversion import host_array
from trajpack.packing.ragged import part
from trajpack.packing.rows import layout, reading
from trajpack.packing.types import Trajectory

FIELD_KEYS = {
    "routed_experts": "rollout_routed_experts",
    "teacher_log_probs": "teacher_log_probs",
    "sampling_mask": "rollout_top_p_token_ids",
}
"""slime's names of extra fields."""
OPTIONAL = (*FIELD_KEYS.values(), "rollout_top_p_token_offsets")
"""Keys of samples and of train data for extra fields."""
IMAGES = ("multimodal_inputs", "multimodal_train_inputs")
"""Keys of samples for images, which no trajectory can hold."""
TRAIN_KEYS = {
    "tokens": "tokens",
    "response_lengths": "response_length",
    "loss_masks": "loss_mask",
    "rollout_log_probs": "rollout_log_probs",
    "raw_reward": "reward",
    "sample_indices": "index",
    "rollout_ids": "rollout_id",
}
"""Keys of train data by the key of a sample."""
FROM_TASK = ("prompt", "label", "index", "group_index", "metadata", "session_id", "rollout_id")
"""Keys of a sample that slime filled before its rollout function was called."""


def to_samples(batch: PackedBatch, *, like: Any = None) -> list[dict[str, Any]]:
    """Return the fields of a ``Sample`` for each sequence, as rollout functions fill them.

    ``Sample.from_dict`` reads them. Extra fields of the names in ``FIELD_KEYS`` are carried; routes
    are without the last token's, which no engine forwards: declare ``routed_experts`` with
    ``generated_only=False``. Where nothing was generated the response is the last token, masked:
    slime takes no empty one. Not carried: rewards of single turns, advantages, versions of single
    tokens, texts.

    ``like`` is the sample that a rollout function was called with, an object or a mapping: all have
    its task, index and group (``FROM_TASK``, where they are there), so that the trajectories of a
    batch must be those of one sample. Its ``rollout_id``, or else its ``index``, is that of all.
    """
    op = "to_samples"
    rows = layout.RowLists(op, batch)
    # slime slices responses by tokens[-response_length:], which for 0 gives all tokens
    rows.spans = [
        (begin, max(end - 1, begin + 1) if split == end else split, end)
        for begin, split, end in rows.spans
    ]
    layout.check_fields(op, batch, ["routed_experts", "teacher_log_probs"])
    ids, versions = batch.input_ids.tolist(), batch.turn_version_end.tolist()
    groups = batch.group_ids.tolist()
    columns: dict[str, list[Any]] = {
        "tokens": [ids[begin:end] for begin, _, end in rows.spans],
        "response_length": [end - split for _, split, end in rows.spans],
        "loss_mask": rows.responses(batch.loss_mask.int()),
        "rollout_log_probs": rows.responses(batch.rollout_logprobs),
        "reward": layout.row_scores(batch).tolist(),
        "status": ["truncated" if cut else "completed" for cut in rows.truncated],
        "weight_versions": [[str(versions[turn]) for turn in turns] for turns in rows.turns],
        "index": list(range(len(batch))),
        "group_index": [groups[trajectory] for trajectory in rows.trajectories],
        "rollout_id": rows.trajectories,
    }
    if "routed_experts" in batch.fields:
        routes = batch.fields["routed_experts"].cpu()
        columns["rollout_routed_experts"] = [routes[b : end - 1] for b, _, end in rows.spans]
    if "teacher_log_probs" in batch.fields:
        columns["teacher_log_probs"] = rows.responses(batch.fields["teacher_log_probs"])
    if "sampling_mask" in batch.fields:
        every = layout.masks_of(op, batch)
        masks = [part(every, split, end) for _, split, end in rows.spans]
        for key, name in zip(OPTIONAL[-2:], ("values", "cu"), strict=True):
            columns[key] = [torch.from_numpy(getattr(mask, name)) for mask in masks]
    task = {} if like is None else _task_of(batch, like)
    return [
        dict(zip(columns, row, strict=True)) | task for row in zip(*columns.values(), strict=True)
    ]


def _task_of(batch: PackedBatch, like: Any) -> dict[str, Any]:
    """Return what the samples of a batch have of the sample that they are made of."""
    if len(batch.ids) != 1:
        raise ValueError(
            f"to_samples: with like= the batch must be of one trajectory, got {len(batch.ids)}"
        )
    given = reading.fields_of("to_samples: like", like)
    task = {key: given[key] for key in FROM_TASK if given.get(key) is not None}
    task.setdefault("rollout_id", task.get("index", 0))
    return task


def to_train_data(
    batch: PackedBatch,
    *,
    rewards: torch.Tensor | Sequence[float] | None = None,
    source_names: str | Sequence[str] = "unknown",
) -> dict[str, list[Any]]:
    """Return the result of ``custom_convert_samples_to_train_data_func``: a list for each key.

    Extra fields as in `to_samples`. ``rewards`` has one for each trajectory, already compared
    within groups as slime's ``rewards`` are, for example by `trajpack.kernels.group_advantages`;
    ``source_names`` has one for each sequence or is one for all. Other numbers of them are a
    `ValueError`.
    """
    op, samples = "to_train_data", to_samples(batch)
    found = {key: [sample[of] for sample in samples] for key, of in TRAIN_KEYS.items()}
    found["rewards"] = found["raw_reward"]
    if rewards is not None:
        given = reading.labels_of(op, "rewards", rewards, len(batch.ids), of="trajectory")
        found["rewards"] = [float(given[rollout]) for rollout in found["rollout_ids"]]
    if isinstance(source_names, str):
        source_names = [source_names] * len(samples)
    found["source_names"] = reading.labels_of(op, "source_names", source_names, len(samples))
    found["truncated"] = [int(sample["status"] == "truncated") for sample in samples]
    sums: Counter[int] = Counter()
    for sample in samples:
        sums[sample["rollout_id"]] += sum(sample["loss_mask"])
    found["rollout_mask_sums"] = [sums[rollout] for rollout in found["rollout_ids"]]
    optional = [key for key in OPTIONAL if samples and key in samples[0]]
    return found | {key: [sample[key] for sample in samples] for key in optional}


def from_samples(
    samples: Iterable[Any],
    ids: Iterable[str] | None = None,
    *,
    fields: Sequence[str] = (),
    missing_reward: float | None = None,
) -> list[Trajectory]:
    """Return the trajectories of ``Sample`` objects, or of dictionaries with their fields.

    Samples with one ``rollout_id`` in a group are one trajectory, in their order, else each is one;
    ``ids`` has a name for each trajectory. They must have one reward, which goes to the last turn.
    Without a ``loss_mask`` the response is one turn; of a sample to be removed nothing is trained.
    Versions are ``weight_versions`` if these are numbers: one for each turn if there are as many,
    else the least and greatest for all. Lost in the format: rewards of single turns, versions of
    single tokens. ``fields`` may be those of ``FIELD_KEYS``.

    Raises:
        ValueError: As in all formats; also for a sample that was aborted, failed or is pending,
            unless it is to be removed, and for samples of one rollout with different rewards.
    """
    op = "from_samples"
    reading.check_known_fields(op, fields, FIELD_KEYS)
    given = [
        reading.fields_of(f"{op}: samples[{index}]", sample) for index, sample in enumerate(samples)
    ]
    rollouts = reading.rows_by(
        (sample.get("group_index"), sample["rollout_id"])
        if sample.get("rollout_id") is not None
        else index
        for index, sample in enumerate(given)
    )
    groups = [given[own[0]].get("group_index") for own in rollouts.values()]
    groups = [None if group is None else str(group) for group in groups]
    owners = zip(reading.row_ids(op, ids, groups), groups, strict=True)
    return reading.joined(
        op,
        zip(owners, rollouts.values(), strict=True),
        lambda row, whose: _sample(given[row], whose, fields),
        rewards=[sample.get("reward") for sample in given],
        missing_reward=missing_reward,
        expected="reward",
    )


def _sample(sample: Mapping[str, Any], whose: str, fields: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `turns_of` for a sample."""
    reading.check_carried(whose, sample, fields=fields, keys=FIELD_KEYS, refused=IMAGES)
    for key in ("tokens", "response_length", "rollout_log_probs"):
        if sample.get(key) is None:
            raise ValueError(f"{whose}: {key} are missing")
    tokens, length = sample["tokens"], int(sample["response_length"])
    if not 0 <= length <= len(tokens):
        raise ValueError(f"{whose}: response_length must be in [0, {len(tokens)}], got {length}")
    status = getattr(sample.get("status"), "value", sample.get("status"))
    mask = sample.get("loss_mask")
    if sample.get("remove_sample"):  # slime keeps its reward in the group
        mask = [0] * length
    elif status not in (None, "completed", "truncated"):
        raise ValueError(f"{whose}: status must be 'completed' or 'truncated', got {status!r}")
    rows: dict[str, Any] = {field: host_array(sample[FIELD_KEYS[field]]) for field in fields}
    if "sampling_mask" in rows:
        counts = np.diff(reading.as_integers(sample["rollout_top_p_token_offsets"]))
        rows["sampling_mask"] = reading.mask_of_counts(
            whose, sample["rollout_top_p_token_ids"], counts
        )
    if "routed_experts" in rows:
        rows["routed_experts"] = reading.routes_of_all(whose, rows["routed_experts"], len(tokens))
    versions = [str(version) for version in sample.get("weight_versions") or ()]
    numbered = all(map(str.isdecimal, versions))  # they may be such as "default"
    return {
        "prompt_ids": tokens[: len(tokens) - length],
        "input_ids": tokens[len(tokens) - length :],
        "mask": [1] * length if mask is None else mask,
        "logprobs": sample["rollout_log_probs"],
        "truncated": status not in (None, "completed"),
        "turn_versions": [int(version) for version in versions] if numbered else (),
        "fields": rows,
    }
