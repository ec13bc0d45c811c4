# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of importance weights.

One pass reads the tokens, writes their weights, and leaves sums for every ``CHUNK`` of them; one
program merges these sums into the metrics, in an order that depends on their number alone. Before
the pass, a warp sums the logarithms of each segment, in an order that depends on the segment alone;
where segments are grouped, a warp then sums those of each group. No atomics.

Logarithms, ratios and sums are float64, so that windows decide as in the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import DEFAULT, block_shape, launch_on

if TYPE_CHECKING:
    from trajpack.kernels.corrections.importance_weights import Correction

LOG_BOUND = tl.constexpr(20.0)
EACH = 4
"""Neighbouring tokens of a thread in a tile: one store of 16 bytes."""
TILES = 8
"""Tiles of a program, after which it sums over its threads."""
TILE = block_shape("weigh_kernel", DEFAULT).block
CHUNK = TILES * TILE
"""Tokens of a program. Counts of two kinds share an int32, so it is below 2^15."""
SUMS, PARTIALS = 11, 14
"""Sums of a chunk, and sums and maxima: see `weigh_kernel`."""
ROWS, LANES = 4, block_shape("segment_logarithms_kernel", DEFAULT).block
"""Segments of a program, each a warp's, and tokens of a segment that are loaded at once."""
MERGED = 256
"""Chunks that are merged at once."""
ALIGNMENT = 16
"""Alignment of inputs over tokens in bytes, for loads of 16."""
OF_SEGMENTS = ("segment", "geometric")
OUTSIDE = {"truncate": 0, "mask": 1, "keep": 2}


@triton.jit
def _clamped(logarithm):
    """Clamp to ``[-LOG_BOUND, LOG_BOUND]``; NaN stays."""
    clamped = tl.where(logarithm > LOG_BOUND, LOG_BOUND, logarithm)
    return tl.where(clamped < -LOG_BOUND, -LOG_BOUND, clamped)


@triton.jit
def _finished(total, bounded, count, divides, rejection_divides):
    """Return the logarithm of a segment, the one that is rejected by, and a token's part of it."""
    length = tl.maximum(count, 1.0)
    total = tl.where(divides != 0, total / length, total)
    bounded = tl.where(rejection_divides != 0, bounded / length, bounded)
    return total, bounded, 1.0 / length


