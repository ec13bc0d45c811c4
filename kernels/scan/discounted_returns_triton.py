# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Discounted returns: rows of entries, scanned block by block from the segments' ends.

Every step scans ``BLOCK`` entries of ``ROWS`` rows at reversed addresses, so that the scan runs
forward. The order of the sums is the segment's own, counted from its end:

- a block of ``BLOCK`` entries is one scan;
- a superblock folds its ``BLOCKS`` blocks one after another, starting from 0;
- the sums of ``BLOCK`` superblocks are one scan again; from there on they are folded.

What is carried in from behind is added last at each level. So a row may be a whole segment,
with all it needs in one launch, or a superblock, with the sums of those behind it from a launch
before: the same steps, hence the same bits. No float is added atomically.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import DEFAULT, block_shape, launch_on
from trajpack.kernels.scan.discounted_returns_steps_triton import (
    carry_of_superblocks,
    power,
    walk_superblock,
)
from trajpack.kernels.search_triton import find_segment, find_segments

ROWS = 8
BLOCK = block_shape("discounted_returns", DEFAULT).block
"""The same on every architecture: with ROWS and BLOCKS it settles the order of the sums."""
BLOCKS = 32
LONGEST_ROW = 4096
"""Segments no longer than this are one row each: more rows would only cost a second launch."""
FEWEST_ENTRIES = 8192
"""With so few entries in all, a second launch costs more than the steps that it saves."""


