"""Sampling masks: the tokens that top-p and top-k left to sample from, for trainers to replay.

A batch has them as extra field ``sampling_mask``, integers of shape ``(K,)`` with ``fill=-1``: the
tokens in the order they came, and -1 behind the last. Trainers have rows, or tokens and counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.conversion import host_array
from trajpack.packing.rows.packed import Packed

NO_TOKEN = -1
"""What stands behind the last token of a row."""


class RaggedMask(NamedTuple):
    """Tokens of several masks, one mask behind the other."""

    ids: npt.NDArray[np.int32]
    """int32 ``[tokens of all masks]``."""
    counts: npt.NDArray[np.int32]
    """int32 ``[masks]``: tokens of each; 0 where nothing is known."""


def mask_rows(op: str, batch: Packed) -> torch.Tensor:
    """Return the field ``sampling_mask``, int32 ``[tokens, K]``; -1 where nothing was generated.

    Raises:
        ValueError: If it holds no integers, or a token has more than one dimension.
    """
    mask = batch.fields["sampling_mask"]
    if mask.ndim != 2 or mask.is_floating_point():
        raise ValueError(
            f"{op}: sampling_mask must hold integers with one dimension for a token, "
            f"got {mask.dtype} and shape {list(mask.shape[1:])}"
        )
    return torch.where((batch.turn_ids >= 0)[:, None], mask, NO_TOKEN).int()


def ragged(rows: torch.Tensor) -> RaggedMask:
    """Return rows of `mask_rows` without the -1 behind their last token; copies to the host."""
    values = rows.cpu().numpy()
    known = values != NO_TOKEN
    return RaggedMask(values[known], known.sum(1, dtype=np.int32))


def padded(name: str, mask: RaggedMask, width: int) -> npt.NDArray[np.int32]:
    """Return masks as rows of ``width`` tokens, -1 behind the last of each.

    Raises:
        ValueError: If one has more tokens, or the counts are not those of the tokens.
    """
    counts = mask.counts
    if (counts < 0).any() or counts.sum() != len(mask.ids):
        raise ValueError(
            f"{name}: sampling mask has {len(mask.ids)} tokens, but counts of {counts.sum()}"
        )
    if counts.max(initial=0) > width:
        raise ValueError(
            f"{name}: sampling mask has {counts.max()} tokens, more than "
            f"sampling_mask_width {width}"
        )
    rows = np.full((len(counts), width), NO_TOKEN, np.int32)
    rows[np.arange(width) < counts[:, None]] = mask.ids
    return rows


def widest(masks: list[RaggedMask], width: int | None) -> int:
    """Return ``width``, or the tokens of the longest of the masks if it is ``None``."""
    longest = (int(mask.counts.max(initial=1)) for mask in masks)
    return max(longest, default=1) if width is None else width


def as_integers(values: Any) -> npt.NDArray[np.int32]:
    """Return numbers on the host, or the int32 that bytes hold."""
    return host_array(
        np.frombuffer(values, np.int32) if isinstance(values, bytes) else values, np.int32
    )
