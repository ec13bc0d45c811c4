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
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import DEFAULT, block_shape, launch_on
from trajpack.kernels.search_triton import find_segment, find_segments

ROWS = 4
LANES = block_shape("segment_reduce", DEFAULT).block
"""The same on every architecture: with CHUNK it settles the order of the sums."""
STEPS = 8
"""Loads of a thread that follow each other in a round. How many of them the compiler issues before
it waits for the first is in `trajpack.kernels.block_shapes`."""
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
def _neutral_tile(x, MAX: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Return a tile of the result of no entries."""
    kind: tl.constexpr = x.dtype.element_ty
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
def _fold(tile, MAX: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Reduce each row; floats are added in halves, an order that no layout can change."""
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
def _reduce_chunk(
    x, mask, first, left, MAX: tl.constexpr, COUNT: tl.constexpr, HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Reduce the next ``CHUNK`` of the ``left`` entries of each row, from ``first`` (int64) on.

    Return the result of each lane and, where ``COUNT``, the entries that counted.
    """
    lane = tl.arange(0, LANES)
    nothing = _neutral_tile(x, MAX, ROWS, LANES)
    lanes = nothing
    counts = tl.zeros((ROWS, LANES), tl.int32)
    left = tl.minimum(left, CHUNK)
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
            if HAS_MASK:
                counted = tl.load(mask + offset, mask=counted, other=0) != 0
            marks = marks + (counted,)  # type: ignore[assignment]
        for step in tl.static_range(STEPS):
            summand = tl.where(marks[step], _as_summand(entries[step], MAX), nothing)
            lanes = _join(lanes, summand, MAX)
            if COUNT:
                counts += marks[step].to(tl.int32)
        done += STEPS * LANES
    return lanes, counts


@triton.jit
def _bounds_of_rows(segments, num_entries, num_segments, stride, ROWS: tl.constexpr):
    """Return the segment of each row of a program, its first entry and its length."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bounds = segments + row.to(tl.int64) * stride
    begin = tl.load(bounds, mask=row < num_segments, other=0)
    end = tl.load(bounds + 1, mask=row < num_segments, other=0)
    begin = tl.maximum(begin, 0)  # in bounds even for bad boundaries
    return row, begin, tl.maximum(tl.minimum(end, num_entries), begin) - begin


@triton.jit
def _store_results(
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
        result = tl.where(_is_nan(result), float("nan"), result)  # one bit pattern of NaN
    tl.store(out + row, result, mask=row < num_segments)


@triton.jit(
    do_not_specialize=["num_entries", "num_segments", "stride"],
    do_not_specialize_on_alignment=["x", "mask", "segments", "out"],
)
def segment_reduce_kernel(
    x, mask, segments, out, num_entries, num_segments, stride,
    MAX: tl.constexpr, MEAN: tl.constexpr, HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A row is a segment, walked chunk by chunk."""
    row, begin, length = _bounds_of_rows(segments, num_entries, num_segments, stride, ROWS)
    lanes = _neutral_tile(x, MAX, ROWS, LANES)
    counts = tl.zeros((ROWS, LANES), tl.int32)
    first, left = begin.to(tl.int64), length
    while tl.max(left, 0) > 0:
        of_chunk, counted = _reduce_chunk(
            x, mask, first, left, MAX, MEAN and HAS_MASK, HAS_MASK, ROWS, LANES, STEPS, CHUNK
        )
        lanes = _join(lanes, of_chunk, MAX)
        counts += counted
        first += CHUNK
        left = tl.maximum(left - CHUNK, 0)
    _store_results(
        x, out, row, num_segments, lanes, counts, length, MAX, MEAN, HAS_MASK, ROWS, LANES
    )


@triton.jit(
    do_not_specialize=["num_entries", "num_segments", "num_windows"],
    do_not_specialize_on_alignment=["x", "mask", "cu_seqlens", "partials", "counts"],
)
def chunk_partials_kernel(
    x, mask, cu_seqlens, partials, counts, num_entries, num_segments, num_windows,
    MAX: tl.constexpr, MEAN: tl.constexpr, HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A row is the chunk that starts in a window and does not begin its segment, if there is one.

    Window w is the entries [w * CHUNK, (w + 1) * CHUNK). Such a chunk's segment holds the entry
    at which the window starts, so there is at most one to a window; its lanes go there.
    """
    exists = tl.program_id(0) * ROWS + tl.arange(0, ROWS) < num_windows
    window = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), num_windows - 1)
    position = window * CHUNK
    low = find_segment(cu_seqlens, num_segments, tl.min(position, 0), 1)
    high = find_segment(cu_seqlens, num_segments, tl.max(position, 0), 1)
    segment = find_segments(cu_seqlens, low, high, position, 1)
    begin = tl.maximum(tl.load(cu_seqlens + segment), 0)
    end = tl.minimum(tl.load(cu_seqlens + segment + 1), num_entries)
    left = tl.maximum(tl.maximum(end, position) - position - begin % CHUNK, 0)
    left = tl.where(exists & (begin < position), left, 0)
    first = position.to(tl.int64) + begin % CHUNK
    lanes, counted = _reduce_chunk(
        x, mask, first, left, MAX, MEAN and HAS_MASK, HAS_MASK, ROWS, LANES, STEPS, CHUNK
    )
    place = window[:, None] * LANES + tl.arange(0, LANES)[None, :]
    tl.store(partials + place, lanes, mask=left[:, None] > 0)
    if MEAN and HAS_MASK:
        tl.store(counts + place, counted, mask=left[:, None] > 0)


@triton.jit(
    do_not_specialize=["num_entries", "num_segments"],
    do_not_specialize_on_alignment=["x", "mask", "cu_seqlens", "out", "partials", "counts"],
)
def chunk_fold_kernel(
    x, mask, cu_seqlens, out, partials, counts, num_entries, num_segments,
    MAX: tl.constexpr, MEAN: tl.constexpr, HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A row is a segment: its first chunk, and the partial results of the others."""
    row, begin, length = _bounds_of_rows(cu_seqlens, num_entries, num_segments, 1, ROWS)
    nothing = _neutral_tile(x, MAX, ROWS, LANES)
    of_chunk, sum_of_counts = _reduce_chunk(
        x, mask, begin.to(tl.int64), length, MAX, MEAN and HAS_MASK, HAS_MASK,
        ROWS, LANES, STEPS, CHUNK,
    )  # fmt: skip
    lanes = _join(nothing, of_chunk, MAX)
    others = tl.maximum(length - 1, 0) // CHUNK
    most = tl.max(others, 0)
    window = begin // CHUNK + 1
    place = window[:, None] * LANES + tl.arange(0, LANES)[None, :]
    done = 0
    while done < most:
        for step in tl.static_range(STEPS):
            known = (done + step < others)[:, None]
            partial = tl.load(partials + place + step * LANES, mask=known, other=0)
            lanes = _join(lanes, tl.where(known, partial, nothing), MAX)
            if MEAN and HAS_MASK:
                sum_of_counts += tl.load(counts + place + step * LANES, mask=known, other=0)
        place += STEPS * LANES
        done += STEPS
    _store_results(
        x, out, row, num_segments, lanes, sum_of_counts, length, MAX, MEAN, HAS_MASK, ROWS, LANES
    )


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
    few = x.shape[0] <= FEWEST_ENTRIES or (max_seqlen is not None and max_seqlen <= LONGEST_ROW)
    if few or segments.ndim == 2:
        return segment_rows(x, segments, mask, out, reduction)
    partials, counts = chunk_partials(x, segments, mask, reduction)
    return chunk_fold(x, segments, mask, out, reduction, partials, counts)


def _options(x: torch.Tensor, mask: torch.Tensor | None, reduction: str) -> dict[str, int | bool]:
    return {
        "MAX": reduction == "max",
        "MEAN": reduction == "mean",
        "HAS_MASK": mask is not None,
        "ROWS": ROWS,
        "LANES": LANES,
        "STEPS": STEPS,
        "CHUNK": CHUNK,
        **launch_on("segment_reduce", x.get_device()).options,
    }


def segment_rows(
    x: torch.Tensor,
    segments: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    reduction: str,
) -> None:
    """Launch a row for each segment."""
    if out.shape[0]:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            segment_reduce_kernel[(triton.cdiv(out.shape[0], ROWS),)](
                _as_bytes(x), _as_bytes(x if mask is None else mask), segments, out,
                x.shape[0], out.shape[0], segments.ndim, **_options(x, mask, reduction),
            )  # fmt: skip


def chunk_partials(
    x: torch.Tensor, cu_seqlens: torch.Tensor, mask: torch.Tensor | None, reduction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a row for each window; return ``[windows, LANES]`` partial results, and counts."""
    windows = triton.cdiv(x.shape[0], CHUNK)
    counted = windows if reduction == "mean" and mask is not None else 0
    dtype = _dtype_of_partials(x, reduction)
    partials = torch.empty((windows, LANES), dtype=dtype, device=x.device)
    counts = torch.empty((counted, LANES), dtype=torch.int32, device=x.device)
    num_segments = cu_seqlens.shape[0] - 1
    if windows and num_segments:
        with torch.cuda.device_of(x):
            chunk_partials_kernel[(triton.cdiv(windows, ROWS),)](
                _as_bytes(x), _as_bytes(x if mask is None else mask), cu_seqlens, partials, counts,
                x.shape[0], num_segments, windows, **_options(x, mask, reduction),
            )  # fmt: skip
    return partials, counts


def chunk_fold(
    x: torch.Tensor,
    cu_seqlens: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    reduction: str,
    partials: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Launch a row for each segment, with the partial results of the windows."""
    if out.shape[0]:
        with torch.cuda.device_of(x):
            chunk_fold_kernel[(triton.cdiv(out.shape[0], ROWS),)](
                _as_bytes(x), _as_bytes(x if mask is None else mask), cu_seqlens, out, partials,
                counts, x.shape[0], out.shape[0], **_options(x, mask, reduction),
            )  # fmt: skip


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return bools as int8, which the kernels read."""
    return tensor.view(torch.int8) if tensor.dtype == torch.bool else tensor


def _dtype_of_partials(x: torch.Tensor, reduction: str) -> torch.dtype:
    if reduction == "max":
        return {4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.float64 if x.is_floating_point() else torch.int64
