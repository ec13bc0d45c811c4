# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of group statistics: a program reads the members of its groups in a given order.

Members stand in an order that puts those of one group next to each other. A program reads them in
blocks: for their number and the lowest and highest score, for sums of the excess over the lowest,
and to write them. Groups of up to ``SMALL`` members lie side by side in a program, which reads them
once; a larger one has a program of its own, and one of more than ``LONG`` members a larger program,
in launches of their own. Time is linear in the members, and the sums of a group depend on its
members and their order alone.

Every sum is over differences from the group's lowest score. For float32 scores of similar size
these are exact in float64, so the order of members rarely matters, and the variance loses at most
the group's size in digits: the lowest of n scores is at most sqrt(n - 1) deviations below their
mean. The deviation of the others is computed from the squares of all minus the member's own part,
except for the lowest and the highest score, whose part may be nearly all of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trajpack.kernels.groups.group_advantages import Rule
from trajpack.kernels.launches import cdiv, launch_on

SMALL = 16
"""Members up to which groups lie side by side."""
LONG = 512
"""Members from which on a group is a larger program's."""
SHARES = tl.constexpr(128)
"""Parts of all groups whose members are added up at once."""


@triton.jit
def _load_part(inputs, at, part, BLOCK: tl.constexpr):
    """Return members of a block, which exist and which count, and the scores of these.

    They are ``BLOCK`` members of one group, or one member of each of several.
    """
    order, scores, valid, begin, end, read = inputs
    if len(read) > 0:
        return read[part]
    else:
        place = begin + at + part
        if BLOCK > 1:
            place += tl.arange(0, BLOCK)
        exists = place < end
        member = tl.load(order + place, mask=exists, other=0)
        counts = exists
        if valid is not None:
            counts = exists & (tl.load(valid + member, mask=exists, other=0) != 0)
        score = tl.load(scores + member, mask=counts, other=0.0).to(tl.float64)
        return member, exists, counts, score


@triton.jit
def _sum(entries, BLOCK: tl.constexpr):
    """Return the sum of the entries of one group, or an entry of each group as it is."""
    if BLOCK > 1:
        return tl.sum(entries, 0)
    else:
        return entries


@triton.jit
def _max(entries, BLOCK: tl.constexpr):
    if BLOCK > 1:
        return tl.max(entries, 0)
    else:
        return entries


