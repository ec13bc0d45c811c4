"""Sampling masks: the token ids that top-p and top-k left to sample from, which trainers replay.

In a batch they are the field ``sampling_mask``, integers of a ragged `TokenField`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.conversion import host_array
from trajpack.packing.ragged import Ragged, ragged_rows
from trajpack.packing.rows.packed import Packed


def masks_of(op: str, batch: Packed) -> Ragged:
    """Return the ids of all tokens as int32 arrays on the host (synchronises).

    Raises a `ValueError` if the field is not ragged, or holds no integers.
    """
    if "sampling_mask" not in batch.ragged_values:
        raise ValueError(f"{op}: sampling_mask must be a field with ragged=True, got padded rows")
    values = ragged_rows(batch, "sampling_mask").values
    if values.ndim != 1 or values.is_floating_point():
        raise ValueError(
            f"{op}: sampling_mask must hold integers without further dimensions, "
            f"got {values.dtype} and shape {list(values.shape[1:])}"
        )
    counts = batch.fields["sampling_mask"][:, 1].cpu().numpy()
    cu = np.append(0, counts).cumsum(dtype=np.int32)
    return Ragged(cu, values[: int(cu[-1])].int().cpu().numpy())


def mask_rows(op: str, batch: Packed) -> torch.Tensor:
    """Return the ids of `masks_of` as int32 rows ``[tokens, K]``, -1 behind the last id of each."""
    cu, ids = masks_of(op, batch)
    counts = np.diff(cu)
    rows = np.full((len(counts), counts.max(initial=1)), -1, np.int32)
    rows[np.arange(rows.shape[1]) < counts[:, None]] = ids
    return torch.from_numpy(rows).to(batch.device)


def without_padding(rows: npt.NDArray[Any]) -> Ragged:
    """Return the ids of ``rows``, ``[tokens, K]`` with -1 where there is none."""
    known = rows != -1
    return Ragged(np.append(0, known.sum(1)).cumsum(dtype=np.int32), rows[known])


def ids_and_counts(masks: Ragged) -> dict[str, bytes]:
    """Return masks of `masks_of` as bytes of int32."""
    counts = np.diff(masks.cu).astype(np.int32)
    return {"ids": masks.values.tobytes(), "counts": counts.tobytes()}


def mask_of_counts(name: str, ids: Any, counts: Any) -> Ragged:
    """Return the mask of a trajectory, from the ids of all tokens and the number of each token's.

    Both are numbers, or ``bytes`` of int32. Raises a `ValueError` if counts do not add up to the
    ids.
    """
    ids, counts = as_integers(ids), as_integers(counts)
    if (counts < 0).any() or counts.sum() != len(ids):
        raise ValueError(
            f"trajectory {name!r}: sampling mask has {len(ids)} tokens, but counts of "
            f"{counts.sum()}"
        )
    return Ragged(np.append(0, counts).cumsum(dtype=np.int64), ids)


def as_integers(values: Any) -> npt.NDArray[np.int32]:
    """Return numbers, or the int32 numbers in a ``bytes`` object, as an int32 array."""
    return host_array(
        np.frombuffer(values, np.int32) if isinstance(values, bytes) else values, np.int32
    )
