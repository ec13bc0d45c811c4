"""Slots of tokens: segments by boundaries or by ids, each alone or with others of one owner."""

from __future__ import annotations

from typing import NamedTuple

import torch

LOG_BOUND = 20.0
"""Logarithms of ratios are clamped to ``[-LOG_BOUND, LOG_BOUND]``, as in verl."""
FAR = 1024.0
"""A finite logarithm beyond it, on either side, counts as this in a sum."""
UNIT = 2.0**-32
"""Logarithms are summed as multiples of it, which is exact in any order."""


class Places(NamedTuple):
    """Slot of each token; any number may be out of range, and is then that of no slot.

    With neither bounds nor ids an entry is a segment, and boundaries count its tokens.
    """

    bounds: torch.Tensor | None
    """int32 ``[segments + 1]``: boundaries of segments, where ids are ``None``."""
    ids: torch.Tensor | None
    """int32 or int64 ``[tokens]``: segment of each token."""
    owners: torch.Tensor | None
    """int32 or int64 ``[segments]``: slot of each segment; the segment itself if ``None``."""
    num_segments: int
    num_slots: int


def slots_of_tokens(places: Places, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return int64 ``[tokens]``: the slot of each token, ``num_slots`` where there is none."""
    bounds, ids, owners, num_segments, num_slots = places
    if ids is None:
        ids = torch.arange(num_tokens, dtype=torch.int32, device=device)
    if bounds is not None:
        ids = torch.searchsorted(bounds, ids, right=True) - 1
    if owners is None:
        return _within(ids, num_slots)
    owners = _within(owners, num_slots)
    return torch.cat([owners, owners.new_full((1,), num_slots)])[_within(ids, num_segments)]


def sum_logarithms(logarithms: torch.Tensor, slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Return float32 ``[slots]`` sums: exact ones of multiples of `UNIT`, rounded once."""
    logarithms = logarithms.double()
    is_finite = logarithms.isfinite()
    zeros = logarithms.new_zeros(num_slots + 1)
    units = torch.where(is_finite, logarithms.clamp(-FAR, FAR) / UNIT, 0.0).round().long()
    exact = zeros.long().index_add_(0, slots, units)
    infinite = zeros.index_add_(0, slots, torch.where(is_finite, 0.0, logarithms))
    return (exact.double() * UNIT + infinite)[:num_slots].float()


def _within(ids: torch.Tensor, num: int) -> torch.Tensor:
    """Return int64 ids, ``num`` for those outside ``[0, num)``."""
    return torch.where((ids >= 0) & (ids < num), ids, num).long()
