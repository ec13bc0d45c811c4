"""Group statistics on the host: what `group_advantages` does for CPU tensors.

Sums are made in float64 in the members' order, by numpy's bincount.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.groups.group_advantages import (
    GroupSums,
    Rule,
    advantages_of,
)

Floats = npt.NDArray[np.float64]


def group_advantages_on_host(
    scores: torch.Tensor,
    group_ids: torch.Tensor,
    num_groups: int,
    rule: Rule,
    lengths: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the advantages of `trajpack.kernels.groups.group_advantages.group_advantages`."""
    group = group_ids.numpy()
    counted = (group >= 0) & (group < num_groups)
    if valid is not None:
        counted &= valid.numpy()
    group = group[counted].astype(np.int64)
    score = scores.numpy()[counted].astype(np.float64)
    length = None if lengths is None else lengths.numpy()[counted].astype(np.float64)
    with np.errstate(all="ignore"):  # scores that are not finite
        sums = _sums(score, group, num_groups, rule, length)
    share = torch.tensor(score.size / max(int(np.count_nonzero(score)), 1), dtype=torch.float64)
    found = advantages_of(
        torch.from_numpy(score), torch.from_numpy(group),
        GroupSums(*map(torch.from_numpy, sums)), rule, share,
    )  # fmt: skip
    advantages = np.zeros(scores.shape[0], np.float32)
    advantages[counted] = found.float().numpy()
    return torch.from_numpy(advantages)


def _sums(
    score: Floats, group: npt.NDArray[Any], num_groups: int, rule: Rule, length: Floats | None
) -> list[Floats]:
    """Return the fields of `GroupSums`."""

    def total(values: Floats) -> Floats:
        return np.bincount(group, values, num_groups).astype(np.float64, copy=False)

    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, group, score)
    np.maximum.at(high, group, score)
    second = high
    if rule.baseline == "second_best":
        best = score == high[group]
        below = np.full(num_groups, -np.inf)
        np.maximum.at(below, group[~best], score[~best])
        second = np.where(np.bincount(group[best], minlength=num_groups) > 1, high, below)
    excess = score - low[group]
    count = np.bincount(group, minlength=num_groups).astype(np.float64)
    sums = [count, low, high, second, total(excess), total(excess * excess)]
    nothing = np.zeros(num_groups)
    sums += [nothing, nothing] if length is None else [total(length), total(length * excess)]
    if rule.scale != "leave_one_out_std":
        return [*sums, nothing, nothing]
    width = high - low
    for end, far in ((low, high[group] - score), (high, excess)):
        at_end = score == end[group]
        more = np.bincount(group[at_end], minlength=num_groups) - 1  # of those, one is left out
        inner = np.where(at_end, 0.0, far)
        squares = total(inner * inner) + more * width * width
        inner_total = total(inner) + more * width
        sums.append(squares - inner_total * inner_total / np.maximum(count - 1, 1))
    return sums
