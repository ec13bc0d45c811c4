# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernel of group statistics: each program computes ``GROUPS`` groups in one launch.

A program reads the ids of all members in chunks, and tiles of ``[GROUPS, BLOCK]`` where a chunk
holds members of its groups. It does so three times: for the lowest and highest score, for sums of
the excess over the lowest, and to write its members. No sort and no atomics. A skipped chunk would
have added zeros.

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
    from trajpack.kernels.groups.group_advantages import Rule

GROUPS = 16
GROUPS_OF_OTHERS = 8
"""Groups of a program with ``"leave_one_out_std"``, which keeps eight terms of a group in
registers: those of 16 groups spill."""
CHUNK = 1024
"""Ids that a program compares at once with its groups."""


@triton.jit
def _holds_any(group_ids, chunk, num_members, first, end, CHUNK: tl.constexpr):
    """Return whether a chunk has a member of a group in [first, end)."""
    member = chunk + tl.arange(0, CHUNK)
    group = tl.load(group_ids + member, mask=member < num_members, other=-1)
    return tl.max(((group >= first) & (group < end)).to(tl.int32), 0) > 0


@triton.jit
def _load_tile(scores, group_ids, valid, tile, num_members, BLOCK: tl.constexpr):
    """Return members, which of them exist and count, their groups and their scores."""
    member = tile + tl.arange(0, BLOCK)
    exists = member < num_members
    group = tl.load(group_ids + member, mask=exists, other=-1)
    counts = exists
    if valid is not None:
        counts = exists & (tl.load(valid + member, mask=exists, other=0) != 0)
    score = tl.load(scores + member, mask=counts, other=0.0).to(tl.float64)
    return member, exists, counts, group, score


@triton.jit
def _members_by_nonzero(
    scores, group_ids, valid, num_members, num_groups, CHUNK: tl.constexpr
):  # fmt: skip
    """Return the counted members of all groups by those of them whose score is not 0."""
    counted = tl.zeros((CHUNK,), tl.int32)
    nonzero = tl.zeros((CHUNK,), tl.int32)
    chunk = 0
    while chunk < num_members:
        _, _, counts, group, score = _load_tile(scores, group_ids, valid, chunk, num_members, CHUNK)
        counts = counts & (group >= 0) & (group < num_groups)
        counted += counts.to(tl.int32)
        nonzero += (counts & (score != 0)).to(tl.int32)
        chunk += CHUNK
    return tl.sum(counted, 0).to(tl.float64) / tl.maximum(tl.sum(nonzero, 0), 1).to(tl.float64)


