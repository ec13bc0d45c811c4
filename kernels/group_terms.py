"""From what is summed of a group to what makes its members' advantages; all in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rule(NamedTuple):
    """How a group's statistics make advantages: the arguments of `group_advantages`."""

    baseline: str
    scale: str
    ddof: int
    eps: float
    singleton: str


class GroupSums(NamedTuple):
    """What is summed of each group's counted members: float64 ``[num_groups]``."""

    size: torch.Tensor
    """Counted members."""
    low: torch.Tensor
    """The lowest score; what scores exceed it by is summed, not they, to lose no digits."""
    high: torch.Tensor
    second: torch.Tensor
    """The second highest score, which is the highest again where two members have that."""
    total: torch.Tensor
    square: torch.Tensor
    weight: torch.Tensor
    """Of the lengths, where the baseline asks for them."""
    weighted: torch.Tensor
    """Of the lengths times what the scores exceed the lowest by."""


class GroupTerms(NamedTuple):
    """A group's advantages: ``max((score - shift - center) * factor, floor)``, float64."""

    shift: torch.Tensor
    center: torch.Tensor
    factor: torch.Tensor
    floor: torch.Tensor


def group_terms(sums: GroupSums, rule: Rule, share: torch.Tensor) -> GroupTerms:
    """Return how scores become advantages; ``share`` is all members by those not 0."""
    count, nothing = sums.size, torch.zeros_like(sums.size)
    mean = sums.total / count.clamp(min=1)
    shift, center, floor = sums.low, mean, nothing - torch.inf
    if rule.baseline == "length_weighted":
        center = torch.where(sums.weight == 0, mean, sums.weighted / sums.weight)
    elif rule.baseline == "second_best":
        shift, center, floor = sums.second, nothing, nothing
    elif rule.baseline == "none":
        shift, center = nothing, nothing
    factor, alone = nothing + 1, count <= 1
    if rule.scale == "std":
        variance = (sums.square - mean * sums.total).clamp(min=0)
        deviation = (variance / (count - rule.ddof).clamp(min=1)).sqrt()
        divisor = deviation + rule.eps
        factor = 1 / torch.where(divisor == 0, 1.0, divisor)
        alone = alone | (count <= rule.ddof)
    elif rule.scale == "mean":
        level = sums.low + mean
        factor = torch.where(level > 0, 1 / level, 0.0)
    elif rule.scale == "nonzero":
        factor = factor * share
    if rule.baseline == "leave_one_out":  # score - mean of the others is n / (n - 1) times
        factor = factor * (count / (count - 1).clamp(min=1))
    if rule.baseline != "none" or rule.scale == "std":
        factor = torch.where(sums.high == sums.low, 0.0, factor)
    of_one = (share if rule.scale == "nonzero" else 1.0) if rule.singleton == "raw" else 0.0
    factor = torch.where(alone, of_one, factor)
    factor = factor + (sums.total - sums.total)  # NaN where a score is not finite
    shift, center = (torch.where(alone, 0.0, term) for term in (shift, center))
    return GroupTerms(shift, center, factor, torch.where(alone, -torch.inf, floor))


def advantages_by_terms(score: torch.Tensor, terms: GroupTerms) -> torch.Tensor:
    """Return float64 advantages of members, each with its group's terms."""
    advantage = (score - terms.shift - terms.center) * terms.factor
    return torch.where(advantage < terms.floor, terms.floor, advantage) + 0.0  # no -0
