"""Discounted returns of packed rewards, one discount for all: the same job done other ways.

Each takes ``rewards`` float32 ``[tokens]`` and int32 boundaries, and returns float32
``[tokens]``. What a way derives from the boundaries alone (flags, padding masks) is made
beforehand and not timed.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.kernels.gae_ways import TOO_UNEVEN, Rows, is_too_uneven, last_tokens
from benchmarks.rivals import contender
from trajpack.kernels.credit.discounted_returns import discounted_returns
from trajpack.testing import boundaries

JOB = "discounted_returns of token rewards"
DISCOUNT = 0.99
WROTE = "returns"
BOTH_UP_TO = 1000
"""Longest sequence up to which both of torchrl's ways run; they are one convolution, as fast."""


def inputs(lengths, device="cpu"):
    """Return seeded rewards and the boundaries."""
    generator = torch.Generator().manual_seed(6)
    rewards = torch.randn(int(lengths.sum()), generator=generator)
    return rewards.to(device), boundaries(lengths).to(device)


def by_loop(rewards, cu_seqlens):
    """Walk each sequence backward over Python floats: the way of per-token lists."""
    returns, bounds = rewards.tolist(), cu_seqlens.tolist()
    for begin, end in pairwise(bounds):
        total = 0.0
        for index in range(end - 1, begin - 1, -1):
            total = returns[index] = returns[index] + DISCOUNT * total
    return torch.tensor(returns, device=rewards.device)


def padded_walk(lengths, device="cpu"):
    """Return a way that pads, walks backward over time for all sequences, and takes a mask."""
    rows = Rows(lengths, device)

    def work(rewards):
        walked = rows.padded(rewards).T.clone(memory_format=torch.contiguous_format)
        for time in range(len(walked) - 2, -1, -1):
            walked[time].add_(walked[time + 1], alpha=DISCOUNT)
        return rows.packed(walked.T)

    return work


def torchrl_ways(rewards, cu_seqlens, lengths):
    """Return torchrl's two vectorised ways on one row of time; ``done`` ends a sequence.

    Both cut the filter where a power of the discount falls below 1e-7, hence the tolerance.
    """
    done = last_tokens(cu_seqlens)
    column, zeros = rewards[:, None], torch.zeros_like(rewards)[:, None]

    def reward2go(module):
        return lambda: module.reward2go(column, done, DISCOUNT)[:, 0]

    def vectorised(module):
        estimate = module.vec_generalized_advantage_estimate
        return lambda: estimate(DISCOUNT, 1.0, zeros, zeros, column, done)[0][:, 0]

    functional = "torchrl.objectives.value.functional"
    if is_too_uneven(lengths):
        return [Contender("torchrl reward2go", None, WROTE, missing=TOO_UNEVEN)]
    ways = [contender(functional, "torchrl reward2go", reward2go, WROTE, tunes_threads=True)]
    if int(lengths.max()) <= BOTH_UP_TO:
        name = "torchrl vec_generalized_advantage_estimate"
        ways.append(contender(functional, name, vectorised, f"{WROTE} twice", tunes_threads=True))
    return ways


def contest(workload, lengths, device="cpu", **options):
    """Return the contest and who takes part in it, ours first."""
    (rewards, cu_seqlens), longest = inputs(lengths, device), int(lengths.max())
    expected = padded_walk(lengths)(rewards.cpu().double()).float()

    def check(returns):
        torch.testing.assert_close(returns.cpu(), expected, rtol=1e-3, atol=1e-3)

    def check_ours(returns):
        torch.testing.assert_close(returns.cpu(), expected, rtol=1e-6, atol=1e-6)

    def ours(longest=longest):
        return discounted_returns(rewards, cu_seqlens, DISCOUNT, max_seqlen=longest)

    walk = padded_walk(lengths, device)
    entrants = [
        Contender(OURS, ours, WROTE, check_ours),
        Contender(
            "pad, then walk back over time", lambda: walk(rewards), WROTE, tunes_threads=True
        ),
        *torchrl_ways(rewards, cu_seqlens, lengths),
    ]
    if device == "cpu":
        entrants.append(Contender("Python loop", lambda: by_loop(rewards, cu_seqlens), WROTE))
    return Contest(JOB, workload, len(rewards), check, **options), entrants
