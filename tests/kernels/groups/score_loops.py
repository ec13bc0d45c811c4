"""Advantages in groups by independent loops, and groups to run them on."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.groups.group_advantages import Baseline, Scale

Array = npt.NDArray[Any]


def by_loop(
    scores: Array,
    ids: Array,
    num_groups: int,
    *,
    baseline: str = "mean",
    scale: str = "std",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "raw",
    lengths: Array | None = None,
    valid: Array | None = None,
) -> Array:
    """Take one group after the other, in float64, by the formulas of a textbook."""
    scores = scores.astype(np.float64)
    counted = (ids >= 0) & (ids < num_groups) & (True if valid is None else valid)
    alpha = counted.sum() / max(np.count_nonzero(scores[counted]), 1) if scale == "nonzero" else 1.0
    out = np.zeros(len(scores))
    for group in np.unique(ids[counted]):
        rows = np.flatnonzero(counted & (ids == group))
        r, n = scores[rows], len(rows)
        if n == 1 or (scale in ("std", "std_about_baseline") and n <= ddof):
            out[rows] = r * alpha if singleton == "raw" else 0.0
            continue
        if r.max() == r.min() and (baseline != "none" or scale == "std"):
            continue
        above = above_baseline(r, baseline, None if lengths is None else lengths[rows])
        above = scaled(above, r, scale, ddof=ddof, eps=eps)
        out[rows] = above * alpha
    return out


def above_baseline(r: Array, baseline: str, lengths: Array | None) -> Array:
    """Return what the scores of a group exceed the baseline by."""
    n = len(r)
    if baseline == "mean":
        return r - r.mean()
    if baseline == "leave_one_out":
        return np.array([r[i] - np.delete(r, i).mean() for i in range(n)])
    if baseline == "length_weighted":
        return r - np.average(r, weights=lengths if np.any(lengths) else None)
    if baseline == "second_best":
        above = np.zeros(n)
        above[r.argmax()] = r.max() - np.sort(r)[-2]
        return above
    return r.copy()


def scaled(above: Array, r: Array, scale: str, *, ddof: int, eps: float) -> Array:
    """Divide what the scores ``r`` of a group exceed the baseline by."""
    n = len(r)
    if scale == "std":
        return above / (r.std(ddof=ddof) + eps)
    if scale == "leave_one_out_std":
        for i in range(n):
            others = np.delete(r, i)
            if others.max() > others.min() and n - 1 > ddof:
                above[i] /= others.std(ddof=ddof) + eps
        return above
    if scale == "std_about_baseline":
        return above / (np.sqrt(np.sum(above**2) / (n - ddof)) + eps or 1.0)
    if scale == "mean":
        return above / r.mean() if r.mean() > 0 else 0 * above
    return above / (r.mean() + eps or 1.0) if scale == "signed_mean" else above


COMBINATIONS = [
    (baseline, scale)
    for baseline in get_args(Baseline)
    for scale in get_args(Scale)
    if (scale != "leave_one_out_std" or baseline == "leave_one_out")
    and (scale not in ("std_about_baseline", "signed_mean") or baseline != "second_best")
]
"""Every baseline with every scale that goes with it."""


def random_groups(
    members: int, num_groups: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Return scores of few values and many, ids in and out of range, lengths and marks."""
    rng = np.random.default_rng(seed)
    few, many = rng.integers(-1, 3, members) / 4, rng.standard_normal(members)
    scores = np.where(rng.random(members) < 0.5, few, many)
    valid = torch.from_numpy(rng.random(members) < 0.8)
    tensor = torch.from_numpy(scores).to(dtype)
    return {
        "scores": torch.where(valid, tensor, torch.nan),
        "group_ids": torch.from_numpy(rng.integers(-1, num_groups + 1, members)),
        "num_groups": num_groups,
        "lengths": torch.from_numpy(rng.integers(1, 50, members)),
        "valid": valid,
    }


def expected_of(inputs: dict[str, Any], **rule: Any) -> torch.Tensor:
    arrays = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    scores, ids, num_groups = (arrays.pop(k) for k in ("scores", "group_ids", "num_groups"))
    return torch.from_numpy(by_loop(scores, ids, num_groups, **arrays, **rule))


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-6, atol=1e-7)
