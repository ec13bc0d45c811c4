"""Sampling masks: the token ids that top-p and top-k left to sample from, which trainers replay.

In a batch they are the field ``sampling_mask``: integers of a ragged `TokenField`, or of one of
shape ``(K,)`` with ``fill=-1``: the ids, then -1. Trainers have one of these two forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.conversion import host_array
from trajpack.packing.ragged import Ragged
from trajpack.packing.rows.packed import Packed

IdsAndCounts: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""Ids of all tokens, and the number of ids of each token; 0 where nothing is known."""
Width: TypeAlias = int | Literal["ragged"] | None
"""Columns of masks that are read: as many as the longest needs if ``None``; or `Ragged`."""


def mask_rows(op: str, batch: Packed) -> torch.Tensor:
    """Return the field ``sampling_mask``, int32 ``[tokens, K]``; -1 where nothing was generated.

    Raises a `ValueError` if it holds no integers, or has not one dimension per token. Cost: a
    ragged field is laid out on the host (synchronises).
    """
    if "sampling_mask" in batch.ragged_values:
        cu, ids = masks_of(op, batch)
        counts = np.diff(cu)
        rows = _padded(ids, counts, int(counts.max(initial=1)))
        return torch.from_numpy(rows).to(batch.device)
    mask = batch.fields["sampling_mask"]
    if mask.ndim != 2 or mask.is_floating_point():
        raise ValueError(
            f"{op}: sampling_mask must hold integers with one dimension for a token, "
            f"got {mask.dtype} and shape {list(mask.shape[1:])}"
        )
    return torch.where((batch.turn_ids >= 0)[:, None], mask, -1).int()


def masks_of(op: str, batch: Packed) -> Ragged:
    """Return the ids of all tokens as int32 arrays on the host; raises as `mask_rows`."""
    if "sampling_mask" not in batch.ragged_values:
        rows = mask_rows(op, batch).cpu().numpy()
        known = rows != -1
        return Ragged(np.append(0, known.sum(1)).cumsum(dtype=np.int32), rows[known])
    values = batch.values_of_tokens("sampling_mask").values
    if values.ndim != 1 or values.is_floating_point():
        raise ValueError(
            f"{op}: sampling_mask must hold integers without further dimensions, "
            f"got {values.dtype} and shape {list(values.shape[1:])}"
        )
    counts = batch.fields["sampling_mask"][:, 1].cpu().numpy()
    cu = np.append(0, counts).cumsum(dtype=np.int32)
    return Ragged(cu, values[: int(cu[-1])].int().cpu().numpy())


def ids_and_counts(masks: Ragged) -> dict[str, bytes]:
    """Return masks of `masks_of` as bytes of int32."""
    counts = np.diff(masks.cu).astype(np.int32)
    return {"ids": masks.values.tobytes(), "counts": counts.tobytes()}


def _padded(ids: Any, counts: Any, width: int) -> npt.NDArray[np.int32]:
    rows = np.full((len(counts), width), -1, np.int32)
    rows[np.arange(width) < counts[:, None]] = ids
    return rows


def masks_from_ragged(
    names: Sequence[str], masks: Sequence[IdsAndCounts], width: Width
) -> list[Any]:
    """Return each trajectory's mask as ``[tokens, width]``, -1 behind the last id of a token.

    ``width`` is as many as the longest of all masks needs if ``None``, and with ``"ragged"`` each
    mask is a `Ragged`. Raises a `ValueError` if a token has more ids than ``width``, or counts do
    not add up to the ids.
    """
    longest = max((int(counts.max(initial=1)) for _, counts in masks), default=1)
    most = width if isinstance(width, int) else longest
    found = list[Any]()
    for name, (ids, counts) in zip(names, masks, strict=True):
        if (counts < 0).any() or counts.sum() != len(ids):
            raise ValueError(
                f"trajectory {name!r}: sampling mask has {len(ids)} tokens, "
                f"but counts of {counts.sum()}"
            )
        if width == "ragged":
            found.append(Ragged(np.append(0, counts).cumsum(dtype=np.int64), ids))
            continue
        if counts.max(initial=0) > most:
            raise ValueError(
                f"trajectory {name!r}: sampling mask has {counts.max()} tokens, more than "
                f"sampling_mask_width {width}"
            )
        found.append(_padded(ids, counts, most))
    return found


def as_integers(values: Any) -> npt.NDArray[np.int32]:
    """Return numbers, or the int32 numbers in a ``bytes`` object, as an int32 array."""
    return host_array(
        np.frombuffer(values, np.int32) if isinstance(values, bytes) else values, np.int32
    )
