"""prime-rl: its micro-batches, as tensors and as they travel, and its training samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.conversion import host_array
from trajpack.packing.ragged import part
from trajpack.packing.rows import reading
from trajpack.packing.rows.masked_tokens import joined_trajectory
from trajpack.packing.rows.packed import (
    Packed,
    advantages_of,
    check_not_ragged,
    check_sequences,
    check_whole,
    holds_token,
    lengths_in_memory,
    num_kept_of,
    pieces_of,
    places_of,
)
from trajpack.packing.rows.sampling_mask import (
    ids_and_counts,
    mask_of_counts,
    mask_rows,
    masks_of,
)
from trajpack.packing.types import Trajectory

STREAMS = ("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")
"""Float streams that a batch may have, as extra fields of these names."""
READ = ("routed_experts", "temperatures", "mm_token_type_ids", *STREAMS)
"""Extra fields that have a row for each token."""
LEFT_OUT = ("mm_kwargs", "mm_refs", "trace_ids", "branch_indices")
"""Keys of a micro-batch about images and prime-rl's traces, for which a batch has no data."""
REFUSED = ("mm_kwargs", "mm_refs", "payload")
"""Keys of a sample, mostly about images, that a trajectory cannot hold."""
NEEDED = ("token_ids", "mask", "logprobs")
"""Keys that every sample has."""


def to_tensor_micro_batch(
    batch: Packed,
    *,
    temperature: float = 1.0,
    env_names: str | Sequence[str] = "",
    num_loras: int = 1,
) -> dict[str, Any]:
    """Return the entries of a ``TensorMicroBatch``, the form in which the trainer uses it.

    Keys, dtypes and shapes are those of ``docs/formats/prime_rl.md``.

    All entries are at their own token; the trainer shifts logits. It pads with token 1; a
    micro-batch pads with the token of its `Alignment`. ``temperature`` is for prompts, and for all
    tokens without a field ``temperatures``; ``env_names`` has one for each sequence or is one for
    all; ``num_loras`` is the number of adapters that the trainer runs.

    Raises:
        ValueError: As in all formats, and if there are not as many names as sequences, or a
            sampling mask has another shape.
    """
    op = "to_tensor_micro_batch"
    check_sequences(batch)
    check_not_ragged(op, batch, READ)
    lengths = list(lengths_in_memory(batch)[: max(len(num_kept_of(batch)), 1)])
    if lengths:  # all padding behind is in the last one
        lengths[-1] += batch.num_tokens - sum(lengths)
    bounds = places_of(batch)[: len(lengths) + 1].long()
    bounds[len(lengths) :] = batch.num_tokens
    starts, kept = accumulate(lengths_in_memory(batch), initial=0), num_kept_of(batch)
    of_tokens = [""] * batch.num_tokens
    for name, start, length in zip(_env_names(op, batch, env_names), starts, kept, strict=False):
        of_tokens[start : start + length] = [name] * length
    lora_num_tokens = torch.zeros(num_loras, dtype=torch.int32, device=batch.device)
    lora_num_tokens[:1] = batch.num_tokens
    temperatures = _temperatures(batch, temperature)
    experts = batch.fields.get("routed_experts")
    has_mask = "sampling_mask" in batch.fields
    return {
        "input_ids": batch.input_ids[None],
        "position_ids": batch.position_ids[None],
        "advantages": advantages_of(op, batch)[None],
        "inference_logprobs": batch.rollout_logprobs[None],
        "loss_mask": batch.loss_mask[None],
        "temperatures": torch.where(holds_token(batch), temperatures, 1.0)[None],
        "env_names": of_tokens,
        "sequence_lengths": lengths,
        "seq_lens": bounds.diff(),
        "lora_num_tokens": lora_num_tokens,
        "routed_experts": None if experts is None else experts.int()[None],
        **dict.fromkeys(LEFT_OUT),
        "sampling_mask": mask_rows(op, batch)[None] if has_mask else None,
        "mm_token_type_ids": _stream(batch, "mm_token_type_ids", torch.int64),
        **{name: _stream(batch, name, torch.float32) for name in STREAMS},
    }