@triton.jit(do_not_specialize=["num_segments"])
def discounted_returns_kernel(
    rewards, cu_seqlens, discount, returns, num_segments,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A row is a segment, walked from its last superblock to its first."""
    SUPERBLOCK: tl.constexpr = BLOCK * BLOCKS
    segment = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = segment < num_segments
    begin = tl.load(cu_seqlens + segment, mask=exists, other=0)
    top = tl.load(cu_seqlens + segment + 1, mask=exists, other=0)
    gain = tl.load(discount + segment, mask=exists, other=0.0)
    left = tl.max(top - begin, 0)
    lane = tl.arange(0, BLOCK)
    block_gain = gain
    if left > BLOCK:
        block_gain = power(gain, BLOCK)
    sums = tl.zeros((ROWS, BLOCK), tl.float64)
    carry = tl.zeros_like(gain)
    behind = carry
    place = 0
    while left > 0:
        bottom = tl.maximum(top - SUPERBLOCK, begin)
        total = walk_superblock(rewards, returns, bottom, top, gain, block_gain, carry, True, BLOCK)
        if left > SUPERBLOCK:
            sums = tl.where(lane[None, :] == place, total[:, None], sums)
            carry = carry_of_superblocks(sums, power(gain, SUPERBLOCK), place, behind)
            place += 1
            if place == BLOCK:
                behind = carry
                place = 0
        top -= SUPERBLOCK
        left -= SUPERBLOCK


@triton.jit
def _superblocks_of_windows(
    cu_seqlens, num_segments, num_windows, first,
    ROWS: tl.constexpr, SUPERBLOCK: tl.constexpr,
):  # fmt: skip
    """Find the superblock that ends in each of ``ROWS`` windows and does not begin its segment.

    Window w is the entries [w * SUPERBLOCK, (w + 1) * SUPERBLOCK). Such a superblock ends in a
    window whose first entry is its segment's too, so there is at most one to a window. Return
    segment, begin, top (``begin`` where there is none), window, superblocks behind it.
    """
    window = tl.minimum(first + tl.arange(0, ROWS), num_windows - 1)
    low = find_segment(cu_seqlens, num_segments, tl.min(window, 0) * SUPERBLOCK, 1)
    high = find_segment(cu_seqlens, num_segments, tl.max(window, 0) * SUPERBLOCK, 1)
    segment = find_segments(cu_seqlens, low, high, window * SUPERBLOCK, 1)
    begin = tl.load(cu_seqlens + segment)
    end = tl.load(cu_seqlens + segment + 1)
    behind = (end - 1) // SUPERBLOCK - window
    top = end - behind * SUPERBLOCK
    own = (first + tl.arange(0, ROWS) < num_windows) & (top - begin > SUPERBLOCK)
    return segment, begin, tl.where(own, top, begin), window, tl.where(own, behind, 0)


@triton.jit(do_not_specialize=["num_segments", "num_windows"])
def superblock_sums_kernel(
    rewards, cu_seqlens, discount, sums, num_segments, num_windows,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A row is a superblock with another before it in its segment; its sum goes to its window."""
    SUPERBLOCK: tl.constexpr = BLOCK * BLOCKS
    first = tl.program_id(0) * ROWS
    segment, begin, top, window, _ = _superblocks_of_windows(
        cu_seqlens, num_segments, num_windows, first, ROWS, SUPERBLOCK
    )
    own = top > begin
    if tl.max(top - begin, 0) > 0:
        gain = tl.load(discount + segment)
        bottom = tl.where(own, top - SUPERBLOCK, top)
        total = walk_superblock(
            rewards, rewards, bottom, top, gain, power(gain, BLOCK), gain, False, BLOCK
        )
        tl.store(sums + window, total, mask=own)


@triton.jit(do_not_specialize=["num_segments", "num_windows"])
def superblock_returns_kernel(
    rewards, cu_seqlens, discount, returns, sums, num_segments, num_windows,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A row is a superblock: of a window, or, in the last programs, the one that begins a segment.

    A short segment is no more than that one.
    """
    SUPERBLOCK: tl.constexpr = BLOCK * BLOCKS
    of_windows = tl.cdiv(num_windows, ROWS)
    program = tl.program_id(0)
    if program < of_windows:
        segment, begin, top, window, behind = _superblocks_of_windows(
            cu_seqlens, num_segments, num_windows, program * ROWS, ROWS, SUPERBLOCK
        )
    else:
        segment = (program - of_windows) * ROWS + tl.arange(0, ROWS)
        exists = segment < num_segments
        segment = tl.minimum(segment, num_segments - 1)
        begin = tl.load(cu_seqlens + segment)
        end = tl.where(exists, tl.load(cu_seqlens + segment + 1), begin)
        behind = tl.maximum(end - begin - 1, 0) // SUPERBLOCK
        top = end - behind * SUPERBLOCK
        window = (top - 1) // SUPERBLOCK
    bottom = tl.maximum(top - SUPERBLOCK, begin)
    longest = tl.max(top - bottom, 0)
    gain = tl.load(discount + segment)
    block_gain = gain
    if longest > BLOCK:
        block_gain = power(gain, BLOCK)
    carry = tl.zeros_like(gain)
    most = tl.max(behind, 0)
    if most > 0:
        lane = tl.arange(0, BLOCK)
        superblock_gain = power(gain, SUPERBLOCK)
        first = 0
        while first < most:
            # the last superblock of the segment comes first
            left = behind - first
            others = window[:, None] + left[:, None] - lane[None, :]
            known = tl.load(sums + others, mask=lane[None, :] < left[:, None], other=0.0)
            place = tl.minimum(left, BLOCK) - 1
            later = carry_of_superblocks(known, superblock_gain, place[:, None], carry)
            carry = tl.where(left > 0, later, carry)
            first += BLOCK
    walk_superblock(rewards, returns, bottom, top, gain, block_gain, carry, True, BLOCK)


def discounted_returns_forward(
    rewards: torch.Tensor,
    cu_seqlens: torch.Tensor,
    discount: torch.Tensor,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Launch what the sizes known to the host ask for; ``discount`` is float64, one per segment."""
    if rewards.shape[0] <= FEWEST_ENTRIES or (max_seqlen is not None and max_seqlen <= LONGEST_ROW):
        return segment_returns(rewards, cu_seqlens, discount)
    sums = superblock_sums(rewards, cu_seqlens, discount)
    return superblock_returns(rewards, cu_seqlens, discount, sums)


def _options(rewards: torch.Tensor) -> dict[str, int | bool]:
    return launch_on("discounted_returns", rewards.get_device()).options


def segment_returns(
    rewards: torch.Tensor, cu_seqlens: torch.Tensor, discount: torch.Tensor
) -> torch.Tensor:
    """Launch a row for each segment."""
    returns = torch.empty_like(rewards, dtype=torch.float32)
    num_segments = cu_seqlens.shape[0] - 1
    if rewards.shape[0]:
        with torch.cuda.device_of(rewards):  # Triton launches on the current device
            discounted_returns_kernel[(triton.cdiv(num_segments, ROWS),)](
                rewards, cu_seqlens, discount, returns, num_segments,
                ROWS=ROWS, BLOCK=BLOCK, BLOCKS=BLOCKS, **_options(rewards),
            )  # fmt: skip
    return returns


def superblock_sums(
    rewards: torch.Tensor, cu_seqlens: torch.Tensor, discount: torch.Tensor
) -> torch.Tensor:
    """Launch a row for each window; return float64 ``[windows]``, where there is a sum."""
    windows = triton.cdiv(rewards.shape[0], BLOCK * BLOCKS)
    sums = torch.empty(windows, dtype=torch.float64, device=rewards.device)
    if windows:
        with torch.cuda.device_of(rewards):
            superblock_sums_kernel[(triton.cdiv(windows, ROWS),)](
                rewards, cu_seqlens, discount, sums, cu_seqlens.shape[0] - 1, windows,
                ROWS=ROWS, BLOCK=BLOCK, BLOCKS=BLOCKS, **_options(rewards),
            )  # fmt: skip
    return sums


def superblock_returns(
    rewards: torch.Tensor, cu_seqlens: torch.Tensor, discount: torch.Tensor, sums: torch.Tensor
) -> torch.Tensor:
    """Launch a row for each window and one for each segment, with the sums of the windows."""
    returns = torch.empty_like(rewards, dtype=torch.float32)
    num_segments, windows = cu_seqlens.shape[0] - 1, sums.shape[0]
    if windows:
        with torch.cuda.device_of(rewards):
            grid = triton.cdiv(windows, ROWS) + triton.cdiv(num_segments, ROWS)
            superblock_returns_kernel[(grid,)](
                rewards, cu_seqlens, discount, returns, sums, num_segments, windows,
                ROWS=ROWS, BLOCK=BLOCK, BLOCKS=BLOCKS, **_options(rewards),
            )  # fmt: skip
    return returns
