# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernel of group statistics: one warp a group, over its members in a given order.

Members stand in an order that puts those of one group next to each other. Program p looks at place
p. If a group begins there, it reads the group's members in blocks: for their number and the lowest
and highest score, for sums of the excess over the lowest, and to write them. All other programs
end at once. Time is linear in the members, and the sums of a group depend on its members and
their order alone.

Every sum is over differences from the group's lowest score. For float32 scores of similar size
these are exact in float64, so the order of members rarely matters, and the variance loses at most
the group's size in digits: the lowest of n scores is at most sqrt(n - 1) deviations below their
mean. The deviation of the others is computed from the squares of all minus the member's own part,
except for the lowest and the highest score, whose part may be nearly all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import launch_on

if TYPE_CHECKING:
    from trajpack.kernels.groups.group_advantages import Members, Rule


@triton.jit
def _member_at(members, place, known):
    """Return the member at a place, its group and its state; the group is -1 if there is none."""
    group_ids, order, states, inner, owners = members
    if inner is not None:
        place = tl.load(inner + place, mask=known, other=0)
    member = tl.load(order + place, mask=known, other=0)
    owner = member
    if owners is not None:
        owner = tl.load(owners + member, mask=known, other=0)
    group = tl.load(group_ids + owner, mask=known, other=-1)
    state = group * 0
    if states is not None:
        state = tl.load(states + member, mask=known, other=-1)
    return member, tl.where(state < 0, -1, group), state


@triton.jit
def _load_block(members, scores, valid, at, end):
    """Return the members at places, which exist and which count, and the scores of these."""
    exists = at < end
    member, _, _ = _member_at(members, at, exists)
    counts = exists
    if valid is not None:
        counts = exists & (tl.load(valid + member, mask=exists, other=0) != 0)
    score = tl.load(scores + member, mask=counts, other=0.0).to(tl.float64)
    return member, exists, counts, score


@triton.jit
def _extremes(members, scores, valid, begin, end, BLOCK: tl.constexpr):
    """Return the number of counted members, and their lowest and highest scores."""
    infinity = float("inf")
    counted = tl.zeros((BLOCK,), tl.int32)
    low = tl.full((BLOCK,), infinity, tl.float64)
    high = tl.full((BLOCK,), -infinity, tl.float64)
    at = begin
    while at < end:
        _, _, counts, score = _load_block(members, scores, valid, at + tl.arange(0, BLOCK), end)
        counted += counts.to(tl.int32)
        low = tl.minimum(low, tl.where(counts, score, infinity))
        high = tl.maximum(high, tl.where(counts, score, -infinity))
        at += BLOCK
    return tl.sum(counted, 0), tl.min(low, 0), tl.max(high, 0)


