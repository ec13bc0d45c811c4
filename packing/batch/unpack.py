"""`unpack`: packed batch to trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.ragged import Ragged, part, ragged_rows
from trajpack.packing.turn_fields import TURN_FIELDS
from trajpack.packing.types import Trajectory, Turn, VersionSpan

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.tree.entries import BatchEntries


def unpack(batch: PackedBatch) -> list[Trajectory]:
    """Return the packed trajectories, equal in every value, in their order.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> trajectories = [Trajectory("a", [Turn([1, 2], [3], [-0.5], reward=1.0)])]
        >>> pack(trajectories).unpack() == trajectories
        True
    """
    first = batch.cu_seqlens[batch.turn_sequence.long()]
    places = torch.cat([first[:, None], batch.turn_begin[:, None], batch.turn_spans], 1)
    ragged = {name: ragged_rows(batch, name) for name in batch.ragged_values}
    return trajectories_of(batch, batch.input_ids, places, {**batch.fields, **ragged})


def trajectories_of(
    tokens: PackedBatch | BatchEntries,
    input_ids: torch.Tensor,
    places: torch.Tensor,
    fields: Mapping[str, torch.Tensor | Ragged],
) -> list[Trajectory]:
    """Return trajectories from their turns, and the tokens of their sequences.

    Args:
        tokens: Tensors over generated tokens, turns and trajectories.
        input_ids: Token ids of the sequences.
        places: ``[turns, 4]``: where in ``input_ids`` the sequence of each turn begins, where its
            new tokens and its completion begin, and where both end.
        fields: Rows of extra fields: of those for generated tokens alone over ``tokens``, of all
            others over ``input_ids``.
    """
    ids = input_ids.int().cpu().numpy()
    host = {name: tensor.detach().cpu().numpy() for name, tensor in tokens.tensors().items()}
    logprobs = host["rollout_logprobs"].copy()  # on the host a view of the batch
    copies = {
        name: Ragged(*map(_host_copy, rows)) if isinstance(rows, Ragged) else _host_copy(rows)
        for name, rows in fields.items()
    }
    turns = list[Turn]()
    for turn, (first, new, begin, end) in enumerate(places.tolist()):
        low, high = host["turn_spans"][turn].tolist()
        rows = {
            field.name: part(copies[field.name], low, high)
            if field.generated_only
            else copies[field.name][new if field.new_only else first : end]
            for field in tokens.token_fields
        }
        turns.append(
            Turn(
                prompt_ids=ids[first:begin],
                completion_ids=ids[begin:end],
                completion_logprobs=logprobs[low:high],
                version_spans=_spans(host["policy_versions"][low:high]),
                fields=rows or None,
                **{one.attribute: one.value(host[one.name][turn].item()) for one in TURN_FIELDS},
            )
        )
    return [
        Trajectory(
            id=tokens.ids[index],
            turns=turns[begin:end],
            group=tokens.groups[index],
            turn_discount=tokens.turn_discounts[index],
            task_id=tokens.task_ids[index],
            birth_time_ms=tokens.birth_times_ms[index],
            truncated=tokens.truncated_as_given[index],
        )
        for index, (begin, end) in enumerate(pairwise(host["cu_turns"].tolist()))
    ]


def _host_copy(field: torch.Tensor) -> Any:
    """Return a copy of a field: a numpy array, or a tensor if numpy lacks the dtype."""
    copied = field.detach().cpu().clone()
    try:
        return copied.numpy()
    except TypeError:  # bfloat16 and narrower floats
        return copied


def _spans(versions: npt.NDArray[np.int32]) -> list[VersionSpan] | None:
    """Return the spans of equal version, or ``None`` if there is only one."""
    changes = np.flatnonzero(np.diff(versions)) + 1
    if not changes.size:
        return None
    bounds = [0, *changes.tolist(), len(versions)]
    return [VersionSpan(int(versions[start]), start, end) for start, end in pairwise(bounds)]
