# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Where the segments of a scan over tokens lie, what stands behind them, and their blocks."""

import triton
import triton.language as tl

from trajpack.kernels.scan.credit_scan_steps_triton import NEXT_VALUES
from trajpack.kernels.search_triton import find_segment


@triton.jit
def bounds_of(source, cu_seqlens, segment):
    """Return a segment's first and past-last position, and its first and last piece."""
    first = tl.load(cu_seqlens + segment)
    past = tl.load(cu_seqlens + segment + 1)
    begin = first
    end = past
    pieces = source[3]
    if pieces is not None:
        begin = tl.load(pieces[0] + first)
        end = tl.load(pieces[0] + past)
    return begin, end, first, tl.maximum(past - 1, 0)


@triton.jit
def rates_of(rates, segment, gamma, lam):
    gammas, lams = rates
    if gammas is not None:
        gamma = tl.load(gammas + segment)
    if lams is not None:
        lam = tl.load(lams + segment)
    return gamma + tl.zeros((), tl.float64), lam + tl.zeros((), tl.float64)


@triton.jit
def state_behind(source, bootstrap, segment, last, gamma, SCAN: tl.constexpr):
    """Return the state behind a segment's last entry."""
    state = tl.zeros((), tl.float64)
    if bootstrap is not None and SCAN <= NEXT_VALUES:
        pieces = source[3]
        goes_on = True
        if pieces is not None:  # noqa: SIM102 - the compiler takes one by one
            if len(pieces[6]) > 0:
                goes_on = tl.load(pieces[6][0] + last) != 0
        value = tl.load(bootstrap + segment, mask=goes_on, other=0.0)
        state += gamma * value.to(tl.float64)
    return state


@triton.jit
def fill_with_zeros(outputs, turn_ids, tile, num_tokens, BLOCK: tl.constexpr):
    """Put out 0 for the tokens that no turn generated, which no piece puts out.

    Backward, as the scans read: forward, the compiler would lay out the kernel's scan for this.
    """
    at = tile * BLOCK + BLOCK - 1 - tl.arange(0, BLOCK)
    rest = tl.load(turn_ids + at, mask=at < num_tokens, other=0) < 0
    main, other = outputs
    tl.store(main + at, tl.zeros((BLOCK,), tl.float32), mask=rest)
    tl.store(other + at, tl.zeros((BLOCK,), tl.float32), mask=rest)


@triton.jit
def block_of_window(source, cu_seqlens, num_segments, num_pieces, window, BLOCK: tl.constexpr):
    """Find the block that ends in a window and does not begin its segment.

    Window w is the positions [w * BLOCK, (w + 1) * BLOCK). Such a block ends in a window whose
    first position is its segment's too, so there is at most one to a window. Return segment,
    blocks behind it, and whether there is one.
    """
    pieces = source[3]
    if pieces is None:
        segment = find_segment(cu_seqlens, num_segments, window * BLOCK, 1)
    else:
        piece = find_segment(pieces[0], num_pieces, window * BLOCK, 1)
        segment = find_segment(cu_seqlens, num_segments, piece, 1)
    begin, end, _, _ = bounds_of(source, cu_seqlens, segment)
    behind = (end - 1) // BLOCK - window
    exists = (end > window * BLOCK) & (end - behind * BLOCK - begin > BLOCK)
    return segment, behind, exists
