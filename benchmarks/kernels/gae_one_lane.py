"""A lane for each sequence, which walks it from its end: how cugae's CUDA kernel does it."""

import torch
import triton
import triton.language as tl

LANES = 32
"""A warp to a program, so that a few sequences spread over all multiprocessors."""


@triton.jit(do_not_specialize=["num_sequences"])
def one_lane_kernel(  # noqa: PLR0913, PLR0917 - a kernel is one flat body
    rewards, values, cu_seqlens, advantages, returns, num_sequences,
    gamma: tl.float32, rate: tl.float32, LANES: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0) * LANES + tl.arange(0, LANES)
    exists = sequence < num_sequences
    begin = tl.load(cu_seqlens + sequence, mask=exists, other=0)
    end = tl.load(cu_seqlens + sequence + 1, mask=exists, other=0)
    later = tl.zeros((LANES,), tl.float32)
    passed = tl.zeros((LANES,), tl.float32)
    for step in range(0, tl.max(end - begin, 0)):
        at = end - 1 - step
        inside = at >= begin
        reward = tl.load(rewards + at, mask=inside, other=0.0)
        value = tl.load(values + at, mask=inside, other=0.0)
        passed = reward + gamma * later - value + rate * passed
        later = value
        tl.store(advantages + at, passed, mask=inside)
        tl.store(returns + at, passed + value, mask=inside)


def one_lane(rewards, values, cu_seqlens, gamma, lam):
    """Return advantages and returns, float32 ``[tokens]``, by one launch."""
    advantages, num_sequences = torch.empty_like(rewards), len(cu_seqlens) - 1
    returns = torch.empty_like(advantages)
    one_lane_kernel[(triton.cdiv(num_sequences, LANES),)](
        rewards, values, cu_seqlens, advantages, returns, num_sequences,
        gamma, gamma * lam, LANES, num_warps=1,
    )  # fmt: skip
    return advantages, returns
