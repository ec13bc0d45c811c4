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
    above: torch.Tensor
    """For the deviation of the others: Σ(score - mean)² of all but one member that has the lowest
    score."""
    below: torch.Tensor
    """The same of all but one member that has the highest score."""


class GroupTerms(NamedTuple):
    """A group's advantages: ``max((score - shift - center) * factor, floor)``, float64."""

    shift: torch.Tensor
    center: torch.Tensor
    factor: torch.Tensor
    floor: torch.Tensor


def advantages_of(
    score: torch.Tensor, place: torch.Tensor, sums: GroupSums, rule: Rule, share: torch.Tensor
) -> torch.Tensor:
    """Return float64 advantages of members.

    Args:
        score: ``[members]`` float64.
        place: ``[members]`` int64: the group of each.
        sums: Of the groups.
        rule: How they make advantages.
        share: All members by those not scored 0, 0-d.
    """
    terms = GroupTerms(*(term[place] for term in group_terms(sums, rule, share)))
    excess = score - terms.shift - terms.center
    advantage = excess * terms.factor
    if rule.scale == "leave_one_out_std":
        own = GroupSums(*(each[place] for each in sums))
        advantage = advantage / _scale_of_others(score, excess, own, rule)
    return torch.where(advantage < terms.floor, terms.floor, advantage) + 0.0  # no -0


def _scale_of_others(
    score: torch.Tensor, excess: torch.Tensor, own: GroupSums, rule: Rule
) -> torch.Tensor:
    """Return the standard deviation of the others plus ``eps``; 1 where all others are equal.

    Σ(score - mean)² of the others is that of all less the member's own part. The part of the
    lowest or highest may be nearly all of it, so that these two were summed without it.
    """
    squares = own.square - own.total / own.size * own.total
    others = squares - excess * excess * (own.size / (own.size - 1).clamp(min=1))
    others = torch.where(score == own.low, own.above, others)
    others = torch.where(score == own.high, own.below, others)
    degrees = own.size - 1 - rule.ddof
    deviation = (others.clamp(min=0) / degrees.clamp(min=1)).sqrt()
    return torch.where((others > 0) & (degrees > 0), deviation + rule.eps, 1.0)


def group_terms(sums: GroupSums, rule: Rule, share: torch.Tensor) -> GroupTerms:
    """Return how scores become advantages; ``share`` is all members by those not 0."""
    count, nothing = sums.size, torch.zeros_like(sums.size)
    mean = sums.total / count.clamp(min=1)
    shift, center, floor = _center(sums, rule, mean)
    factor, alone = nothing + 1, count <= 1
    leaves_one_out = rule.baseline == "leave_one_out"
    # score - mean of the others is n / (n - 1) times score - mean
    stretch = count / (count - 1).clamp(min=1) if leaves_one_out else factor
    if rule.scale in ("std", "std_about_baseline"):
        squares = (sums.square - mean * sums.total).clamp(min=0)
        if rule.scale == "std_about_baseline":
            off = sums.low + mean - shift - center
            squares = (squares + count * off * off) * stretch * stretch
        divisor = (squares / (count - rule.ddof).clamp(min=1)).sqrt() + rule.eps
        factor = 1 / torch.where(divisor == 0, 1.0, divisor)
        alone = alone | (count <= rule.ddof)
    elif rule.scale == "mean":
        level = sums.low + mean
        factor = torch.where(level > 0, 1 / level, 0.0)
    elif rule.scale == "signed_mean":
        level = sums.low + mean + rule.eps
        factor = 1 / torch.where(level == 0, 1.0, level)
    elif rule.scale == "nonzero":
        factor = factor * share
    if leaves_one_out:
        factor = factor * stretch
    if rule.baseline != "none" or rule.scale == "std":
        factor = torch.where(sums.high == sums.low, 0.0, factor)
    of_one = (share if rule.scale == "nonzero" else 1.0) if rule.singleton == "raw" else 0.0
    factor = torch.where(alone, of_one, factor)
    factor = factor + (sums.total - sums.total)  # NaN where a score is not finite
    shift, center = (torch.where(alone, 0.0, term) for term in (shift, center))
    return GroupTerms(shift, center, factor, torch.where(alone, -torch.inf, floor))


def _center(
    sums: GroupSums, rule: Rule, mean: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return shift, center and floor; ``mean`` is that of what scores exceed the lowest by."""
    nothing = torch.zeros_like(mean)
    floor = nothing - torch.inf
    if rule.baseline == "length_weighted":
        return sums.low, torch.where(sums.weight == 0, mean, sums.weighted / sums.weight), floor
    if rule.baseline == "second_best":
        return sums.second, nothing, nothing
    return (nothing, nothing, floor) if rule.baseline == "none" else (sums.low, mean, floor)
