# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Search of a position among ascending boundaries, by which a tile of tokens finds its segments."""

from __future__ import annotations

import triton
import triton.language as tl

ARITY = tl.constexpr(64)


@triton.jit
def find_segment(starts, count, position, STRIDE: tl.constexpr):
    """Return the last of ``count`` segments that starts at or before ``position``.

    The first starts at 0; starts lie ``STRIDE`` elements apart. 64 are looked at in a round:
    two rounds for 4,096 segments, three for 262,144.
    """
    low = 0
    lane = tl.arange(0, ARITY)
    while count > 1:
        step = tl.cdiv(count, ARITY)
        probe = lane * step
        start = tl.load(starts + (low + probe) * STRIDE, mask=probe < count, other=2147483647)
        skipped = (tl.sum((start <= position).to(tl.int32), 0) - 1) * step
        skipped = tl.maximum(skipped, 0)  # where nothing starts at or before it: stay in bounds
        low += skipped
        count = tl.minimum(step, count - skipped)
    return low


@triton.jit
def find_segments(starts, low, high, positions, STRIDE: tl.constexpr):
    """Return for each of ``positions`` the last segment in [low, high] that starts at or before it.

    Halves the range in every round, the same for all lanes; none where low is high.
    """
    found = tl.zeros_like(positions) + low
    count = high - low + 1
    while count > 1:
        half = count // 2
        start = tl.load(starts + (found + half) * STRIDE)
        found = tl.where(start <= positions, found + half, found)
        count -= half
    return found