def to_micro_batch(
    batch: Packed, *, temperature: float = 1.0, env_names: str | Sequence[str] = ""
) -> dict[str, Any]:
    """Return the fields of a ``MicroBatch``, the form that is sent: lists of the tensors.

    ``routed_experts`` is a dictionary of bytes, shape and the dtype's name. ``sampling_mask``, with
    that field only, is a dictionary of bytes: ``ids`` of all tokens and their ``counts``, int32.
    Without ``lora_num_tokens``, which the receiver counts.
    """
    found = to_tensor_micro_batch(batch, temperature=temperature, env_names=env_names)
    for name in ("lora_num_tokens", *LEFT_OUT):
        del found[name]
    mask = found.pop("sampling_mask")  # of one width
    if "routed_experts" in batch.fields:
        found["routed_experts"] = _bytes(batch.fields["routed_experts"])
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            found[name] = (value if name == "seq_lens" else value[0]).tolist()
    if mask is None:
        return found
    return found | {"sampling_mask": ids_and_counts(masks_of("to_micro_batch", batch))}


def to_training_samples(
    batch: PackedBatch, *, temperature: float = 1.0, env_names: str | Sequence[str] = ""
) -> list[dict[str, Any]]:
    """Return the fields of a ``TrainingSample`` for each sequence, for prime-rl's own packer.

    Keys, dtypes and shapes are those of ``docs/formats/prime_rl.md``.

    Raises:
        TypeError, ValueError: As `to_tensor_micro_batch`, but advantages may be missing.
    """
    op = "to_training_samples"
    check_whole(op, batch)
    check_not_ragged(op, batch, READ)
    columns = {
        "token_ids": batch.input_ids,
        "mask": batch.loss_mask,
        "logprobs": batch.rollout_logprobs,
        "temperatures": _temperatures(batch, temperature),
    }
    optional = ("advantages", "routed_experts", "mm_token_type_ids", *STREAMS)
    columns |= {key: batch.fields[key] for key in optional if key in batch.fields}
    if batch.advantages is not None:
        columns["advantages"] = batch.advantages
    convert = {"routed_experts": _bytes}
    names = _env_names(op, batch, env_names)
    samples = [
        dict.fromkeys(optional)
        | {"env_name": name}
        | {key: convert.get(key, torch.Tensor.tolist)(values) for key, values in of.items()}
        for name, of in zip(names, pieces_of(batch, columns), strict=True)
    ]
    if "sampling_mask" in batch.fields:
        masks, bounds = masks_of(op, batch), pairwise(accumulate(batch.seqlens, initial=0))
        for sample, (begin, end) in zip(samples, bounds, strict=True):
            sample["sampling_mask"] = ids_and_counts(part(masks, begin, end))
    return samples