@triton.jit
def _extremes(
    scores, group_ids, valid, own, num_members, first, end,
    GROUPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return each group's counted members, and their lowest and highest scores."""
    infinity = float("inf")
    counted = tl.zeros((GROUPS, BLOCK), tl.int32)
    low = tl.full((GROUPS, BLOCK), infinity, tl.float64)
    high = tl.full((GROUPS, BLOCK), -infinity, tl.float64)
    chunk = 0
    while chunk < num_members:
        if _holds_any(group_ids, chunk, num_members, first, end, CHUNK):
            tile = chunk
            while tile < tl.minimum(chunk + CHUNK, num_members):
                _, _, counts, group, score = _load_tile(
                    scores, group_ids, valid, tile, num_members, BLOCK
                )
                holds = (group[None, :] == own[:, None]) & counts[None, :]
                counted += holds.to(tl.int32)
                low = tl.minimum(low, tl.where(holds, score[None, :], infinity))
                high = tl.maximum(high, tl.where(holds, score[None, :], -infinity))
                tile += BLOCK
        chunk += CHUNK
    return tl.sum(counted, 1), tl.min(low, 1), tl.max(high, 1)


@triton.jit
def _sums(
    scores, group_ids, lengths, valid, own, low, high, num_members, first, end,
    BASELINE: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return sum and sum of squares of the scores' excess over the lowest, and two more.

    These are sums of lengths and of lengths times excess, or for ``"second_best"`` the number of
    members with the highest score and the highest score below it.
    """
    total = tl.zeros((GROUPS, BLOCK), tl.float64)
    square = tl.zeros((GROUPS, BLOCK), tl.float64)
    weight = tl.zeros((GROUPS, BLOCK), tl.float64)
    weighted = tl.zeros((GROUPS, BLOCK), tl.float64)
    bests = tl.zeros((GROUPS, BLOCK), tl.int32)
    below = tl.full((GROUPS, BLOCK), -float("inf"), tl.float64)
    chunk = 0
    while chunk < num_members:
        if _holds_any(group_ids, chunk, num_members, first, end, CHUNK):
            tile = chunk
            while tile < tl.minimum(chunk + CHUNK, num_members):
                member, _, counts, group, score = _load_tile(
                    scores, group_ids, valid, tile, num_members, BLOCK
                )
                holds = (group[None, :] == own[:, None]) & counts[None, :]
                excess = tl.where(holds, score[None, :] - low[:, None], 0.0)
                total += excess
                square += excess * excess
                if BASELINE == "length_weighted":
                    length = tl.load(lengths + member, mask=counts, other=0).to(tl.float64)
                    weight += tl.where(holds, length[None, :], 0.0)
                    weighted += tl.where(holds, length[None, :] * excess, 0.0)
                elif BASELINE == "second_best":
                    best = holds & (score[None, :] == high[:, None])
                    bests += best.to(tl.int32)
                    others = tl.where(holds & (best == 0), score[None, :], -float("inf"))
                    below = tl.maximum(below, others)
                tile += BLOCK
        chunk += CHUNK
    if BASELINE == "second_best":
        return tl.sum(total, 1), tl.sum(square, 1), tl.sum(bests, 1), tl.max(below, 1)
    else:
        return tl.sum(total, 1), tl.sum(square, 1), tl.sum(weight, 1), tl.sum(weighted, 1)


@triton.jit
def _sums_of_others(
    scores, group_ids, valid, own, low, high, members, num_members, first, end,
    GROUPS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return total, square, without_low and without_high of `GroupSums`."""
    lows = tl.zeros((GROUPS, BLOCK), tl.int32)
    highs = tl.zeros((GROUPS, BLOCK), tl.int32)
    above = tl.zeros((GROUPS, BLOCK), tl.float64)
    above_square = tl.zeros((GROUPS, BLOCK), tl.float64)
    below = tl.zeros((GROUPS, BLOCK), tl.float64)
    below_square = tl.zeros((GROUPS, BLOCK), tl.float64)
    chunk = 0
    while chunk < num_members:
        if _holds_any(group_ids, chunk, num_members, first, end, CHUNK):
            tile = chunk
            while tile < tl.minimum(chunk + CHUNK, num_members):
                _, _, counts, group, score = _load_tile(
                    scores, group_ids, valid, tile, num_members, BLOCK
                )
                holds = (group[None, :] == own[:, None]) & counts[None, :]
                lowest = holds & (score[None, :] == low[:, None])
                highest = holds & (score[None, :] == high[:, None])
                lows += lowest.to(tl.int32)
                highs += highest.to(tl.int32)
                far = tl.where(holds & (lowest == 0), score[None, :] - high[:, None], 0.0)
                above += far
                above_square += far * far
                far = tl.where(holds & (highest == 0), score[None, :] - low[:, None], 0.0)
                below += far
                below_square += far * far
                tile += BLOCK
        chunk += CHUNK
    others = tl.maximum(members - 1, 1).to(tl.float64)
    width = tl.where(members > 0, high - low, 0.0)
    more = tl.sum(lows, 1).to(tl.float64) - 1.0  # members at this end that stay
    total = tl.sum(above, 1) - more * width
    of_above = tl.sum(above_square, 1) + more * width * width - total * total / others
    more = tl.sum(highs, 1).to(tl.float64) - 1.0
    total = tl.sum(below, 1) + more * width
    square = tl.sum(below_square, 1) + more * width * width
    of_below = square - total * total / others
    return total + width, square + width * width, of_above, of_below


@triton.jit
def _variances_of_others(members, squares, above, below, ddof):
    """Return variances of all members, without one lowest, and without one highest member.

    The last result is the factor of a member's squared distance from the mean in the first.
    """
    count = members.to(tl.float64)
    degrees = count - 1.0 - ddof
    share = tl.where(degrees > 0, 1.0 / tl.maximum(degrees, 1.0), 0.0)
    part = count / tl.maximum(count - 1.0, 1.0) * share
    return squares * share, above * share, below * share, part


@triton.jit
def _std_of_others(score, low, high, excess, of_all, above, below, part, eps):
    """Return the divisor of `group_advantages.py` with the same name."""
    variance = of_all[:, None] - excess * excess * part[:, None]
    variance = tl.where(score[None, :] == low[:, None], above[:, None], variance)
    variance = tl.where(score[None, :] == high[:, None], below[:, None], variance)
    return tl.where(variance > 0, tl.sqrt(tl.where(variance > 0, variance, 0.0)) + eps, 1.0)


@triton.jit
def _center(low, high, mean, one, other, BASELINE: tl.constexpr):
    """Return shift, center and floor of `group_terms`; ``one`` and ``other`` are of `_sums`."""
    shift = low
    center = mean
    floor = tl.zeros_like(mean) - float("inf")
    if BASELINE == "length_weighted":
        no_weight = one == 0
        center = tl.where(no_weight, mean, other / tl.where(no_weight, 1.0, one))
    elif BASELINE == "second_best":
        shift = tl.where(one > 1, high, other)
        center = tl.zeros_like(mean)
        floor = tl.zeros_like(mean)
    elif BASELINE == "none":
        shift = tl.zeros_like(mean)
        center = tl.zeros_like(mean)
    return shift, center, floor


@triton.jit
def _factor(
    members, low, high, mean, off, total, square, share, ddof, eps,
    BASELINE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Return the factor of `group_terms`, and which groups have no more than one member."""
    count = members.to(tl.float64)
    factor = tl.zeros_like(mean) + share
    alone = members <= 1
    stretch = tl.zeros_like(mean) + 1.0
    if BASELINE == "leave_one_out":
        stretch = count / tl.maximum(count - 1.0, 1.0)
    if SCALE == "std" or SCALE == "std_about_baseline":  # noqa: PLR1714 - Triton has no sets
        squares = square - mean * total
        squares = tl.where(squares < 0, 0.0, squares)
        if SCALE == "std_about_baseline":
            squares = (squares + count * off * off) * stretch * stretch
        divisor = tl.sqrt(squares / tl.maximum(count - ddof, 1.0)) + eps
        factor = 1.0 / tl.where(divisor == 0, 1.0, divisor)
        alone = alone | (members <= ddof)
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


@triton.jit(do_not_specialize=["num_members", "num_groups", "ddof", "raw"])
def group_advantages_kernel(
    scores, group_ids, lengths, valid, advantages, num_members, num_groups, ddof,
    eps: tl.float64, raw, BASELINE: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = program * GROUPS
    end = tl.minimum(first + GROUPS, num_groups)
    own = first + tl.arange(0, GROUPS)
    members, low, high = _extremes(
        scores, group_ids, valid, own, num_members, first, end, GROUPS, CHUNK, BLOCK
    )
    low = tl.where(members > 0, low, 0.0)
    if SCALE == "leave_one_out_std":
        total, square, one, other = _sums_of_others(
            scores, group_ids, valid, own, low, high, members, num_members, first, end,
            GROUPS, CHUNK, BLOCK,
        )  # fmt: skip
    else:
        total, square, one, other = _sums(
            scores, group_ids, lengths, valid, own, low, high, num_members, first, end,
            BASELINE, GROUPS, CHUNK, BLOCK,
        )  # fmt: skip
    share = tl.full((), 1.0, tl.float64)
    if SCALE == "nonzero":
        share = _members_by_nonzero(scores, group_ids, valid, num_members, num_groups, CHUNK)
    mean = total / tl.maximum(members, 1).to(tl.float64)
    shift, center, floor = _center(low, high, mean, one, other, BASELINE)
    if SCALE == "leave_one_out_std":
        of_all, one, other, part = _variances_of_others(
            members, square - mean * total, one, other, ddof
        )
    off = low + mean - shift - center
    factor, alone = _factor(
        members, low, high, mean, off, total, square, share, ddof, eps, BASELINE, SCALE
    )
    factor = tl.where(alone, raw * share, factor) + (total - total)
    shift = tl.where(alone, 0.0, shift)
    center = tl.where(alone, 0.0, center)
    floor = tl.where(alone, -float("inf"), floor)
    chunk = 0
    while chunk < num_members:
        # members of no group are written too, by the first program
        if (program == 0) | _holds_any(group_ids, chunk, num_members, first, end, CHUNK):
            tile = chunk
            while tile < tl.minimum(chunk + CHUNK, num_members):
                member, here, counts, group, score = _load_tile(
                    scores, group_ids, valid, tile, num_members, BLOCK
                )
                mine = (group[None, :] == own[:, None]) & (here & (group < num_groups))[None, :]
                excess = score[None, :] - shift[:, None] - center[:, None]
                advantage = excess * factor[:, None]
                if SCALE == "leave_one_out_std":
                    advantage = advantage / _std_of_others(
                        score, shift, high, excess, of_all, one, other, part, eps
                    )
                if BASELINE == "second_best":
                    advantage = tl.where(advantage < floor[:, None], floor[:, None], advantage)
                advantage = tl.where(counts[None, :], advantage, 0.0) + 0.0  # no -0
                place = (advantages + member)[None, :] + tl.zeros((GROUPS, BLOCK), tl.int32)
                tl.store(place, advantage.to(tl.float32), mask=mine)
                of_none = here & ((group < 0) | (group >= num_groups))
                of_none &= tl.zeros((BLOCK,), tl.int32) + program == 0
                tl.store(advantages + member, tl.zeros((BLOCK,), tl.float32), mask=of_none)
                tile += BLOCK
        chunk += CHUNK


def group_advantages_forward(
    scores: torch.Tensor,
    group_ids: torch.Tensor,
    num_groups: int,
    rule: Rule,
    lengths: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel for inputs that are contiguous."""
    advantages = torch.empty_like(scores, dtype=torch.float32)
    num_members = scores.shape[0]
    groups = GROUPS_OF_OTHERS if rule.scale == "leave_one_out_std" else GROUPS
    launch = launch_on("group_advantages_kernel", scores.get_device())
    if num_members:
        marks = None if valid is None else valid.view(torch.uint8)
        with torch.cuda.device_of(scores):  # Triton launches on the current device
            # a program at least: members of no group are written too
            group_advantages_kernel[(max(triton.cdiv(num_groups, groups), 1),)](
                scores, group_ids, lengths, marks, advantages, num_members, num_groups,
                rule.ddof, rule.eps, int(rule.singleton == "raw"), BASELINE=rule.baseline,
                SCALE=rule.scale, GROUPS=groups, CHUNK=CHUNK, BLOCK=launch.block,
                **launch.options,
            )  # fmt: skip
    return advantages
