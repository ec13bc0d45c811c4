"""`unpack`: packed batch to trajectories."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.ragged import Ragged, part
from trajpack.packing.turn_fields import TURN_FIELDS
from trajpack.packing.types import Trajectory, Turn, VersionSpan


def unpack(batch: PackedBatch) -> list[Trajectory]:
    """Return the trajectories of a batch: the inverse of `trajpack.pack`, bit for bit.

    In every layout a turn's prompt is the tokens of its sequence before its completion.

    Args:
        batch: Batch as it was packed; a micro-batch is none.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> trajectories = [Trajectory("a", [Turn([1, 2], [3], [-0.5], reward=1.0)])]
        >>> unpack(pack(trajectories)) == trajectories
        True
    """
    host = {name: tensor.detach().cpu().numpy() for name, tensor in batch.tensors().items()}
    ids = host["input_ids"].astype(np.int32)
    host["rollout_logprobs"] = host["rollout_logprobs"].copy()  # on the host a view of the batch
    fields: dict[str, Any] = {
        name: Ragged(*map(_host_copy, batch.values_of_tokens(name)))
        if name in batch.ragged_values
        else _host_copy(field)
        for name, field in batch.fields.items()
    }
    turns = [
        dataclasses.replace(turn, fields=_rows(batch, fields, host, index)) if fields else turn
        for index in range(int(host["cu_turns"][len(batch.ids)]))  # without padding turns
        for turn in (_turn(host, ids, index),)
    ]
    bounds = host["cu_turns"].tolist()[: len(batch.ids) + 1]
    return [
        Trajectory(
            id=batch.ids[index],
            turns=turns[begin:end],
            group=batch.groups[index],
            turn_discount=batch.turn_discounts[index],
            task_id=batch.task_ids[index],
            birth_time_ms=batch.birth_times_ms[index],
            truncated=batch.truncated_as_given[index],
        )
        for index, (begin, end) in enumerate(pairwise(bounds))
    ]


def _turn(host: dict[str, npt.NDArray[Any]], ids: npt.NDArray[np.int32], turn: int) -> Turn:
    start = int(host["cu_seqlens"][host["turn_sequence"][turn]])
    begin, end = host["turn_spans"][turn].tolist()
    return Turn(
        prompt_ids=ids[start:begin],
        completion_ids=ids[begin:end],
        completion_logprobs=host["rollout_logprobs"][begin:end],
        version_spans=_spans(host["policy_versions"][begin:end]),
        **{one.attribute: one.value(host[one.name][turn].item()) for one in TURN_FIELDS},
    )


def _host_copy(field: torch.Tensor) -> Any:
    """Return a copy of a field: a numpy array, or a tensor if numpy lacks the dtype."""
    copied = field.detach().cpu().clone()
    try:
        return copied.numpy()
    except TypeError:  # bfloat16 and narrower floats
        return copied


def _rows(
    batch: PackedBatch, fields: Mapping[str, Any], host: dict[str, npt.NDArray[Any]], turn: int
) -> dict[str, Any]:
    start = int(host["cu_seqlens"][host["turn_sequence"][turn]])
    begin, end = host["turn_spans"][turn].tolist()
    return {
        field.name: part(fields[field.name], begin if field.generated_only else start, end)
        for field in batch.token_fields
    }


def _spans(versions: npt.NDArray[np.int32]) -> list[VersionSpan] | None:
    """Return the spans of equal version, or ``None`` if there is only one."""
    changes = np.flatnonzero(np.diff(versions)) + 1
    if not changes.size:
        return None
    bounds = [0, *changes.tolist(), len(versions)]
    return [VersionSpan(int(versions[start]), start, end) for start, end in pairwise(bounds)]