def from_training_samples(
    samples: Sequence[Any],
    *,
    ids: Sequence[str] | None = None,
    groups: Sequence[str | None] | None = None,
    rewards: Sequence[float | None] | None = None,
    versions: Sequence[int] | None = None,
    fields: Sequence[str] = (),
    missing_reward: float | None = None,
) -> list[Trajectory]:
    """Return the trajectories of ``TrainingSample``, or of objects or mappings with its fields.

    Packed in layout ``"merged"``, tokens, mask and log-probabilities are those of the samples. A
    sample has no name, group, reward, version or truncation, so the first four are arguments:
    ``ids`` are numbers if ``None``, ``rewards`` are for the last turns, ``versions`` are those that
    sampled, 0 if ``None``. Samples with one id in a group, the branches of a trace, are one
    trajectory, in their order; they must have one reward. Advantages are not read.

    ``fields`` may be per-token lists such as ``"temperatures"`` and ``"sampling_mask"``, which is
    ragged, for generated tokens, and ``"routed_experts"``, for prompt and completion: declare the
    `TokenField` with ``generated_only=False``. Streams that are not named are left out.

    Example:
        >>> sample = {"token_ids": [1, 2, 3], "mask": [False, True, True], "logprobs": [0, -1, -2]}
        >>> (trajectory,) = from_training_samples([sample], rewards=[1.0])
        >>> trajectory.turns[0].completion_ids.tolist(), trajectory.turns[0].reward
        ([2, 3], 1.0)
    """
    op, count = "from_training_samples", len(samples)
    names = reading.labels_of(op, "ids", map(str, range(count)) if ids is None else ids, count)
    of_groups = reading.labels_of(op, "groups", groups, count)
    of_rewards = reading.labels_of(op, "rewards", rewards, count)
    of_versions = reading.labels_of(
        op, "versions", [0] * count if versions is None else versions, count
    )
    traces: dict[tuple[str, str | None], list[int]] = {}
    for index, key in enumerate(zip(names, of_groups, strict=True)):
        traces.setdefault(key, []).append(index)
    trajectories = []
    for (name, group), own in traces.items():
        reward = reading.shared_reward(
            op,
            [of_rewards[index] for index in own],
            missing_reward,
            expected="the argument rewards" if rewards is None else f"rewards[{own[-1]}]",
            of=f"trajectory {name!r}",
        )
        rows = [_sample(samples[index], name, fields, of_versions[index]) for index in own]
        rows[-1]["reward"] = reward
        trajectories.append(joined_trajectory(name, group, rows))
    return trajectories


def _sample(sample: Any, name: str, fields: Sequence[str], version: int) -> dict[str, Any]:
    """Return arguments of `masked_trajectory` for a sample."""
    whose, keys = f"trajectory {name!r}", {key: key for key in (*NEEDED, *fields, "sampling_mask")}
    given = {key: _get(sample, key) for key in (*keys, *REFUSED)}
    reading.check_carried(whose, given, fields=(*NEEDED, *fields), keys=keys, refused=REFUSED)
    mask = given["sampling_mask"]
    if _get(mask, "logprobs") is not None:
        raise ValueError(f"{whose}: logprobs of a sampling_mask are not carried")
    rows = {field: _rows(given[field], field) for field in fields if field != "sampling_mask"}
    if "sampling_mask" in fields:
        rows["sampling_mask"] = mask_of_counts(name, _get(mask, "ids"), _get(mask, "counts"))
    columns = {"input_ids": "token_ids", "mask": "mask", "logprobs": "logprobs"}
    found = {name: given[key] for name, key in columns.items()}
    return found | {"fields": rows, "version_range": (version, version)}


def _get(row: Any, name: str) -> Any:
    """Return a value of an object or a mapping, ``None`` if it has none."""
    return row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)


def _rows(values: Any, field: str) -> Any:
    """Return a field as an array with a row for each token."""
    if field != "routed_experts":
        return host_array(values)
    data, dtype, shape = (_get(values, key) for key in ("data", "dtype", "shape"))
    return np.frombuffer(data, dtype).reshape(shape)


def _temperatures(batch: Packed, temperature: float) -> torch.Tensor:
    """Return temperatures, float32 ``[tokens]``; prompts do not get the field's fill."""
    field = batch.fields.get("temperatures")
    given = torch.full((batch.num_tokens,), temperature, device=batch.device)
    return given if field is None else torch.where(batch.turn_ids >= 0, field.float(), given)


def _stream(batch: Packed, name: str, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a field, 0 at padding: a weight there would train it."""
    field = batch.fields.get(name)
    return None if field is None else torch.where(holds_token(batch), field, 0).to(dtype)[None]


def _env_names(op: str, batch: Packed, env_names: str | Sequence[str]) -> list[str]:
    count = len(num_kept_of(batch))
    names = [env_names] * count if isinstance(env_names, str) else list(env_names)
    if len(names) != count:
        raise ValueError(f"{op}: env_names must be of {count} sequences, got {len(names)}")
    return names


def _bytes(experts: torch.Tensor) -> dict[str, Any]:
    rows = experts.detach().cpu().contiguous()
    dtype = str(rows.dtype).removeprefix("torch.")
    return {"data": rows.numpy().tobytes(), "shape": list(rows.shape), "dtype": dtype}
