"""Segment reductions on the host: one pass of numpy over all entries.

`numpy.ufunc.reduceat` reduces from each index to the next. Given where every segment begins and
ends, one after another, every second result is a segment's and those between are of what lies
outside. A segment is reduced by itself alone, so its bits depend on nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.validation import values_to_check

Entries = npt.NDArray[Any]


def check_bounds(op: str, segments: torch.Tensor, num_entries: int) -> None:
    """Raise if boundaries or spans can be read and do not lie within the entries."""
    readable = values_to_check(segments)
    if readable is None:
        return
    bounds = readable.numpy()
    begin, end = bounds.T if bounds.ndim == 2 else (bounds[:-1], bounds[1:])
    wrong = (begin < 0) | (end < begin) | (end > num_entries)
    if wrong.any():
        first = int(wrong.argmax())
        raise ValueError(
            f"{op}: segments must lie within {num_entries} entries and not end before they begin, "
            f"segment {first} goes from {begin[first]} to {end[first]}"
        )


def segment_reduce_on_host(
    x: torch.Tensor,
    segments: torch.Tensor,
    mask: torch.Tensor | None,
    reduction: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return what `segment_reduce_reference` does, as ``dtype``, for tensors on the host."""
    bounds = segments.numpy()
    begin, end = bounds.T if bounds.ndim == 2 else (bounds[:-1], bounds[1:])
    entries = x.detach().numpy()
    counted = None if mask is None else mask.numpy()
    with np.errstate(all="ignore"):
        if reduction == "max":
            total = _reduce(np.maximum, entries, counted, begin, end, least_of(entries.dtype))
        else:
            total = _reduce(np.add, entries, counted, begin, end, 0)
        if reduction == "mean":
            count = end - begin
            if counted is not None:
                count = _reduce(np.add, counted, None, begin, end, 0)
            total = total.astype(np.float64) / np.maximum(count, 1)
        result = torch.from_numpy(total).to(dtype)
    return result


def least_of(dtype: np.dtype[Any]) -> float | int:
    """Return what no value of a dtype is below."""
    return float("-inf") if dtype.kind == "f" else int(np.iinfo(dtype).min)


def _reduce(
    ufunc: np.ufunc,
    entries: Entries,
    counted: Entries | None,
    begin: Entries,
    end: Entries,
    nothing: float,
) -> Entries:
    """Reduce [begin, end) of the entries that count, with all the precision there is."""
    dtype = entries.dtype
    if ufunc is np.add:
        dtype = np.dtype(np.float64 if dtype.kind == "f" else np.int64)
    values = np.empty(entries.size + 1, dtype)  # one more, since an index may be the end
    values[-1] = nothing
    values[:-1] = entries
    if counted is not None:
        np.copyto(values[:-1], nothing, where=~counted)
    result = np.full(begin.size, nothing, dtype)
    (held,) = np.nonzero(end > begin)
    if held.size:
        held = held[np.argsort(begin[held], kind="stable")]  # so that gaps are short
        edges = np.stack([begin[held], end[held]], 1).reshape(-1)
        result[held] = ufunc.reduceat(values, edges)[::2]
    if dtype.kind == "f":
        result += 0.0  # makes 0 of -0
        result[np.isnan(result)] = np.nan  # of one kind only
    return result
