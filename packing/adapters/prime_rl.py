"""prime-rl: its micro-batches, as tensors and as they travel, and its training samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.conversion import host_array
from trajpack.packing.ragged import Ragged, part
from trajpack.packing.rows import layout, reading
from trajpack.packing.types import Trajectory

STREAMS = ("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")
"""Float streams that a batch may have, as extra fields of these names."""
OPTIONAL = {
    "routed_experts": torch.int32,
    "mm_token_type_ids": torch.int64,
    **dict.fromkeys(STREAMS, torch.float32),
}
"""Extra fields with a row for each token, and their dtypes in a tensor micro-batch."""
LEFT_OUT = ("mm_kwargs", "mm_refs", "trace_ids", "branch_indices")
"""Keys of a micro-batch about images and prime-rl's traces, for which a batch has no data."""
REFUSED = ("mm_kwargs", "mm_refs", "payload")
"""Keys of a sample, mostly about images, that a trajectory cannot hold."""
COLUMNS = {"input_ids": "token_ids", "mask": "mask", "logprobs": "logprobs"}
"""Keys that every sample has, by the argument of `turns_of`."""
TRACED = ("routed_experts", "sampling_mask")
"""Extra fields that a message of a trace may have."""


def to_tensor_micro_batch(
    batch: layout.Packed,
    *,
    temperature: float = 1.0,
    env_names: str | Sequence[str] = "",
    num_loras: int = 1,
) -> dict[str, Any]:
    """Return the entries of a ``TensorMicroBatch``, the form in which the trainer uses it.

    All entries are at their own token; the trainer shifts logits. It pads with token 1; a
    micro-batch pads with the token of its `Alignment`. ``temperature`` is for prompts, and for all
    tokens without a field ``temperatures``; ``env_names`` has one for each sequence or is one for
    all; ``num_loras`` is the number of adapters that the trainer runs.

    Raises:
        ValueError: As in all formats, and if there are not as many names as sequences, or a
            sampling mask has another shape.
    """
    op = "to_tensor_micro_batch"
    places, in_memory, kept = layout.memory_of(batch)
    layout.check_fields(op, batch, (*OPTIONAL, "temperatures"))
    lengths = list(in_memory[: max(len(kept), 1)])
    if lengths:  # all padding behind is in the last one
        lengths[-1] += batch.num_tokens - sum(lengths)
    bounds = places[: len(lengths) + 1].long()
    bounds[len(lengths) :] = batch.num_tokens
    starts = accumulate(in_memory, initial=0)
    of_tokens = [""] * batch.num_tokens
    for name, start, length in zip(_env_names(op, batch, env_names), starts, kept, strict=False):
        of_tokens[start : start + length] = [name] * length
    lora_num_tokens = torch.zeros(num_loras, dtype=torch.int32, device=batch.device)
    lora_num_tokens[:1] = batch.num_tokens
    fields, holds = (
        dict.fromkeys((*OPTIONAL, *LEFT_OUT, "sampling_mask")),
        layout.holds_token(batch),
    )
    for name in OPTIONAL.keys() & batch.fields.keys():
        given = batch.fields[name]  # 0 at padding: a weight there would train it
        given = given if name == "routed_experts" else torch.where(holds, given, 0)
        fields[name] = given.to(OPTIONAL[name])[None]
    if "sampling_mask" in batch.fields:
        fields["sampling_mask"] = layout.mask_rows(op, batch)[None]
    return fields | {
        "input_ids": batch.input_ids[None],
        "position_ids": batch.position_ids[None],
        "advantages": layout.advantages_of(op, batch)[None],
        "inference_logprobs": batch.rollout_logprobs[None],
        "loss_mask": batch.loss_mask[None],
        "temperatures": torch.where(holds, _temperatures(batch, temperature), 1.0)[None],
        "env_names": of_tokens,
        "sequence_lengths": lengths,
        "seq_lens": bounds.diff(),
        "lora_num_tokens": lora_num_tokens,
    }


def to_micro_batch(
    batch: layout.Packed, *, temperature: float = 1.0, env_names: str | Sequence[str] = ""
) -> dict[str, Any]:
    """Return the fields of a ``MicroBatch``, the form that is sent: lists of the tensors."""
    found = to_tensor_micro_batch(batch, temperature=temperature, env_names=env_names)
    for name in ("lora_num_tokens", "sampling_mask", *LEFT_OUT):
        del found[name]
    if "routed_experts" in batch.fields:
        found["routed_experts"] = _bytes(batch.fields["routed_experts"])
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            found[name] = (value if name == "seq_lens" else value[0]).tolist()
    if "sampling_mask" in batch.fields:  # not padded to one width
        found["sampling_mask"] = _ids_and_counts(layout.masks_of("to_micro_batch", batch))
    return found