@triton.jit
def _extremes(inputs, longest, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of counted members of each group, and their lowest and highest scores."""
    number = inputs[3] * 0
    low = number + tl.full((), float("inf"), tl.float64)
    high = -low
    at = 0
    while at < longest:
        for part in tl.static_range(PARTS):
            _, _, counts, score = _load_part(inputs, at, part, BLOCK)
            number += _sum(counts.to(tl.int32), BLOCK)
            low = tl.minimum(low, -_max(tl.where(counts, -score, -float("inf")), BLOCK))
            high = tl.maximum(high, _max(tl.where(counts, score, -float("inf")), BLOCK))
        at += BLOCK * PARTS
    return number, low, high


@triton.jit
def _sums(
    inputs, longest, lengths, low, high,
    BASELINE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return sum and sum of squares of the scores' excess over the lowest, and two more.

    These are sums of lengths and of lengths times excess, or for ``"second_best"`` the number of
    members with the highest score and the highest score below it.
    """
    total = tl.zeros_like(low)
    square, one, other = total, total, total
    if BASELINE == "second_best":
        other -= float("inf")
    at = 0
    while at < longest:
        for part in tl.static_range(PARTS):
            member, _, counts, score = _load_part(inputs, at, part, BLOCK)
            excess = tl.where(counts, score - low, 0.0)
            total += _sum(excess, BLOCK)
            square += _sum(excess * excess, BLOCK)
            if BASELINE == "length_weighted":
                length = tl.load(lengths + member, mask=counts, other=0).to(tl.float64)
                one += _sum(length, BLOCK)
                other += _sum(length * excess, BLOCK)
            elif BASELINE == "second_best":
                best = counts & (score == high)
                one += _sum(best.to(tl.float64), BLOCK)
                below = tl.where(counts & (best == 0), score, -float("inf"))
                other = tl.maximum(other, _max(below, BLOCK))
        at += BLOCK * PARTS
    return total, square, one, other


@triton.jit
def _squares_without_one(
    inputs, longest, end_score, other_score, others, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return Σ(score - mean)² without one member whose score is ``end_score``."""
    distance = tl.zeros_like(others)
    square, more = distance, distance - 1.0  # and the members at this end that stay
    at = 0
    while at < longest:
        for part in tl.static_range(PARTS):
            _, _, counts, score = _load_part(inputs, at, part, BLOCK)
            more += _sum((counts & (score == end_score)).to(tl.float64), BLOCK)
            far = tl.where(counts & (score != end_score), score - other_score, 0.0)
            distance += _sum(far, BLOCK)
            square += _sum(far * far, BLOCK)
        at += BLOCK * PARTS
    width = tl.where(others > 0, end_score - other_score, 0.0)
    total = distance + more * width
    return square + more * width * width - total * total / tl.maximum(others, 1.0)


@triton.jit
def _members_by_nonzero(shares, num_parts, BLOCK: tl.constexpr):
    """Return the counted members of all groups by those of them whose score is not 0."""
    counted = tl.zeros((BLOCK,), tl.int32)
    nonzero = tl.zeros((BLOCK,), tl.int32)
    at = 0
    while at < num_parts:
        part = at + tl.arange(0, BLOCK)
        counted += tl.load(shares + 2 * part, mask=part < num_parts, other=0)
        nonzero += tl.load(shares + 2 * part + 1, mask=part < num_parts, other=0)
        at += BLOCK
    most = tl.maximum(tl.sum(nonzero, 0), 1)
    return tl.sum(counted, 0).to(tl.float64) / most.to(tl.float64)


@triton.jit(do_not_specialize=["num_groups", "least", "most", "num_parts", "ddof", "raw"])
def group_advantages_kernel(  # noqa: C901, PLR0912 - branches of the compiler
    scores, order, segments, lengths, valid, shares, advantages, num_groups, least, most, num_parts,
    ddof, eps: tl.float64, raw,
    BASELINE: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the advantages of groups of ``least`` to ``most`` members, as the reference has them.

    The baseline is ``shift + center``.
    """
    group = tl.program_id(0)
    if GROUPS > 1:
        group = group * GROUPS + tl.arange(0, GROUPS)
    begin = tl.load(segments + group, mask=group < num_groups, other=0)
    end = tl.load(segments + group + 1, mask=group < num_groups, other=0)
    end = tl.where((end - begin >= least) & (end - begin <= most), end, begin)
    longest = end - begin
    if GROUPS > 1:
        longest = tl.max(longest, 0)
    if longest > 0:
        inputs = (order, scores, valid, begin, end, ())
        if GROUPS > 1:
            read = ()
            for part in tl.static_range(PARTS):
                read = read + (_load_part(inputs, 0, part, BLOCK),)  # type: ignore[assignment]
            inputs = (order, scores, valid, begin, end, read)
        number, low, high = _extremes(inputs, longest, PARTS, BLOCK)
        low = tl.where(number > 0, low, 0.0)
        count = number.to(tl.float64)
        total, square, one, other = _sums(
            inputs, longest, lengths, low, high, BASELINE, PARTS, BLOCK
        )
        by_nonzero = tl.full((), 1.0, tl.float64)
        if SCALE == "nonzero":
            by_nonzero = _members_by_nonzero(shares, num_parts, SHARES)
        mean = total / tl.maximum(count, 1.0)
        shift = low
        center = mean
        if BASELINE == "length_weighted":
            no_weight = one == 0
            center = tl.where(no_weight, mean, other / tl.where(no_weight, 1.0, one))
        elif BASELINE == "second_best":
            shift = tl.where(one > 1, high, other)
            center = 0.0
        elif BASELINE == "none":
            shift = 0.0
            center = 0.0
        factor = by_nonzero
        alone = count <= 1
        others = count - 1.0
        stretch = 1.0
        if BASELINE == "leave_one_out":
            stretch = count / tl.maximum(others, 1.0)
        squares = square - mean * total
        if SCALE == "std" or SCALE == "std_about_baseline":  # noqa: PLR1714 - Triton has no sets
            spread = tl.where(squares < 0, 0.0, squares)
            if SCALE == "std_about_baseline":
                off = low + mean - shift - center
                spread = (spread + count * off * off) * stretch * stretch
            divisor = tl.sqrt(spread / tl.maximum(count - ddof, 1.0)) + eps
            factor = 1.0 / tl.where(divisor == 0, 1.0, divisor)
            alone = alone | (count <= ddof)
        elif SCALE == "mean":
            level = low + mean
            factor = tl.where(level > 0, 1.0 / tl.where(level > 0, level, 1.0), 0.0)
        elif SCALE == "signed_mean":
            level = low + mean + eps
            factor = 1.0 / tl.where(level == 0, 1.0, level)
        elif SCALE == "leave_one_out_std":
            of_low = _squares_without_one(inputs, longest, low, high, others, PARTS, BLOCK)
            of_high = _squares_without_one(inputs, longest, high, low, others, PARTS, BLOCK)
            degrees = others - ddof
            share_of_one = tl.where(degrees > 0, 1.0 / tl.maximum(degrees, 1.0), 0.0)
        factor = factor * stretch
        if BASELINE != "none" or SCALE == "std":
            factor = tl.where(high == low, 0.0, factor)
        factor = tl.where(alone, raw * by_nonzero, factor) + (total - total)
        shift = tl.where(alone, 0.0, shift)
        center = tl.where(alone, 0.0, center)
        at = 0
        while at < longest:
            for part in tl.static_range(PARTS):
                member, exists, counts, score = _load_part(inputs, at, part, BLOCK)
                excess = score - shift - center
                advantage = excess * factor
                if SCALE == "leave_one_out_std":
                    own = excess * excess * (count / tl.maximum(others, 1.0))
                    rest = squares - own
                    rest = tl.where(score == low, of_low, rest)
                    rest = tl.where(score == high, of_high, rest)
                    variance = tl.where(rest > 0, rest, 0.0) * share_of_one
                    advantage = advantage / tl.where(variance > 0, tl.sqrt(variance) + eps, 1.0)
                if BASELINE == "second_best":
                    advantage = tl.where((advantage < 0) & (alone == 0), 0.0, advantage)
                advantage = tl.where(counts, advantage, 0.0) + 0.0  # no -0
                tl.store(advantages + member, advantage.to(tl.float32), mask=exists)
            at += BLOCK * PARTS


def group_advantages_forward(
    scores: torch.Tensor,
    segments: torch.Tensor,
    order: torch.Tensor,
    rule: Rule,
    *,
    lengths: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    shares: torch.Tensor | None = None,
    longest: int | None = None,
) -> torch.Tensor:
    """Launch programs for small groups, and for each of the larger ones where there may be any.

    Members of no group get 0: where ``longest`` is not known, boundaries may leave some out.
    """
    members, num_groups = scores.shape[0], segments.shape[0] - 1
    fill = torch.zeros if longest is None else torch.empty
    advantages = fill(members, dtype=torch.float32, device=scores.device)
    if not (members and num_groups):
        return advantages
    mask, raw = None if valid is None else valid.view(torch.uint8), int(rule.singleton == "raw")
    num_parts = 0 if shares is None else shares.numel() // 2
    longest = max(members, SMALL + 1) if longest is None else min(longest, members)
    kernel = "group_advantages_kernel"
    for shape, least, most in (
        (f"{kernel}, small", 0, SMALL), (kernel, SMALL + 1, LONG),
        (f"{kernel}, long", LONG + 1, 2**31 - 1),
    ):  # fmt: skip
        if longest < least:
            break
        launch = launch_on(shape, scores.get_device())
        groups, parts, block = (1, 1, launch.block) if least else (launch.block // SMALL, SMALL, 1)
        launch(
            group_advantages_kernel, cdiv(num_groups, groups), scores, order, segments, lengths,
            mask, shares, advantages, num_groups, least, most, num_parts, rule.ddof,
            rule.eps, raw, BASELINE=rule.baseline, SCALE=rule.scale, GROUPS=groups,
            PARTS=parts, BLOCK=block,
        )  # fmt: skip
    return advantages