@triton.jit
def _sums(
    members, scores, lengths, valid, begin, end, low, high,
    BASELINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return sum and sum of squares of the scores' excess over the lowest, and two more.

    These are sums of lengths and of lengths times excess, or for ``"second_best"`` the number of
    members with the highest score and the highest score below it.
    """
    total = tl.zeros((BLOCK,), tl.float64)
    square = tl.zeros((BLOCK,), tl.float64)
    weight = tl.zeros((BLOCK,), tl.float64)
    weighted = tl.zeros((BLOCK,), tl.float64)
    below = tl.full((BLOCK,), -float("inf"), tl.float64)
    at = begin
    while at < end:
        place = at + tl.arange(0, BLOCK)
        member, _, counts, score = _load_block(members, scores, valid, place, end)
        excess = tl.where(counts, score - low, 0.0)
        total += excess
        square += excess * excess
        if BASELINE == "length_weighted":
            length = tl.load(lengths + member, mask=counts, other=0).to(tl.float64)
            weight += length
            weighted += length * excess
        elif BASELINE == "second_best":
            best = counts & (score == high)
            weight += best.to(tl.float64)
            below = tl.maximum(below, tl.where(counts & (best == 0), score, -float("inf")))
        at += BLOCK
    if BASELINE == "second_best":
        return tl.sum(total, 0), tl.sum(square, 0), tl.sum(weight, 0), tl.max(below, 0)
    else:
        return tl.sum(total, 0), tl.sum(square, 0), tl.sum(weight, 0), tl.sum(weighted, 0)


@triton.jit
def _squares_without_one(
    members, scores, valid, begin, end, end_score, other_score, others, BLOCK: tl.constexpr
):
    """Return Σ(score - mean)² without one member whose score is ``end_score``."""
    at_end = tl.zeros((BLOCK,), tl.int32)
    distance = tl.zeros((BLOCK,), tl.float64)
    square = tl.zeros((BLOCK,), tl.float64)
    at = begin
    while at < end:
        place = at + tl.arange(0, BLOCK)
        _, _, counts, score = _load_block(members, scores, valid, place, end)
        stays = counts & (score != end_score)
        at_end += (counts & (score == end_score)).to(tl.int32)
        far = tl.where(stays, score - other_score, 0.0)
        distance += far
        square += far * far
        at += BLOCK
    width = tl.where(others > 0, end_score - other_score, 0.0)
    more = tl.sum(at_end, 0).to(tl.float64) - 1.0  # members at this end that stay
    total = tl.sum(distance, 0) + more * width
    squares = tl.sum(square, 0) + more * width * width
    return squares - total * total / tl.maximum(others, 1.0)


@triton.jit
def _center(low, high, mean, one, other, BASELINE: tl.constexpr):
    """Return shift, center and floor of `group_terms`; ``one`` and ``other`` are of `_sums`."""
    shift = low
    center = mean
    floor = mean * 0 - float("inf")
    if BASELINE == "length_weighted":
        no_weight = one == 0
        center = tl.where(no_weight, mean, other / tl.where(no_weight, 1.0, one))
    elif BASELINE == "second_best":
        shift = tl.where(one > 1, high, other)
        center = 0.0
        floor = 0.0
    elif BASELINE == "none":
        shift = 0.0
        center = 0.0
    return shift, center, floor


@triton.jit
def _factor(
    count, low, high, mean, off, total, square, share, ddof, eps,
    BASELINE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Return the factor of `group_terms`, and whether the group has no more than one member."""
    factor = share
    alone = count <= 1
    stretch = 1.0
    if BASELINE == "leave_one_out":
        stretch = count / tl.maximum(count - 1.0, 1.0)
    if SCALE == "std" or SCALE == "std_about_baseline":  # noqa: PLR1714 - Triton has no sets
        squares = square - mean * total
        squares = tl.where(squares < 0, 0.0, squares)
        if SCALE == "std_about_baseline":
            squares = (squares + count * off * off) * stretch * stretch
        divisor = tl.sqrt(squares / tl.maximum(count - ddof, 1.0)) + eps
        factor = 1.0 / tl.where(divisor == 0, 1.0, divisor)
        alone = alone | (count <= ddof)
    elif SCALE == "mean":
        level = low + mean
        factor = tl.where(level > 0, 1.0 / tl.where(level > 0, level, 1.0), 0.0)
    elif SCALE == "signed_mean":
        level = low + mean + eps
        factor = 1.0 / tl.where(level == 0, 1.0, level)
    if BASELINE == "leave_one_out":
        factor = factor * stretch
    if BASELINE != "none" or SCALE == "std":
        factor = tl.where(high == low, 0.0, factor)
    return factor, alone


@triton.jit(do_not_specialize=["num_members", "num_groups"])
def members_by_nonzero_kernel(
    scores, group_ids, valid, share, num_members, num_groups: tl.int64, BLOCK: tl.constexpr
):
    """Write the counted members of all groups by those of them whose score is not 0."""
    counted = tl.zeros((BLOCK,), tl.int32)
    nonzero = tl.zeros((BLOCK,), tl.int32)
    at = 0
    while at < num_members:
        member = at + tl.arange(0, BLOCK)
        exists = member < num_members
        group = tl.load(group_ids + member, mask=exists, other=-1)
        counts = (group >= 0) & (group < num_groups)
        if valid is not None:
            counts = counts & (tl.load(valid + member, mask=exists, other=0) != 0)
        score = tl.load(scores + member, mask=counts, other=0.0)
        counted += counts.to(tl.int32)
        nonzero += (counts & (score != 0)).to(tl.int32)
        at += BLOCK
    most = tl.maximum(tl.sum(nonzero, 0), 1)
    tl.store(share, tl.sum(counted, 0).to(tl.float64) / most.to(tl.float64))


@triton.jit(do_not_specialize=["num_members", "num_groups", "ddof", "raw"])
def group_advantages_kernel(
    scores, members, lengths, valid, share, advantages, num_members, num_groups: tl.int64, ddof,
    eps: tl.float64, raw, BASELINE: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0)
    one, group, state = _member_at(members, begin, True)
    _before, group_before, state_before = _member_at(members, begin - 1, begin > 0)
    in_group = (group >= 0) & (group < num_groups)
    same = (group == group_before) & (state == state_before)
    if not in_group:
        tl.store(advantages + one, 0.0)
    reads = in_group & ((begin == 0) | (same == 0))  # a group begins here
    end = begin
    while reads:
        at = end + tl.arange(0, BLOCK)
        _others, groups, states = _member_at(members, at, at < num_members)
        continues = (groups == group) & (states == state)
        found = tl.min(tl.where(continues, BLOCK, tl.arange(0, BLOCK)), 0)
        end += found
        reads = found == BLOCK
    if end > begin:
        _write_group(
            scores, members, lengths, valid, share, advantages, begin, end, ddof, eps, raw,
            BASELINE, SCALE, BLOCK,
        )  # fmt: skip


@triton.jit
def _write_group(
    scores, members, lengths, valid, share, advantages, begin, end, ddof, eps, raw,
    BASELINE: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the advantages of the members at [begin, end)."""
    number, low, high = _extremes(members, scores, valid, begin, end, BLOCK)
    low = tl.where(number > 0, low, 0.0)
    count = number.to(tl.float64)
    total, square, one, other = _sums(
        members, scores, lengths, valid, begin, end, low, high, BASELINE, BLOCK
    )
    by_nonzero = tl.full((), 1.0, tl.float64)
    if SCALE == "nonzero":
        by_nonzero = tl.load(share)
    mean = total / tl.maximum(count, 1.0)
    shift, center, floor = _center(low, high, mean, one, other, BASELINE)
    off = low + mean - shift - center
    factor, alone = _factor(
        count, low, high, mean, off, total, square, by_nonzero, ddof, eps, BASELINE, SCALE
    )
    if SCALE == "leave_one_out_std":
        squares = square - mean * total
        others = count - 1.0
        of_low = _squares_without_one(members, scores, valid, begin, end, low, high, others, BLOCK)
        of_high = _squares_without_one(members, scores, valid, begin, end, high, low, others, BLOCK)
        degrees = others - ddof
        share_of_one = tl.where(degrees > 0, 1.0 / tl.maximum(degrees, 1.0), 0.0)
    factor = tl.where(alone, raw * by_nonzero, factor) + (total - total)
    shift = tl.where(alone, 0.0, shift)
    center = tl.where(alone, 0.0, center)
    floor = tl.where(alone, -float("inf"), floor)
    at = begin
    while at < end:
        place = at + tl.arange(0, BLOCK)
        member, exists, counts, score = _load_block(members, scores, valid, place, end)
        excess = score - shift - center
        advantage = excess * factor
        if SCALE == "leave_one_out_std":
            rest = squares - excess * excess * (count / tl.maximum(others, 1.0))
            rest = tl.where(score == low, of_low, rest)
            rest = tl.where(score == high, of_high, rest)
            variance = tl.where(rest > 0, rest, 0.0) * share_of_one
            advantage = advantage / tl.where(variance > 0, tl.sqrt(variance) + eps, 1.0)
        if BASELINE == "second_best":
            advantage = tl.where(advantage < floor, floor, advantage)
        advantage = tl.where(counts, advantage, 0.0) + 0.0  # no -0
        tl.store(advantages + member, advantage.to(tl.float32), mask=exists)
        at += BLOCK


def members_by_nonzero(
    scores: torch.Tensor, group_ids: torch.Tensor, num_groups: int, valid: torch.Tensor | None
) -> torch.Tensor:
    """Launch one program over all members; return float64 ``[1]``."""
    share = torch.empty(1, dtype=torch.float64, device=scores.device)
    launch = launch_on("group_advantages_kernel", scores.get_device())
    with torch.cuda.device_of(scores):  # Triton launches on the current device
        members_by_nonzero_kernel[(1,)](
            scores, group_ids, None if valid is None else valid.view(torch.uint8), share,
            scores.shape[0], num_groups, BLOCK=launch.block, **launch.options,
        )  # fmt: skip
    return share


def group_advantages_forward(
    scores: torch.Tensor,
    members: Members,
    num_groups: int,
    rule: Rule,
    *,
    lengths: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    share: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch a program for each member; ``share`` is that of `members_by_nonzero`."""
    advantages = torch.empty_like(scores, dtype=torch.float32)
    launch = launch_on("group_advantages_kernel", scores.get_device())
    if scores.shape[0]:
        marks = None if valid is None else valid.view(torch.uint8)
        with torch.cuda.device_of(scores):
            group_advantages_kernel[(scores.shape[0],)](
                scores, tuple(members), lengths, marks, share, advantages, scores.shape[0],
                num_groups, rule.ddof, rule.eps, int(rule.singleton == "raw"),
                BASELINE=rule.baseline, SCALE=rule.scale, BLOCK=launch.block, **launch.options,
            )  # fmt: skip
    return advantages
