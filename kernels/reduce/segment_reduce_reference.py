"""What segment reductions mean, in plain torch, and which segment an entry is in."""

from __future__ import annotations

import torch


def segment_reduce_reference(
    x: torch.Tensor, segments: torch.Tensor, mask: torch.Tensor | None, reduction: str
) -> torch.Tensor:
    """Say what `segment_sum`, `segment_mean` and `segment_max` mean: ``reduction`` names one.

    Doubling: after round k an entry holds what the 2ᵏ entries from it on come to, as far as they
    are in its segment, so it takes in the entry 2ᵏ further on. The first of a segment ends with
    it all. A tensor on the host is asked for its longest segment, which bounds the rounds; one on
    a device is not read.
    """
    begin, end = bounds_of_segments(segments, x.shape[0])
    if begin.shape[0] == 0:
        return x.new_empty(0, dtype=dtype_of(x, reduction))
    owner, counted = owners_of_entries(segments, x.shape[0])
    counted = counted if mask is None else counted & mask
    join = torch.maximum if reduction == "max" else torch.add
    values, nothing = x, 0.0 if x.is_floating_point() else 0
    if reduction == "max":
        nothing = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    else:
        values = x.double() if x.is_floating_point() else x.long()
    values = torch.where(counted, values, nothing)
    index = torch.arange(x.shape[0], device=x.device)
    longest = x.shape[0]
    if longest and x.device.type == "cpu":
        longest = int((end - begin).max())
    reach = 1
    while reach < longest:
        inside = index[reach:] < end[owner[:-reach]]
        later = torch.where(inside, values[reach:], nothing)
        values = torch.cat([join(values[:-reach], later), values[-reach:]])
        reach *= 2
    values = torch.nn.functional.pad(values, (0, 1), value=nothing)  # what an empty one comes to
    result = values[torch.where(begin < end, begin, x.shape[0])]
    if reduction == "mean":
        counts = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
        result = result.double() / segment_reduce_reference(counts, segments, None, "sum").clamp(1)
    if result.is_floating_point():
        result = torch.where(result.isnan(), float("nan"), result + 0.0)  # one NaN, and no -0
    return result.to(dtype_of(x, reduction))


def dtype_of(x: torch.Tensor, reduction: str) -> torch.dtype:
    """Return the dtype of a reduction of ``x``."""
    if reduction == "max" or x.is_floating_point():
        return x.dtype
    return torch.float32 if reduction == "mean" else torch.int64


def bounds_of_segments(
    segments: torch.Tensor, num_entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 ``[segments]`` first and one past the last, for boundaries or spans.

    They are inside, whatever they say; a segment that ends before it begins is empty.
    """
    begin, end = segments.unbind(1) if segments.ndim == 2 else (segments[:-1], segments[1:])
    begin = begin.long().clamp(0, num_entries)
    return begin, torch.maximum(begin, end.long().clamp(0, num_entries))


def owners_of_entries(
    segments: torch.Tensor, num_entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 ``[entries]`` segment of each entry, and bool ``[entries]`` if it is in one.

    Segments that hold nothing own nothing. Where an entry is in none, its owner is any segment;
    there must be one.
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
