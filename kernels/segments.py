"""Segments of entries: boundaries of sequences, or spans of turns."""

from __future__ import annotations

import torch

from trajpack.kernels.validation import check_tensor


def check_segments(op: str, segments: torch.Tensor, device: torch.device) -> None:
    """Raise unless ``segments`` can be boundaries or spans; values are not read."""
    ndim = 2 if isinstance(segments, torch.Tensor) and segments.ndim == 2 else 1
    check_tensor(op, "segments", segments, ndim=ndim, dtypes=(torch.int32,), device=device)
    if ndim == 1 and segments.shape[0] == 0:
        raise ValueError(f"{op}: segments must have segments + 1 boundaries, got none")
    if ndim == 2 and segments.shape[1] != 2:
        raise ValueError(
            f"{op}: segments must be boundaries [segments + 1] or spans [segments, 2], "
            f"got shape {list(segments.shape)}"
        )


def bounds_of_segments(
    segments: torch.Tensor, num_entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 ``[segments]`` first index and one past the last, clamped to the entries."""
    begin, end = segments.T if segments.ndim == 2 else (segments[:-1], segments[1:])
    begin = begin.long().clamp(0, num_entries)
    return begin, torch.maximum(begin, end.long().clamp(0, num_entries))


def owners_of_entries(
    segments: torch.Tensor, num_entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the segment of each entry, int64 ``[entries]``, and bool ``[entries]`` if in one.

    The segment of an entry outside all segments is arbitrary.
    """
    begin, end = bounds_of_segments(segments, num_entries)
    index = torch.arange(num_entries, device=segments.device)
    if begin.shape[0] == 0:
        return index, torch.zeros_like(index, dtype=torch.bool)
    if segments.ndim == 1:
        owner = torch.searchsorted(end, index, right=True).clamp(max=begin.shape[0] - 1)
    else:
        order = torch.where(begin < end, begin, num_entries).sort(stable=True)
        place = torch.searchsorted(order.values, index, right=True) - 1
        owner = order.indices[place.clamp(min=0)]
    return owner, (begin[owner] <= index) & (index < end[owner])
