"""Discounted returns, one launch: a program owns ``ROWS`` segments and walks them from their ends.

Each step scans ``BLOCK`` entries of every row at reversed addresses, so that the scan runs
forward, and carries the last value on. Blocks are counted from the segment's own end, rows
do not meet, and no float is added atomically: a segment's bits depend on nothing but itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 16
BLOCK = 64
NUM_WARPS = 4


@triton.jit
def _compose(first_gain, first_sum, second_gain, second_sum):
    return first_gain * second_gain, second_gain * first_sum + second_sum


@triton.jit(do_not_specialize=["num_segments"])
def discounted_returns_kernel(
    rewards, cu_seqlens, discount, returns, num_segments, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    segment = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = segment < num_segments
    begin = tl.load(cu_seqlens + segment, mask=exists, other=0)
    end = tl.load(cu_seqlens + segment + 1, mask=exists, other=0)
    gain = tl.load(discount + segment, mask=exists, other=0.0)
    longest = tl.max(end - begin, 0)
    lane = tl.arange(0, BLOCK)
    carry = tl.zeros((ROWS,), tl.float64)
    done = 0
    while done < longest:
        index = (end - 1 - done)[:, None] - lane[None, :]  # [ROWS, BLOCK], last entry first
        inside = index >= begin[:, None]
        reward = tl.load(rewards + index, mask=inside, other=0.0).to(tl.float64)
        # entries before the segment's first pass the carry on unchanged
        gains, sums = tl.associative_scan(
            (tl.where(inside, gain[:, None], 1.0), reward), 1, _compose
        )
        sums += gains * carry[:, None]
        tl.store(returns + index, sums.to(tl.float32), mask=inside)
        carry = tl.sum(tl.where(lane[None, :] == BLOCK - 1, sums, 0.0), 1)
        done += BLOCK


def discounted_returns_forward(
    rewards: torch.Tensor, cu_seqlens: torch.Tensor, discount: torch.Tensor
) -> torch.Tensor:
    """Launch the kernel on contiguous inputs; ``discount`` is float64, one per segment."""
    returns = torch.empty_like(rewards, dtype=torch.float32)
    num_segments = cu_seqlens.shape[0] - 1
    if rewards.shape[0]:
        with torch.cuda.device_of(rewards):  # Triton launches on the current device
            discounted_returns_kernel[(triton.cdiv(num_segments, ROWS),)](
                rewards, cu_seqlens, discount, returns, num_segments,
                ROWS=ROWS, BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return returns