@triton.jit(
    do_not_specialize=[
        "tokens", "num_segments", "stride", "finish", "divides", "rejection_divides",
    ],
    do_not_specialize_on_alignment=[
        "logprobs", "rollout_logprobs", "mask", "ids", "segments", "table",
    ],
)  # fmt: skip
def segment_logarithms_kernel(
    logprobs, rollout_logprobs, mask, ids, segments, table,
    tokens: tl.int64, num_segments: tl.int64, stride, finish, divides, rejection_divides,
    HAS_IDS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Sum the logarithms of each segment: of its counted tokens, and of the same when clamped.

    Tokens of a segment count if their id is one; without ids, their segment is written.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    known = row < num_segments
    place = segments + tl.minimum(row, num_segments - 1) * stride
    begin = tl.maximum(tl.load(place), 0).to(tl.int64)
    end = tl.minimum(tl.load(place + 1), tokens)
    left = tl.where(known, tl.maximum(end - begin, 0), 0)
    lane = tl.arange(0, LANES)[None, :]
    total = tl.zeros((ROWS, LANES), tl.float64)
    bounded = tl.zeros((ROWS, LANES), tl.float64)
    count = tl.zeros((ROWS, LANES), tl.int32)
    while tl.max(left, 0) > 0:
        inside = lane < left[:, None]
        token = begin[:, None] + lane
        new = tl.load(logprobs + token, mask=inside, other=0)
        old = tl.load(rollout_logprobs + token, mask=inside, other=0)
        counted = tl.load(mask + token, mask=inside, other=0) != 0
        if HAS_IDS:
            segment = tl.load(ids + token, mask=inside, other=-1)
            counted = counted & (segment >= 0) & (segment < num_segments)
        else:
            tl.store(ids + token, (row[:, None] + tl.zeros_like(token)).to(tl.int32), mask=inside)
        logarithm = tl.where(counted, new.to(tl.float64) - old.to(tl.float64), 0.0)
        total += logarithm
        bounded += _clamped(logarithm)
        count += counted.to(tl.int32)
        begin += LANES
        left = tl.maximum(left - LANES, 0)
    total, bounded = tl.sum(total, 1), tl.sum(bounded, 1)
    count = tl.sum(count, 1).to(tl.float64)
    finished, looked_at, part = _finished(total, bounded, count, divides, rejection_divides)
    tl.store(table + row, tl.where(finish != 0, finished, total), mask=known)
    table += num_segments
    tl.store(table + row, tl.where(finish != 0, looked_at, bounded), mask=known)
    tl.store(table + num_segments + row, tl.where(finish != 0, part, count), mask=known)


@triton.jit(
    do_not_specialize=["num_segments", "num_groups", "divides", "rejection_divides"],
    do_not_specialize_on_alignment=["sums", "groups", "table"],
)
def group_logarithms_kernel(
    sums, groups, table, num_segments: tl.int64, num_groups: tl.int64, divides, rejection_divides,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Sum the segments of each group, and write to each of them what holds for all."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = groups + tl.minimum(row, num_groups - 1)
    begin = tl.maximum(tl.load(place), 0).to(tl.int64)
    end = tl.where(row < num_groups, tl.minimum(tl.load(place + 1), num_segments), 0)
    lane = tl.arange(0, LANES)[None, :]
    total = tl.zeros((ROWS, LANES), tl.float64)
    bounded = tl.zeros((ROWS, LANES), tl.float64)
    count = tl.zeros((ROWS, LANES), tl.float64)
    first = begin
    while tl.max(end - first, 0) > 0:
        segment = sums + first[:, None] + lane
        inside = lane < (end - first)[:, None]
        total += tl.load(segment, mask=inside, other=0.0)
        bounded += tl.load(segment + num_segments, mask=inside, other=0.0)
        count += tl.load(segment + 2 * num_segments, mask=inside, other=0.0)
        first += LANES
    total, bounded, part = _finished(
        tl.sum(total, 1), tl.sum(bounded, 1), tl.sum(count, 1), divides, rejection_divides
    )
    first = begin
    while tl.max(end - first, 0) > 0:
        segment = table + first[:, None] + lane
        inside = lane < (end - first)[:, None]
        tl.store(segment, total[:, None] + tl.zeros_like(inside), mask=inside)
        tl.store(segment + num_segments, bounded[:, None] + tl.zeros_like(inside), mask=inside)
        tl.store(segment + 2 * num_segments, part[:, None] + tl.zeros_like(inside), mask=inside)
        first += LANES


@triton.jit
def _load_tile(logprobs, rollout_logprobs, mask, ids, first, tokens, HAS_IDS, TILE, EACH):
    """Return log-probabilities, mask and segments of the tile at ``first``; ids -1 without any."""
    row = tl.arange(0, TILE // EACH)[:, None] * EACH
    lane = row + tl.arange(0, EACH)[None, :]
    segment = tl.full((TILE // EACH, EACH), -1, tl.int32)
    # else all are loaded in the layout of the mask, which could be loaded by 16
    byte = mask + first + lane
    if first + TILE <= tokens:
        new = tl.load(logprobs + first + lane)
        old = tl.load(rollout_logprobs + first + lane)
        counted = tl.load(byte)
        if HAS_IDS:
            segment = tl.load(ids + first + lane).to(tl.int32)
    else:
        inside = lane < tokens - first
        new = tl.load(logprobs + first + lane, mask=inside, other=0)
        old = tl.load(rollout_logprobs + first + lane, mask=inside, other=0)
        counted = tl.load(byte, mask=inside, other=0)
        if HAS_IDS:
            segment = tl.load(ids + first + lane, mask=inside, other=-1).to(tl.int32)
    return new.to(tl.float64), old.to(tl.float64), counted != 0, segment


@triton.jit
def _store_partial(partials, value):
    tl.store(partials + tl.program_id(0), value)
    return partials + tl.num_programs(0)


@triton.jit(
    do_not_specialize=[
        "tokens", "num_segments", "of_segments", "is_one", "outside", "rejects",
        "rejects_segments",
    ],
    do_not_specialize_on_alignment=["table"],
)  # fmt: skip
def weigh_kernel(
    logprobs, rollout_logprobs, mask, ids, table, weights, partials,
    tokens: tl.int64, num_segments: tl.int64,
    of_segments, is_one, outside, low: tl.float64, high: tl.float64,
    rejects, rejects_segments, reject_low: tl.float64, reject_high: tl.float64,
    HAS_IDS: tl.constexpr, TILE: tl.constexpr, EACH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write the weights of ``TILES`` tiles, not yet normalized, and what the metrics are made of.

    The last as columns of ``[PARTIALS, chunks]``: numbers of counted and rejected tokens, and of
    those below and above the window; sums of ratios, bounded ratios, parts of a segment, weights,
    their squares, k1 and k3; maxima of minus a ratio, a ratio and a weight.
    """
    THREADS: tl.constexpr = TILE // EACH
    zero = tl.zeros((THREADS,), tl.float64)
    kept_counts, window_counts = tl.zeros((THREADS,), tl.int32), tl.zeros((THREADS,), tl.int32)
    ratios, bounds, parts = zero, zero, zero
    totals, squares, k1, k3 = zero, zero, zero, zero
    least, most, heaviest = zero + float("inf"), zero - float("inf"), zero
    first = tl.program_id(0).to(tl.int64) * TILES * TILE
    end = tl.minimum(first + TILES * TILE, tokens)
    while first < end:
        new, old, counted, segment = _load_tile(
            logprobs, rollout_logprobs, mask, ids, first, tokens, HAS_IDS, TILE, EACH
        )
        looked_at = tl.zeros_like(new)
        level = looked_at
        part = looked_at + 1.0
        if HAS_IDS:
            counted = counted & (segment >= 0) & (segment < num_segments)
            column = table + segment
            level = tl.load(column, mask=counted, other=0.0)
            looked_at = tl.load(column + num_segments, mask=counted, other=0.0)
            part = tl.load(column + 2 * num_segments, mask=counted, other=0.0)
            part = tl.where(of_segments != 0, part, 1.0)
        own = _clamped(tl.where(counted, new - old, 0.0))
        exponential = tl.exp(own)
        ratio = exponential
        if HAS_IDS:
            ratio = tl.where(of_segments != 0, tl.exp(_clamped(level)), ratio)
            looked_at = tl.where(rejects_segments != 0, looked_at, own)
        else:
            looked_at = own
        is_low, is_high = ratio < low, ratio > high
        nearest = tl.where(is_low, low, tl.where(is_high, high, ratio))
        weight = tl.where(outside == 2, ratio, nearest)
        within = (ratio >= low) & (ratio <= high)
        weight = tl.where((outside == 1) & (within == 0), 0.0, weight)
        weight = tl.where(is_one != 0, 1.0, weight)
        bound = tl.where(counted, weight * part, 0.0)
        kept = (looked_at >= reject_low) & (looked_at <= reject_high)
        kept = counted & (kept | (rejects == 0))
        weight = tl.where(kept, weight, 0.0)
        lane = tl.arange(0, THREADS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
        tl.store(weights + first + lane, weight.to(tl.float32))

        kept_counts += tl.sum(
            counted.to(tl.int32) + ((counted & (kept == 0)).to(tl.int32) << 16), 1
        )
        outer = (counted & is_low).to(tl.int32) + ((counted & is_high).to(tl.int32) << 16)
        window_counts += tl.sum(outer, 1)
        ratios += tl.sum(tl.where(counted, ratio, 0.0), 1)
        bounds += tl.sum(bound, 1)
        parts += tl.sum(tl.where(counted, part, 0.0), 1)
        totals += tl.sum(weight, 1)
        squares += tl.sum(weight * weight, 1)
        k1 -= tl.sum(own, 1)
        k3 += tl.sum(exponential - 1.0 - own, 1)  # 0 where not counted
        least = tl.minimum(least, tl.min(tl.where(counted, ratio, float("inf")), 1))
        most = tl.maximum(most, tl.max(tl.where(counted, ratio, float("-inf")), 1))
        heaviest = tl.maximum(heaviest, tl.max(weight, 1))
        first += TILE
    kept_count = tl.sum(kept_counts, 0)
    window_count = tl.sum(window_counts, 0)
    partials = _store_partial(partials, (kept_count & 0xFFFF).to(tl.float64))
    partials = _store_partial(partials, (kept_count >> 16).to(tl.float64))
    partials = _store_partial(partials, (window_count & 0xFFFF).to(tl.float64))
    partials = _store_partial(partials, (window_count >> 16).to(tl.float64))
    partials = _store_partial(partials, tl.sum(ratios, 0))
    partials = _store_partial(partials, tl.sum(bounds, 0))
    partials = _store_partial(partials, tl.sum(parts, 0))
    partials = _store_partial(partials, tl.sum(totals, 0))
    partials = _store_partial(partials, tl.sum(squares, 0))
    partials = _store_partial(partials, tl.sum(k1, 0))
    partials = _store_partial(partials, tl.sum(k3, 0))
    partials = _store_partial(partials, -tl.min(least, 0))
    partials = _store_partial(partials, tl.max(most, 0))
    _store_partial(partials, tl.max(heaviest, 0))


@triton.jit
def _entry(values, index, lane):
    """Return one of the values of a row."""
    return tl.sum(tl.where(lane == index, values, 0.0), 0)


@triton.jit(do_not_specialize=["num_chunks", "normalize"])
def merge_partials_kernel(
    partials, metrics, num_chunks: tl.int64, normalize,
    SUMS: tl.constexpr, PARTIALS: tl.constexpr, COLUMNS: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Write the metrics, and last what weights are to be multiplied by."""
    row = tl.arange(0, COLUMNS)
    lane = tl.arange(0, MERGED)[None, :]
    sums = tl.zeros((COLUMNS, MERGED), tl.float64)
    extremes = sums - float("inf")
    place = partials + row[:, None] * num_chunks + lane
    while num_chunks > 0:
        inside = (row[:, None] < PARTIALS) & (lane < num_chunks)
        found = tl.load(place, mask=inside, other=0.0)
        sums += found
        extremes = tl.maximum(extremes, tl.where(inside, found, float("-inf")))
        place += MERGED
        num_chunks -= MERGED
    found = tl.where(row < SUMS, tl.sum(sums, 1), tl.max(extremes, 1))

    tokens = _entry(found, 0, row)
    ratios, weights, squares = _entry(found, 4, row), _entry(found, 7, row), _entry(found, 8, row)
    mean = _entry(found, 5, row) / tl.maximum(_entry(found, 6, row), 1e-300)
    scale = tl.where((normalize != 0) & (mean > 0), 1.0 / tl.where(mean > 0, mean, 1.0), 1.0)
    weights, squares = weights * scale, squares * scale * scale
    heaviest = _entry(found, 13, row) * scale
    is_nan = (ratios >= 0) == 0  # a ratio is finite or NaN, which no extreme shows
    least = tl.where(is_nan, ratios, -_entry(found, 11, row))
    most = tl.where(is_nan, ratios, _entry(found, 12, row))
    heaviest = tl.where(weights >= 0, heaviest, weights)
    size = tl.maximum(tokens * squares, 2.2250738585072014e-308)
    size = weights * weights / size

    count = tl.maximum(tokens, 1.0)
    _store_metric(metrics, 0, tokens, tokens)
    _store_metric(metrics, 1, ratios / count, tokens)
    _store_metric(metrics, 2, least, tokens)
    _store_metric(metrics, 3, most, tokens)
    _store_metric(metrics, 4, _entry(found, 2, row) / count, tokens)
    _store_metric(metrics, 5, _entry(found, 3, row) / count, tokens)
    _store_metric(metrics, 6, _entry(found, 1, row) / count, tokens)
    _store_metric(metrics, 7, weights / count, tokens)
    _store_metric(metrics, 8, heaviest, tokens)
    _store_metric(metrics, 9, size, tokens)
    _store_metric(metrics, 10, _entry(found, 9, row) / count, tokens)
    _store_metric(metrics, 11, _entry(found, 10, row) / count, tokens)
    tl.store(metrics + 12, scale)


@triton.jit
def _store_metric(metrics, index, value, tokens):
    tl.store(metrics + index, tl.where(tokens > 0, value, 0.0))


def importance_weights_forward(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    correction: Correction,
    segments: torch.Tensor | None,
    segment_ids: torch.Tensor | None,
    groups: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and metrics of contiguous tensors; segments are None if not needed."""
    tokens = _aligned(logprobs), _aligned(rollout_logprobs), _aligned(loss_mask)
    table = None
    if segments is not None:
        segment_ids, table = segment_logarithms(
            *tokens, correction, segments, segment_ids=segment_ids, finish=groups is None
        )
        if groups is not None:
            table = group_logarithms(table, correction, groups)
    weights, partials = weigh(*tokens, correction, segment_ids, table)
    metrics = merge_partials(partials, normalize=correction.normalize)
    if correction.normalize:
        weights.mul_(metrics[-1])
    return weights, metrics[:-1]


def segment_logarithms(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    correction: Correction,
    segments: torch.Tensor,
    *,
    segment_ids: torch.Tensor | None,
    finish: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a warp for each segment; return ids of tokens, and float64 ``[3, segments]``."""
    tokens, device = mask.shape[0], mask.device
    num_segments = segments.shape[0] - (segments.ndim == 1)
    table = torch.empty((3, num_segments), dtype=torch.float64, device=device)
    ids = segment_ids
    if ids is None:
        ids = torch.full((tokens,), -1, dtype=torch.int32, device=device)
    if num_segments:
        with torch.cuda.device_of(mask):  # Triton launches on the current device
            segment_logarithms_kernel[(triton.cdiv(num_segments, ROWS),)](
                logprobs, rollout_logprobs, mask, ids, segments, table, tokens, num_segments,
                segments.ndim, int(finish), *_divisions(correction),
                HAS_IDS=segment_ids is not None, ROWS=ROWS, LANES=LANES,
                **launch_on("segment_logarithms_kernel", mask.get_device()).options,
            )  # fmt: skip
    return ids, table


def group_logarithms(
    sums: torch.Tensor, correction: Correction, groups: torch.Tensor
) -> torch.Tensor:
    """Launch a warp for each group of segments; return float64 ``[3, segments]``."""
    table, num_groups = torch.empty_like(sums), groups.shape[0] - 1
    if sums.shape[1] and num_groups:
        with torch.cuda.device_of(sums):
            group_logarithms_kernel[(triton.cdiv(num_groups, ROWS),)](
                sums, groups, table, sums.shape[1], num_groups, *_divisions(correction),
                ROWS=ROWS, LANES=32,
                **launch_on("segment_logarithms_kernel", sums.get_device()).options,
            )  # fmt: skip
    return table


def _divisions(correction: Correction) -> tuple[int, int]:
    """Return whether the level is a mean, and whether that of the rejection is."""
    rejection = correction.rejection
    of_rejection = rejection is not None and rejection.level == "geometric"
    return int(correction.level == "geometric"), int(of_rejection)


def weigh(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    correction: Correction,
    segment_ids: torch.Tensor | None,
    table: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a program for each chunk; return weights and float64 ``[PARTIALS, chunks]``."""
    tokens, device, rejection = mask.shape[0], mask.device, correction.rejection
    rejects_segments = rejection is not None and rejection.level in OF_SEGMENTS
    window = rejection.log_window if rejection else (0.0, 0.0)
    num_chunks = triton.cdiv(tokens, CHUNK)
    memory = torch.empty(triton.cdiv(tokens, TILE) * TILE, dtype=torch.float32, device=device)
    partials = torch.empty((PARTIALS, num_chunks), dtype=torch.float64, device=device)
    if num_chunks:
        with torch.cuda.device_of(mask):
            weigh_kernel[(num_chunks,)](
                logprobs, rollout_logprobs, mask,
                None if segment_ids is None else _aligned(segment_ids), table, memory, partials,
                tokens, 0 if table is None else table.shape[1],
                int(correction.level in OF_SEGMENTS), int(correction.level == "none"),
                OUTSIDE[correction.outside], correction.low, correction.high,
                int(rejection is not None), int(rejects_segments), *window,
                HAS_IDS=table is not None, TILE=TILE, EACH=EACH, TILES=TILES,
                **launch_on("weigh_kernel", mask.get_device()).options,
            )  # fmt: skip
    return memory[:tokens], partials


def merge_partials(partials: torch.Tensor, *, normalize: bool) -> torch.Tensor:
    """Launch one program; return the metrics, and last the scale of the weights."""
    metrics = torch.empty(13, dtype=torch.float64, device=partials.device)
    with torch.cuda.device_of(partials):
        merge_partials_kernel[(1,)](
            partials, metrics, partials.shape[1], int(normalize), SUMS=SUMS, PARTIALS=PARTIALS,
            COLUMNS=triton.next_power_of_2(PARTIALS), MERGED=MERGED,
            **launch_on("weigh_kernel", partials.get_device()).options,
        )  # fmt: skip
    return metrics


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, a mask as bytes, copied if it is not aligned."""
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.int8)  # Triton takes a bool pointer for one bit
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
