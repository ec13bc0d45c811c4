"""Sampling masks: the token ids that top-p and top-k left to sample from, which trainers replay.

In a batch they are the extra field ``sampling_mask``, integers of shape ``(K,)`` with ``fill=-1``:
the ids, then -1. Trainers have ids of all tokens in one array, and a count per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.conversion import host_array
from trajpack.packing.rows.packed import Packed

Ragged: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""Ids of all tokens, and the number of ids of each token; 0 where nothing is known."""


def mask_rows(op: str, batch: Packed) -> torch.Tensor:
    """Return the field ``sampling_mask``, int32 ``[tokens, K]``; -1 where nothing was generated.

    Raises a `ValueError` if it holds no integers, or has not one dimension per token.
    """
    mask = batch.fields["sampling_mask"]
    if mask.ndim != 2 or mask.is_floating_point():
        raise ValueError(
            f"{op}: sampling_mask must hold integers with one dimension for a token, "
            f"got {mask.dtype} and shape {list(mask.shape[1:])}"
        )
    return torch.where((batch.turn_ids >= 0)[:, None], mask, -1).int()


def ragged(rows: torch.Tensor) -> Ragged:
    """Return rows of `mask_rows` as ids and counts; copies to the host."""
    values = rows.cpu().numpy()
    known = values != -1
    return values[known], known.sum(1, dtype=np.int32)


def masks_from_ragged(
    names: Sequence[str], masks: Sequence[Ragged], width: int | None
) -> list[npt.NDArray[np.int32]]:
    """Return each trajectory's mask as ``[tokens, width]``, -1 behind the last id of a token.

    ``width`` is as many as the longest of all masks needs if ``None``. Raises a `ValueError` if a
    token has more ids than ``width``, or counts do not add up to the ids.
    """
    if width is None:
        width = max((int(counts.max(initial=1)) for _, counts in masks), default=1)
    found = []
    for name, (ids, counts) in zip(names, masks, strict=True):
        if (counts < 0).any() or counts.sum() != len(ids):
            raise ValueError(
                f"trajectory {name!r}: sampling mask has {len(ids)} tokens, "
                f"but counts of {counts.sum()}"
            )
        if counts.max(initial=0) > width:
            raise ValueError(
                f"trajectory {name!r}: sampling mask has {counts.max()} tokens, more than "
                f"sampling_mask_width {width}"
            )
        rows = np.full((len(counts), width), -1, np.int32)
        rows[np.arange(width) < counts[:, None]] = ids
        found.append(rows)
    return found


def as_integers(values: Any) -> npt.NDArray[np.int32]:
    """Return numbers, or the int32 numbers in a ``bytes`` object, as an int32 array."""
    return host_array(
        np.frombuffer(values, np.int32) if isinstance(values, bytes) else values, np.int32
    )
