"""What verl's padded ``DataProto`` brings, on the host and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from trajpack.packing.rows.arrays import check_shapes, host_arrays

NEEDED = ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs")
"""Tensors of which no rollout can do without."""
LABELS = ("uid", "min_global_steps", "max_global_steps")
"""Labels of rows that are read."""


def proto_arrays(proto: Any) -> tuple[list[npt.NDArray[Any]], dict[str, Any]]:
    """Return the arrays of a proto or of its dictionary, `NEEDED` and scores; and its labels.

    Raises:
        TypeError: If it is neither.
        ValueError: If something is missing or of another shape.
    """
    tensors, labels = _parts(proto)
    names = ("token_level_scores", "rm_scores")
    scores = [key for key in names if tensors.get(key) is not None][:1]
    arrays = host_arrays("from_data_proto", tensors, NEEDED, scores)
    num_rows, num_prompt = (*arrays["prompts"].shape, 0, 0)[:2]
    num_response = (*arrays["responses"].shape, 0, 0)[1]
    widths = dict.fromkeys([*NEEDED, *scores], num_response)
    widths |= {"prompts": num_prompt, "attention_mask": num_prompt + num_response}
    check_shapes("from_data_proto", arrays, {key: (num_rows, of) for key, of in widths.items()})
    found = {key: labels[key] for key in LABELS if labels.get(key) is not None}
    for key, values in found.items():
        if len(values) != num_rows:
            raise ValueError(
                f"from_data_proto: {key} must be {num_rows}, one a row, got {len(values)}"
            )
    return list(arrays.values()), found


def version_range(labels: Mapping[str, Any], row: int | None = None) -> tuple[int, int]:
    """Return the first and last policy version that labels name, of a row where they are many."""
    steps = (labels.get("min_global_steps"), labels.get("max_global_steps"))
    first, last = (of if of is None or row is None else of[row] for of in steps)
    return (0, 0) if first is None or last is None else (int(first), int(last))


def _parts(proto: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    if isinstance(proto, Mapping) and "tensors" in proto:
        tensors, labels = proto["tensors"], proto.get("non_tensors")
    elif hasattr(proto, "non_tensor_batch"):
        tensors, labels = getattr(proto, "batch", None), proto.non_tensor_batch
    else:
        raise TypeError(
            "from_data_proto: proto must be a padded DataProto or its dictionary, "
            f"got {type(proto).__name__}"
        )
    if tensors is None:
        raise ValueError(f"from_data_proto: the proto's batch is None, expected {[*NEEDED]}")
    return dict(tensors.items()), labels or {}