def to_training_samples(
    batch: PackedBatch, *, temperature: float = 1.0, env_names: str | Sequence[str] = ""
) -> list[dict[str, Any]]:
    """Return the fields of a ``TrainingSample`` for each sequence, for prime-rl's own packer.

    Raises:
        TypeError, ValueError: As `to_tensor_micro_batch`, but advantages may be missing.
    """
    op = "to_training_samples"
    layout.check_whole(op, batch)
    layout.check_fields(op, batch, (*OPTIONAL, "temperatures"))
    columns = {
        "token_ids": batch.input_ids,
        "mask": batch.loss_mask,
        "logprobs": batch.rollout_logprobs,
        "temperatures": _temperatures(batch, temperature),
    }
    columns |= {key: batch.fields[key] for key in OPTIONAL if key in batch.fields}
    if batch.advantages is not None:
        columns["advantages"] = batch.advantages
    convert = {"routed_experts": _bytes}
    names = _env_names(op, batch, env_names)
    samples = [
        dict.fromkeys(("advantages", *OPTIONAL))
        | {"env_name": name}
        | {key: convert.get(key, torch.Tensor.tolist)(values) for key, values in of.items()}
        for name, of in zip(names, layout.pieces_of(batch, columns), strict=True)
    ]
    if "sampling_mask" in batch.fields:
        masks, bounds = layout.masks_of(op, batch), pairwise(accumulate(batch.seqlens, initial=0))
        for sample, (begin, end) in zip(samples, bounds, strict=True):
            sample["sampling_mask"] = _ids_and_counts(part(masks, begin, end))
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

    A sample has no name, group, reward, version or truncation, so the first four are arguments:
    ``ids`` are numbers if ``None``, ``rewards`` are for the last turns, ``versions`` are 0 if
    ``None``. Samples with one id in a group, the branches of a trace, are one trajectory, in their
    order; they must have one reward. Advantages are not read. ``fields`` may be per-token lists
    such as ``"temperatures"``, ``"sampling_mask"`` and ``"routed_experts"``; streams that are not
    named are left out.

    Example:
        >>> sample = {"token_ids": [1, 2, 3], "mask": [False, True, True], "logprobs": [0, -1, -2]}
        >>> (trajectory,) = from_training_samples([sample], rewards=[1.0])
        >>> trajectory.turns[0].completion_ids.tolist(), trajectory.turns[0].reward
        ([2, 3], 1.0)
    """
    op, count = "from_training_samples", len(samples)
    given = {
        "ids": map(str, range(count)) if ids is None else ids,
        "groups": groups,
        "rewards": rewards,
        "versions": [0] * count if versions is None else versions,
    }
    names, of_groups, of_rewards, of_versions = (
        reading.labels_of(op, name, labels, count) for name, labels in given.items()
    )
    return reading.joined(
        op,
        reading.rows_by(zip(names, of_groups, strict=True)).items(),
        lambda row, whose: _sample(samples[row], whose, fields, of_versions[row]),
        rewards=of_rewards,
        missing_reward=missing_reward,
        expected="the argument rewards" if rewards is None else "rewards[{}]",
    )


def from_traces(
    traces: Iterable[Any],
    *,
    groups: Sequence[str | None] | None = None,
    fields: Sequence[str] = (),
    missing_reward: float | None = None,
) -> list[Trajectory]:
    """Return the trajectories of traces of verifiers 0.4, as prime-rl makes samples of them.

    A trace is a trajectory of its ``id``: each message with sampled tokens is a turn, whose prompt
    is the path above it, so that a message of several branches is trained once. Its ``reward``
    goes to the last turn; it is missing if none was scored. Groups are the key of the task, or
    else its hash. A branch of a compaction that was not taken up is not trained; traces of agents
    that are not trained, or that sampled nothing, are left out.

    ``fields`` may be ``"routed_experts"`` and ``"sampling_mask"``, as in `from_training_samples`.
    Versions are 0: traces have none. ``groups`` has one for each trace.
    """
    op, traces = "from_traces", list(traces)
    reading.check_known_fields(op, fields, TRACED)
    labels = reading.labels_of(op, "groups", groups, len(traces))
    trajectories = []
    for trace, label in zip(traces, labels, strict=True):
        name, whose = str(trace.id), f"trajectory {trace.id!r}"
        rows = _turns_of_trace(trace, whose, fields) if trace.agent.trainable else []
        if not rows:
            continue
        is_scored = any(reward is not None for reward in trace.rewards.values())
        rows[-1]["reward"] = reading.reward_or_missing(
            op, trace.reward if is_scored else None, missing_reward, expected="rewards", of=whose
        )
        rows[-1]["truncated"] = trace.is_truncated
        task = trace.task.key or trace.task.hash
        trajectories.append(reading.trajectory_of(name, task if groups is None else label, rows))
    return trajectories


def _turns_of_trace(trace: Any, whose: str, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Return the arguments of `turns_of` for each trained message, oldest first."""
    if any(branch.multi_modal_data is not None for branch in trace.branches):
        raise ValueError(f"{whose}: images are there, which are not carried")
    trained = {id(node) for branch in trace.branches if branch.trainable for node in branch.nodes}
    rows, paths = [], list[list[Any]]()
    for node in trace.nodes:
        before = [] if node.parent is None else paths[node.parent]
        paths.append([*before, node])
        if not (node.sampled and any(node.mask) and id(node) in trained):
            continue
        given = {field: getattr(node, field) for field in TRACED}
        reading.check_carried(whose, given, fields=fields, keys={key: key for key in TRACED})
        row = {
            "prompt_ids": [token for above in before for token in above.token_ids],
            "input_ids": node.token_ids,
            "mask": node.mask,
            "logprobs": _spread(whose, node, node.logprobs),
            "fields": {},
        }
        if "routed_experts" in fields:
            routes = [above.routed_experts for above in paths[-1]]
            row["fields"]["routed_experts"] = np.concatenate(routes)
        if "sampling_mask" in fields:
            ids, counts = node.sampling_mask.ids, node.sampling_mask.counts
            counts = _spread(whose, node, counts).astype(np.int32)
            row["fields"]["sampling_mask"] = reading.mask_of_counts(whose, ids, counts)
        rows.append(row)
    return rows


