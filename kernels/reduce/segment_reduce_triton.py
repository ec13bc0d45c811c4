# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Segment reductions in Triton: rows of entries, gathered in lanes and folded in pairs.

The order of a float sum is the segment's own, counted from its start:

- entry i of a chunk of ``CHUNK`` is added to lane i modulo ``LANES``, one after another;
- the lanes of chunks are added up chunk by chunk;
- at the very end the lanes are folded in halves.

A row is a whole segment in one launch, or one chunk, whose lanes a second launch adds to the
others: the same steps, hence the same bits. No float is added atomically. A fold adds two numbers
at a time, so its order is the same in any layout of threads, on any architecture. Maxima of floats
are those of integers in the same order, above which NaN stands.

``FORM`` is whether a maximum is taken, and a mean; ``SIZES`` are ROWS, LANES, STEPS and CHUNK.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import block_shape
from trajpack.kernels.launches import cdiv, launch_on, ways
from trajpack.kernels.search_triton import find_segment, find_segments

ROWS = 4
LANES = block_shape("segment_reduce").block
"""The same on every architecture: with CHUNK it settles the order of the sums."""
STEPS = 8
"""Loads of a thread that follow each other in a round."""
CHUNK = 2048
LONGEST_ROW = 4096
"""Segments no longer than this are one row each: more rows would only cost a second launch."""
FEWEST_ENTRIES = 8192
"""With so few entries in all, a second launch costs more than the steps that it saves."""


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
def _neutral_tile(x, MAX: tl.constexpr, SIZES: tl.constexpr):
    """Return a tile of the result of no entries."""
    kind: tl.constexpr = x.dtype.element_ty
    ROWS: tl.constexpr = SIZES[0]
    LANES: tl.constexpr = SIZES[1]
    if not MAX:
        nothing = tl.zeros((ROWS, LANES), kind)
    elif kind.is_floating():
        nothing = tl.full((ROWS, LANES), float("-inf"), kind)
    else:
        nothing = tl.full((ROWS, LANES), -(2 ** (kind.primitive_bitwidth - 1)), kind)
    return _as_summand(nothing, MAX)


@triton.jit
def _join(left, right, MAX: tl.constexpr):
    return tl.maximum(left, right) if MAX else left + right


@triton.jit
def _reduce_chunk(x, mask, first, left, FORM: tl.constexpr, SIZES: tl.constexpr):
    """Reduce the next ``CHUNK`` of the ``left`` entries of each row, from ``first`` (int64) on.

    Return the result of each lane and, for masked means, the entries that counted.
    """
    ROWS: tl.constexpr = SIZES[0]
    LANES: tl.constexpr = SIZES[1]
    STEPS: tl.constexpr = SIZES[2]
    lane = tl.arange(0, LANES)
    nothing = _neutral_tile(x, FORM[0], SIZES)
    lanes = nothing
    counts = tl.zeros((ROWS, LANES), tl.int32)
    left = tl.minimum(left, SIZES[3])
    longest = tl.max(left, 0)
    done = 0
    while done < longest:
        entries = ()
        marks = ()
        for step in tl.static_range(STEPS):  # all loads come before the first sum
            place = done + step * LANES + lane
            counted = place[None, :] < left[:, None]
            offset = first[:, None] + place[None, :]
            entry = tl.load(x + offset, mask=counted, other=0)
            entries = entries + (entry,)  # type: ignore[assignment]
            if mask is not None:
                counted = tl.load(mask + offset, mask=counted, other=0) != 0
            marks = marks + (counted,)  # type: ignore[assignment]
        for step in tl.static_range(STEPS):
            summand = tl.where(marks[step], _as_summand(entries[step], FORM[0]), nothing)
            lanes = _join(lanes, summand, FORM[0])
            if FORM[1] and mask is not None:
                counts += marks[step].to(tl.int32)
        done += STEPS * LANES
    return lanes, counts


