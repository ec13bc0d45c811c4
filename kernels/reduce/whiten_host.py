"""Moments and whitening on the host: chunk by chunk, so that what is computed stays in cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

CHUNK = 32_768
"""Entries at once, counted from the first: 256 KB of float64."""

Floats = npt.NDArray[np.floating[Any]]


def moments_on_host(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return what `masked_moments_reference` does, for tensors on the host."""
    values, counted = x.detach().numpy(), mask.numpy()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        chunks = [
            _moments(values[begin : begin + CHUNK], counted[begin : begin + CHUNK])
            for begin in range(0, values.size, CHUNK)
        ]
        merged = _merge(np.array([chunk for chunk in chunks if chunk[0]]).reshape(-1, 5))
    return torch.from_numpy(merged)


def _moments(values: Floats, counted: npt.NDArray[np.bool_]) -> tuple[float, ...]:
    """Return count, sum, sum of squared deviations, minimum and maximum."""
    count = int(np.count_nonzero(counted))
    if not count:
        return 0, 0, 0, 0, 0
    values = (values if count == values.size else values[counted]).astype(np.float64)
    low, high, total = values.min(), values.max(), values.sum()
    values -= total / count
    values *= values
    return count, total, values.sum(), low, high


def _merge(chunks: Floats) -> Floats:
    """Return the moments of all entries from those of chunks, none of which is empty."""
    if not len(chunks):
        return np.array([0.0, 0.0, 0.0, np.inf, -np.inf])
    counts, totals, squares, lows, highs = chunks.T
    count, low, high = counts.sum(), lows.min(), highs.max()
    mean = low if low == high else totals.sum() / count
    away = totals / counts - mean
    total = (squares + counts * (away * away)).sum()
    if low == high:
        total = 0.0
    if np.isnan(mean):
        low = high = mean
    return np.array([count, mean, total, low, high])


def write_whitened(
    x: torch.Tensor, mask: torch.Tensor, mean: float, scale: float, kept: float
) -> torch.Tensor:
    """Return ``(x - mean) * scale + kept`` where ``mask`` counts an entry, else 0."""
    values, counted = x.detach().numpy(), mask.numpy()
    whitened = np.empty(values.size, np.float32)
    room = np.empty(min(values.size, CHUNK))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for begin in range(0, values.size, CHUNK):
            chunk = slice(begin, begin + CHUNK)
            result = room[: values[chunk].size]
            if scale == 0:  # without a spread; 0 times an infinity would be NaN
                result[:] = kept
            else:
                np.subtract(values[chunk], mean, out=result, dtype=np.float64)
                result *= scale
                result += kept
            whitened[chunk] = result
            bits = whitened[chunk].view(np.int32)
            bits *= counted[chunk]  # whatever they are; a masked store waits for branches
    return torch.from_numpy(whitened)
