# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Steps of the segment reductions on tiles of rows by lanes: what is added to what, and when.

A fold adds two numbers at a time, so its order is the same in any layout of threads, on any
architecture. Maxima of floats are those of integers in the same order, above which NaN stands.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _is_nan(x):
    return x != x  # noqa: PLR0124


@triton.jit
def _as_summand(x, MAX: tl.constexpr):
    """Return entries as they are summed, or as integers that are ordered as they are."""
    kind: tl.constexpr = x.dtype
    if MAX and kind == tl.float32:
        bits = tl.where(_is_nan(x), 0x7FC00000, x.to(tl.int32, bitcast=True))
        summand = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    elif MAX and kind == tl.float64:
        bits = tl.where(_is_nan(x), 0x7FF8000000000000, x.to(tl.int64, bitcast=True))
        summand = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    elif MAX:
        summand = x
    elif kind.is_floating():
        summand = x.to(tl.float64)
    else:
        summand = x.to(tl.int64)
    return summand


@triton.jit
def of_nothing(x, MAX: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Return a tile of what no entry at all comes to."""
    kind: tl.constexpr = x.dtype.element_ty
    if not MAX:
        nothing = tl.zeros((ROWS, LANES), kind)
    elif kind.is_floating():
        nothing = tl.full((ROWS, LANES), float("-inf"), kind)
    else:
        nothing = tl.full((ROWS, LANES), -(2 ** (kind.primitive_bitwidth - 1)), kind)
    return _as_summand(nothing, MAX)


@triton.jit
def join(left, right, MAX: tl.constexpr):
    return tl.maximum(left, right) if MAX else left + right


@triton.jit
def _fold(tile, MAX: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Return what each row comes to; floats are added in halves, which no layout can change."""
    if MAX:
        tile = tl.max(tile, 1)
    elif tile.dtype.is_floating():
        for level in tl.static_range(1, LANES.bit_length()):
            tile = tl.sum(tl.reshape(tile, (ROWS, 2, LANES >> level)), 1)
        tile = tl.reshape(tile, (ROWS,))
    else:
        tile = tl.sum(tile, 1)
    return tile


@triton.jit
def reduce_chunk(
    x, mask, first, left, MAX: tl.constexpr, COUNT: tl.constexpr, HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Reduce the next ``CHUNK`` of the ``left`` entries of each row, from ``first`` (int64) on.

    Return, by lane, what each row comes to and, where ``COUNT``, the entries that counted.
    """
    lane = tl.arange(0, LANES)
    nothing = of_nothing(x, MAX, ROWS, LANES)
    lanes = nothing
    counts = tl.zeros((ROWS, LANES), tl.int32)
    left = tl.minimum(left, CHUNK)
    longest = tl.max(left, 0)
    done = 0
    while done < longest:
        for step in tl.static_range(STEPS):
            place = done + step * LANES + lane
            counted = place[None, :] < left[:, None]
            offset = first[:, None] + place[None, :]
            entry = tl.load(x + offset, mask=counted, other=0)
            if HAS_MASK:
                counted = tl.load(mask + offset, mask=counted, other=0) != 0
            lanes = join(lanes, tl.where(counted, _as_summand(entry, MAX), nothing), MAX)
            if COUNT:
                counts += counted.to(tl.int32)
        done += STEPS * LANES
    return lanes, counts


@triton.jit
def bounds_of_rows(segments, num_entries, num_segments, stride, ROWS: tl.constexpr):
    """Return for each row of a program its segment, where that begins, and its length."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bounds = segments + row.to(tl.int64) * stride
    begin = tl.load(bounds, mask=row < num_segments, other=0)
    end = tl.load(bounds + 1, mask=row < num_segments, other=0)
    begin = tl.maximum(begin, 0)  # inside, whatever boundaries say
    return row, begin, tl.maximum(tl.minimum(end, num_entries), begin) - begin


@triton.jit
def store_results(
    x, out, row, num_segments, lanes, counts, length, MAX: tl.constexpr, MEAN: tl.constexpr,
    HAS_MASK: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    total = _fold(lanes, MAX, ROWS, LANES)
    if MEAN:
        count = length
        if HAS_MASK:
            count = tl.sum(counts, 1)
        total = total.to(tl.float64) / tl.maximum(count, 1).to(tl.float64)
    kind: tl.constexpr = out.dtype.element_ty
    result = total
    if MAX and kind == tl.float32:
        result = (total ^ ((total >> 31) & 0x7FFFFFFF)).to(kind, bitcast=True) + 0.0
    elif MAX and kind == tl.float64:
        result = (total ^ ((total >> 63) & 0x7FFFFFFFFFFFFFFF)).to(kind, bitcast=True) + 0.0
    result = result.to(kind)
    if kind.is_floating():
        result = tl.where(_is_nan(result), float("nan"), result)  # of one kind only
    tl.store(out + row, result, mask=row < num_segments)