@triton.jit(
    do_not_specialize=["num_entries", "num_segments", "stride"],
    do_not_specialize_on_alignment=["x", "mask", "segments", "out", "partials", "counts"],
)
def segment_reduce_kernel(  # noqa: C901, PLR0912 - branches of the compiler
    x, mask, segments, out, partials, counts, num_entries, num_segments, stride,
    FORM: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """A row is a segment, walked chunk by chunk; or its first chunk, and ``partials`` of others."""
    ROWS: tl.constexpr = SIZES[0]
    LANES: tl.constexpr = SIZES[1]
    STEPS: tl.constexpr = SIZES[2]
    MAX: tl.constexpr = FORM[0]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bounds = segments + row.to(tl.int64) * stride
    begin = tl.load(bounds, mask=row < num_segments, other=0)
    end = tl.load(bounds + 1, mask=row < num_segments, other=0)
    begin = tl.maximum(begin, 0)  # in bounds even for bad boundaries
    length = tl.maximum(tl.minimum(end, num_entries), begin) - begin
    nothing = _neutral_tile(x, MAX, SIZES)
    first, left = begin.to(tl.int64), length
    if partials is None:
        lanes = nothing
        counted = tl.zeros((ROWS, LANES), tl.int32)
        while tl.max(left, 0) > 0:
            of_chunk, counted_there = _reduce_chunk(x, mask, first, left, FORM, SIZES)
            lanes = _join(lanes, of_chunk, MAX)
            counted += counted_there
            first += SIZES[3]
            left = tl.maximum(left - SIZES[3], 0)
    else:
        lanes, counted = _reduce_chunk(x, mask, first, left, FORM, SIZES)
        others = tl.maximum(length - 1, 0) // SIZES[3]
        most = tl.max(others, 0)
        place = (begin // SIZES[3] + 1)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        done = 0
        while done < most:
            for step in tl.static_range(STEPS):
                known = (done + step < others)[:, None]
                partial = tl.load(partials + place + step * LANES, mask=known, other=0)
                lanes = _join(lanes, tl.where(known, partial, nothing), MAX)
                if FORM[1] and mask is not None:
                    counted += tl.load(counts + place + step * LANES, mask=known, other=0)
            place += STEPS * LANES
            done += STEPS
    if MAX:
        total = tl.max(lanes, 1)
    elif lanes.dtype.is_floating():  # in halves, an order that no layout can change
        for level in tl.static_range(1, LANES.bit_length()):
            lanes = tl.sum(tl.reshape(lanes, (ROWS, 2, LANES >> level)), 1)
        total = tl.reshape(lanes, (ROWS,))
    else:
        total = tl.sum(lanes, 1)
    if FORM[1]:
        count = length
        if mask is not None:
            count = tl.sum(counted, 1)
        total = total.to(tl.float64) / tl.maximum(count, 1).to(tl.float64)
    kind: tl.constexpr = out.dtype.element_ty
    result = total
    if MAX and kind == tl.float32:
        result = (total ^ ((total >> 31) & 0x7FFFFFFF)).to(kind, bitcast=True) + 0.0
    elif MAX and kind == tl.float64:
        result = (total ^ ((total >> 63) & 0x7FFFFFFFFFFFFFFF)).to(kind, bitcast=True) + 0.0
    result = result.to(kind)
    if kind.is_floating():
        result = tl.where(_is_nan(result), float("nan"), result)  # one bit pattern of NaN
    tl.store(out + row, result, mask=row < num_segments)


@triton.jit(
    do_not_specialize=["num_entries", "num_segments", "num_windows"],
    do_not_specialize_on_alignment=["x", "mask", "cu_seqlens", "partials", "counts"],
)
def chunk_partials_kernel(
    x, mask, cu_seqlens, partials, counts, num_entries, num_segments, num_windows,
    FORM: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """A row is the chunk that starts in a window and does not begin its segment, if there is one.

    Window w is the entries [w * CHUNK, (w + 1) * CHUNK). Such a chunk's segment holds the entry
    at which the window starts, so there is at most one to a window; its lanes go there.
    """
    row = tl.program_id(0) * SIZES[0] + tl.arange(0, SIZES[0])
    window = tl.minimum(row, num_windows - 1)
    position = window * SIZES[3]
    low = find_segment(cu_seqlens, num_segments, tl.min(position, 0), 1)
    high = find_segment(cu_seqlens, num_segments, tl.max(position, 0), 1)
    segment = find_segments(cu_seqlens, low, high, position, 1)
    begin = tl.maximum(tl.load(cu_seqlens + segment), 0)
    end = tl.minimum(tl.load(cu_seqlens + segment + 1), num_entries)
    left = tl.maximum(tl.maximum(end, position) - position - begin % SIZES[3], 0)
    left = tl.where((row < num_windows) & (begin < position), left, 0)
    first = position.to(tl.int64) + begin % SIZES[3]
    lanes, counted = _reduce_chunk(x, mask, first, left, FORM, SIZES)
    place = window[:, None] * SIZES[1] + tl.arange(0, SIZES[1])[None, :]
    tl.store(partials + place, lanes, mask=left[:, None] > 0)
    if FORM[1] and mask is not None:
        tl.store(counts + place, counted, mask=left[:, None] > 0)


def segment_reduce_forward(
    x: torch.Tensor,
    segments: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    *,
    reduction: str,
    max_seqlen: int | None,
) -> None:
    """Launch one kernel or two, by the sizes known to the host; all tensors are contiguous."""
    entries, num_segments = x.shape[0], out.shape[0]
    if not num_segments:
        return
    few = entries <= FEWEST_ENTRIES or (max_seqlen is not None and max_seqlen <= LONGEST_ROW)
    rows = x.view(torch.int8) if x.dtype == torch.bool else x  # which the kernels read
    marks = None if mask is None else mask.view(torch.int8)
    form = (reduction == "max", reduction == "mean")
    constants = {"FORM": form, "SIZES": (ROWS, LANES, STEPS, CHUNK)}
    launch = launch_on("segment_reduce", x.get_device())
    for has_parts in ways(not few) if segments.ndim == 1 else (False,):
        partials = counts = None
        if has_parts:
            windows = cdiv(entries, CHUNK)
            dtype = torch.float64 if x.is_floating_point() else torch.int64
            if reduction == "max":
                dtype = {4: torch.int32, 8: torch.int64}[x.element_size()]
            partials = torch.empty((windows, LANES), dtype=dtype, device=x.device)
            if reduction == "mean" and mask is not None:
                counts = torch.empty((windows, LANES), dtype=torch.int32, device=x.device)
            launch(
                chunk_partials_kernel, cdiv(windows, ROWS), rows, marks, segments, partials,
                counts, entries, num_segments, windows, **constants,
            )  # fmt: skip
        launch(
            segment_reduce_kernel, cdiv(num_segments, ROWS), rows, marks, segments, out, partials,
            counts, entries, num_segments, segments.ndim, **constants,
        )  # fmt: skip