def _spread(whose: str, node: Any, values: Any) -> npt.NDArray[Any]:
    """Return values of a message's sampled tokens at all its tokens, 0 elsewhere."""
    found, mask = np.zeros(len(node.mask)), np.array(node.mask, np.bool_)
    if len(values) != mask.sum():
        raise ValueError(f"{whose}: {len(values)} values are there for {mask.sum()} sampled tokens")
    found[mask] = values
    return found


def _sample(sample: Any, whose: str, fields: Sequence[str], version: int) -> dict[str, Any]:
    """Return arguments of `turns_of` for a sample."""
    keys = {key: key for key in (*COLUMNS.values(), *fields, "sampling_mask")}
    given = {key: _get(sample, key) for key in (*keys, *REFUSED)}
    named = (*COLUMNS.values(), *fields)
    reading.check_carried(whose, given, fields=named, keys=keys, refused=REFUSED)
    mask = given["sampling_mask"]
    if _get(mask, "logprobs") is not None:
        raise ValueError(f"{whose}: logprobs of a sampling_mask are not carried")
    rows = {field: _rows(given[field], field) for field in fields if field != "sampling_mask"}
    if "sampling_mask" in fields:
        rows["sampling_mask"] = reading.mask_of_counts(
            whose, _get(mask, "ids"), _get(mask, "counts")
        )
    found = {name: given[key] for name, key in COLUMNS.items()}
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


def _temperatures(batch: layout.Packed, temperature: float) -> torch.Tensor:
    """Return temperatures, float32 ``[tokens]``; prompts do not get the field's fill."""
    field = batch.fields.get("temperatures")
    given = torch.full((batch.num_tokens,), temperature, device=batch.device)
    return given if field is None else torch.where(batch.turn_ids >= 0, field.float(), given)


def _env_names(op: str, batch: layout.Packed, env_names: str | Sequence[str]) -> list[str]:
    count = len(layout.memory_of(batch).kept)
    names = [env_names] * count if isinstance(env_names, str) else list(env_names)
    if len(names) != count:
        raise ValueError(f"{op}: env_names must be of {count} sequences, got {len(names)}")
    return names


def _bytes(experts: torch.Tensor) -> dict[str, Any]:
    rows = experts.detach().cpu().contiguous()
    dtype = str(rows.dtype).removeprefix("torch.")
    return {"data": rows.numpy().tobytes(), "shape": list(rows.shape), "dtype": dtype}


def _ids_and_counts(masks: Ragged) -> dict[str, bytes]:
    """Return sampling masks as bytes of int32."""
    counts = np.diff(masks.cu).astype(np.int32)
    return {"ids": masks.values.tobytes(), "counts": counts.tobytes()}
