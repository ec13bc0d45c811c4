# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The steps that every kernel of discounted returns is made of.

Kernels that cut the work differently give the same bits because they take these steps on tiles
of the same shape with as many warps: the compiler then gives the scans the same layout, and
so the same order of operations, which is asserted of the compiled code.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def compose(first_gain, first_sum, second_gain, second_sum):
    return first_gain * second_gain, second_gain * first_sum + second_sum


@triton.jit
def add_carry(total, gain, carry):
    """Return ``total + gain * carry``, where a gain may overflow if the carry is 0."""
    return tl.where(carry == 0, 0.0, gain * carry) + total


@triton.jit
def _compose_superblocks(first_gain, first_sum, second_gain, second_sum):
    return first_gain * second_gain, add_carry(second_sum, second_gain, first_sum)


@triton.jit
def entry_at(tile, place):
    """Return the entry of each row of ``tile`` that stands at ``place``."""
    lane = tl.arange(0, tile.shape[1])
    return tl.sum(tl.where(lane[None, :] == place, tile, 0.0), 1)


@triton.jit
def power(gain, EXPONENT: tl.constexpr):
    """Return ``gain`` to ``EXPONENT``, a power of 2, rounded once.

    Plain squaring is off by half of ``EXPONENT`` ulps, always to the same side, which a long
    segment multiplies up. So ``rest`` keeps what each rounding loses.
    """
    rest = tl.zeros_like(gain)
    exponent = 1
    while exponent < EXPONENT:
        square = gain * gain
        split = gain * 134217729.0  # 2**27 + 1: the upper half of the bits, then the lower
        high = split - (split - gain)
        low = gain - high
        error = ((high * high - square) + 2.0 * high * low) + low * low + 2.0 * gain * rest
        error = tl.where(tl.abs(square) < float("inf"), error, 0.0)
        gain = square + error
        rest = error - (gain - square)
        rest = tl.where(tl.abs(gain) < float("inf"), rest, 0.0)
        exponent *= 2
    return gain


@triton.jit
def walk_superblock(
    rewards, returns, bottom, top, gain, block_gain, carry,
    STORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk the entries of each row from ``top`` down to ``bottom``; return their sums.

    ``carry`` is the return of the entry at ``top``; the sums are without it.
    """
    lane = tl.arange(0, BLOCK)
    longest = tl.max(top - bottom, 0)
    total = tl.zeros_like(gain)
    gain_so_far = total + 1.0
    done = 0
    while done < longest:
        index = (top - 1 - done)[:, None] - lane[None, :]  # [ROWS, BLOCK], last entry first
        inside = index >= bottom[:, None]
        reward = tl.load(rewards + index, mask=inside, other=0.0).to(tl.float64)
        # entries before the row's first pass what comes in on unchanged
        gains, sums = tl.associative_scan(
            (tl.where(inside, gain[:, None], 1.0), reward), 1, compose
        )
        if STORE:
            before = add_carry(total, gain_so_far, carry)
            returned = add_carry(sums, gains, before[:, None])
            tl.store(returns + index, returned.to(tl.float32), mask=inside)
            gain_so_far *= block_gain
        # only a full block has another before it
        total = add_carry(entry_at(sums, BLOCK - 1), block_gain, total)
        done += BLOCK
    return total


@triton.jit
def carry_of_superblocks(sums, gain, place, carry):
    """Return the carry past superblock ``place`` of those whose ``sums`` [ROWS, BLOCK] are given.

    ``gain`` is that of a superblock, ``carry`` what comes in behind the first.
    """
    gains, sums = tl.associative_scan(
        (tl.zeros_like(sums) + gain[:, None], sums), 1, _compose_superblocks
    )
    return add_carry(entry_at(sums, place), entry_at(gains, place), carry)
