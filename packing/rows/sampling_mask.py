"""Sampling masks: the token ids that top-p and top-k left to sample from, which trainers replay.

In a batch they are the ragged field ``sampling_mask`` of integers, in memory ids without padding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trajpack.packing.conversion import host_array
from trajpack.packing.ragged import Ragged
from trajpack.packing.rows.packed import Packed

Ids = npt.NDArray[np.int32]


def masks_of(op: str, batch: Packed) -> Ragged:
    """Return the ids of all tokens, int32 arrays on the host; none where nothing was generated.

    Raises a `ValueError` if the field is not ragged, or holds no integers. Cost: a copy to the host
    (synchronises).
    """
    if "sampling_mask" not in batch.ragged_values:
        wanted = 'TokenField("sampling_mask", torch.int32, ragged=True)'
        raise ValueError(f"{op}: sampling_mask must be a ragged field: {wanted}")
    cu, values = batch.values_of_tokens("sampling_mask")
    if values.ndim != 1 or values.is_floating_point():
        raise ValueError(
            f"{op}: sampling_mask must hold integers without further dimensions, "
            f"got {values.dtype} and shape {list(values.shape[1:])}"
        )
    bounds = cu.cpu().numpy()
    return Ragged(bounds, values[: int(bounds[-1])].int().cpu().numpy())


def padded(masks: Ragged) -> Ids:
    """Return masks as ``[tokens, longest]``, -1 behind the last id of a token."""
    counts = np.diff(masks.cu)
    rows = np.full((len(counts), int(counts.max(initial=1))), -1, np.int32)
    rows[np.arange(rows.shape[1]) < counts[:, None]] = masks.values
    return rows


def unpadded(rows: Any) -> Ragged:
    """Return masks of `padded`."""
    array = host_array(rows, np.int32)
    known = array != -1
    return Ragged(np.append(0, known.sum(1)).cumsum(), array[known])


def ids_and_counts(masks: Ragged) -> dict[str, bytes]:
    """Return masks of `masks_of` as bytes of int32."""
    counts = np.diff(masks.cu).astype(np.int32)
    return {"ids": masks.values.tobytes(), "counts": counts.tobytes()}


def masks_from_counts(name: str, ids: Any, counts: Ids) -> Ragged:
    """Return the masks of a trajectory; raises a `ValueError` if counts do not add up to ids."""
    ids = as_integers(ids)
    if (counts < 0).any() or counts.sum() != len(ids):
        raise ValueError(
            f"trajectory {name!r}: sampling mask has {len(ids)} tokens, but counts of "
            f"{counts.sum()}"
        )
    return Ragged(np.append(0, counts).cumsum(dtype=np.int64), ids)


def as_integers(values: Any) -> Ids:
    """Return numbers, or the int32 numbers in a ``bytes`` object, as an int32 array."""
    return host_array(
        np.frombuffer(values, np.int32) if isinstance(values, bytes) else values, np.int32
    )
