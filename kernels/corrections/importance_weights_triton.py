# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of importance weights.

One pass reads the tokens, writes their weights, and leaves sums for every ``CHUNK`` of them where
metrics or a mean are asked for. A last launch merges these sums, in an order that depends on their
number alone, and divides the weights by their mean if it is asked to. Before the pass, `sum_slots`
sums the logarithms of segments.

A logarithm is a float32 number, as in the reference, so windows decide alike. Its exponential is a
polynomial in float32, within 2e-7. Sums over tokens are float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import DEFAULT, block_shape
from trajpack.kernels.corrections.importance_weights import OF_SEGMENTS, Correction
from trajpack.kernels.corrections.slots import LOG_BOUND, UNIT, Places
from trajpack.kernels.corrections.slots_triton import (
    ABOVE,
    APART,
    BELOW,
    CELLS,
    NAN,
    WORDS,
    load_tokens,
    number_with_tokens,
    slots_of,
    sum_slots,
)
from trajpack.kernels.launches import cdiv, launch_on
from trajpack.kernels.reduce.whiten_triton import aligned

EACH = 4
"""Neighbouring tokens of a thread in a tile: one store of 16 bytes."""
TILES = 8
"""Tiles of a program, after which it sums over its threads."""
TILE = block_shape("weigh_kernel", DEFAULT).block
CHUNK = TILES * TILE
"""Tokens of a program. Counts of two kinds share an int32, so it is below 2^15."""
SUMS, PARTIALS = 10, 13
"""Sums of a chunk, and sums and maxima: see `weigh_kernel`."""
MERGED = 256
"""Chunks that are merged at once."""
MOST_PROGRAMS = 1024
"""Programs that scale weights: each merges the sums of all chunks."""
OUTSIDE = {"truncate": 0, "mask": 1, "keep": 2}
_UNIT, _BOUND, _WORDS = tl.constexpr(UNIT), tl.constexpr(LOG_BOUND), tl.constexpr(WORDS)


@triton.jit
def _clamped(logarithm):
    """Clamp to ``[-LOG_BOUND, LOG_BOUND]``; NaN stays."""
    clamped = tl.where(logarithm > _BOUND, _BOUND, logarithm)
    return tl.where(clamped < -_BOUND, -_BOUND, clamped)


@triton.jit
def _exponential(x):
    """Return exp(x) and exp(x) - 1 - x of float32 numbers within ``LOG_BOUND``."""
    ROUNDS: tl.constexpr = 12582912.0  # 1.5 * 2^23: a sum with it has an integer as its low bits
    rounded = tl.fma(x, 1.4426950408889634, ROUNDS)
    halvings = ROUNDS - rounded
    rest = tl.fma(halvings, 0.693359375, x)  # ln 2 in two parts, the first of 9 bits
    rest = tl.fma(halvings, -2.12194440e-4, rest)
    tail = tl.fma(rest, 1 / 5040, 1 / 720)
    tail = tl.fma(tail, rest, 1 / 120)
    tail = tl.fma(tail, rest, 1 / 24)
    tail = tl.fma(tail, rest, 1 / 6)
    tail = tl.fma(tail, rest, 0.5) * (rest * rest)
    power = ((rounded.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    more = rest + tail
    beyond = tl.where(halvings == 0, tail, tl.fma(power, more, (power - 1.0) - x))
    return tl.fma(power, more, power), beyond


@triton.jit
def _of_slot(row, word, place, counted, divides, has_marks):
    """Return a sum of logarithms of each token's slot, or its mean, as float32."""
    total = tl.load(row + place, mask=counted, other=0).to(tl.float64) * _UNIT
    total = total.to(tl.float32)
    if divides != 0:
        total = tl.div_rn(total, (word & 0xFFFFFFFF).to(tl.float32))
    if has_marks != 0:
        above, below = (word & ABOVE) != 0, (word & BELOW) != 0
        if place == 1:
            total = tl.where(above, float("inf"), tl.where(below, float("-inf"), total))
            total = tl.where(above & below, float("nan"), total)
        total = tl.where((word & NAN) != 0, float("nan"), total)
    return total


@triton.jit
def _store_each(place, step, values):
    for number in tl.static_range(len(values)):
        tl.store(place + number * step, values[number].to(tl.float64))


@triton.jit(
    do_not_specialize=[
        "num_segments", "num_slots", "tokens", "of_segments", "divides", "is_one", "outside",
        "rejects", "rejects_segments", "rejection_divides",
    ],
    do_not_specialize_on_alignment=["bounds", "owners"],
)  # fmt: skip
def weigh_kernel(
    logprobs, rollout_logprobs, mask, bounds, ids, owners, num_segments, num_slots, table, weights,
    partials, tokens: tl.int64, of_segments, divides, is_one, outside,
    least_weight, most_weight, low, high,
    rejects, rejects_segments, rejection_divides, reject_low, reject_high,
    TILE: tl.constexpr, EACH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write the weights of ``TILES`` tiles, not yet normalized, and what the metrics are made of.

    The last, if there are ``partials``, as columns of ``[PARTIALS, chunks]``: numbers of counted
    and rejected tokens, and of those below and above the window; sums of ratios, of weights before
    rejection (of one for each segment), of weights, their squares, k1 and k3; maxima of minus a
    ratio, a ratio and a weight.
    """
    THREADS: tl.constexpr = TILE // EACH
    lane = tl.arange(0, THREADS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    zero = tl.zeros((THREADS,), tl.float64)
    kept_counts, window_counts = tl.zeros((THREADS,), tl.int32), tl.zeros((THREADS,), tl.int32)
    ratios, bound_sums, totals, squares, k1, k3 = zero, zero, zero, zero, zero, zero
    least = tl.full((THREADS,), float("inf"), tl.float32)
    most = -least
    heaviest = tl.zeros((THREADS,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * TILES * TILE
    end = tl.minimum(first + TILES * TILE, tokens)
    while first < end:
        count, segment, new, old = load_tokens(
            mask + first + lane, ids, logprobs, rollout_logprobs, first, lane, tokens, False, TILE
        )
        counted = count != 0
        part = tl.full((THREADS, EACH), 1.0, tl.float32)
        if table is not None:
            slot = slots_of(
                bounds, ids, owners, num_segments, num_slots, segment, first, lane, tokens, TILE
            )
            counted = counted & (slot >= 0)
        own = _clamped(tl.where(counted, (new - old).to(tl.float32), 0.0))
        own_ratio, beyond = _exponential(own)
        level, ratio, looked_at = own, own_ratio, own
        if table is not None:
            row = table + slot.to(tl.int64) * _WORDS
            word = tl.load(row, mask=counted, other=1)
            has_marks = tl.max(tl.max((word >> 32).to(tl.int32), 1), 0)
            if of_segments != 0:
                level = _clamped(_of_slot(row, word, 1, counted, divides, has_marks))
                ratio, _unused = _exponential(level)
                part = 1.0 / (word & 0xFFFFFFFF).to(tl.float32)
            if rejects_segments != 0:
                looked_at = _of_slot(row, word, 2, counted, rejection_divides, has_marks)
        is_low, is_high = level < low, level > high
        weight = ratio
        if outside == 0:
            weight = tl.where(is_low, least_weight, tl.where(is_high, most_weight, ratio))
        elif outside == 1:
            weight = tl.where((level >= low) & (level <= high), ratio, 0.0)
        weight = tl.where(is_one != 0, 1.0, weight)
        kept = counted
        if rejects != 0:
            kept = counted & (looked_at >= reject_low) & (looked_at <= reject_high)
        bound = tl.where(counted, weight * part, 0.0)
        weight = tl.where(kept, weight, 0.0)
        tl.store(weights + first + lane, weight)

        kept_counts += tl.sum(
            counted.to(tl.int32) + ((counted & (kept == 0)).to(tl.int32) << 16), 1
        )
        outer = (counted & is_low).to(tl.int32) + ((counted & is_high).to(tl.int32) << 16)
        window_counts += tl.sum(outer, 1)
        ratios += tl.sum(tl.where(counted, ratio, 0.0), 1).to(tl.float64)
        bound_sums += tl.sum(bound, 1).to(tl.float64)
        totals += tl.sum(weight, 1).to(tl.float64)
        squares += tl.sum(weight * weight, 1).to(tl.float64)
        k1 -= tl.sum(own, 1).to(tl.float64)
        k3 += tl.sum(beyond, 1).to(tl.float64)  # 0 where not counted
        least = tl.minimum(least, tl.min(tl.where(counted, ratio, float("inf")), 1))
        most = tl.maximum(most, tl.max(tl.where(counted, ratio, float("-inf")), 1))
        heaviest = tl.maximum(heaviest, tl.max(weight, 1))
        first += TILE
    if partials is not None:
        kept_count = tl.sum(kept_counts, 0)
        window_count = tl.sum(window_counts, 0)
        found = (
            kept_count & 0xFFFF, kept_count >> 16, window_count & 0xFFFF, window_count >> 16,
            tl.sum(ratios, 0), tl.sum(bound_sums, 0), tl.sum(totals, 0), tl.sum(squares, 0),
            tl.sum(k1, 0), tl.sum(k3, 0), -tl.min(least, 0), tl.max(most, 0), tl.max(heaviest, 0),
        )  # fmt: skip
        _store_each(partials + tl.program_id(0), tl.num_programs(0), found)


@triton.jit
def _sum_of(column, num_chunks, MERGED: tl.constexpr):
    """Return the sum of a column of the partial sums."""
    lane = tl.arange(0, MERGED)
    total = tl.zeros((MERGED,), tl.float64)
    while num_chunks > 0:
        total += tl.load(column + lane, mask=lane < num_chunks, other=0.0)
        column += MERGED
        num_chunks -= MERGED
    return tl.sum(total, 0)


@triton.jit
def _entry(values, index, lane):
    """Return one of the values of a row."""
    return tl.sum(tl.where(lane == index, values, 0.0), 0)


@triton.jit
def _store_metrics(
    partials, metrics, num_chunks, scale,
    SUMS: tl.constexpr, PARTIALS: tl.constexpr, COLUMNS: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
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
    ratios, weights, squares = _entry(found, 4, row), _entry(found, 6, row), _entry(found, 7, row)
    weights, squares = weights * scale, squares * scale * scale
    is_nan = (ratios >= 0) == 0  # a ratio is finite or NaN, which no extreme shows
    least = tl.where(is_nan, ratios, tl.where(tokens > 0, -_entry(found, 10, row), 0.0))
    most = tl.where(is_nan, ratios, tl.where(tokens > 0, _entry(found, 11, row), 0.0))
    heaviest = tl.where(tokens > 0, _entry(found, 12, row) * scale, 0.0)
    heaviest = tl.where(weights >= 0, heaviest, weights)
    size = weights * weights / tl.maximum(tokens * squares, 2.2250738585072014e-308)
    count = tl.maximum(tokens, 1.0)
    values = (
        tokens, ratios / count, least, most, _entry(found, 2, row) / count,
        _entry(found, 3, row) / count, _entry(found, 1, row) / count, weights / count, heaviest,
        size, _entry(found, 8, row) / count, _entry(found, 9, row) / count,
    )  # fmt: skip
    _store_each(metrics, 1, values)


@triton.jit(do_not_specialize=["tokens", "num_chunks", "normalize"])
def merge_kernel(
    partials, used, weights, metrics, tokens: tl.int64, num_chunks: tl.int64, normalize,
    SUMS: tl.constexpr, PARTIALS: tl.constexpr, COLUMNS: tl.constexpr, MERGED: tl.constexpr,
    CELLS: tl.constexpr, APART: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Divide the weights by their mean if ``normalize``; the first program writes the metrics.

    ``used`` has the number of segments of which the mean is, or None where it is of tokens.
    """
    scale = tl.full((), 1.0, tl.float64)
    if normalize != 0:
        total = _sum_of(partials + 5 * num_chunks, num_chunks, MERGED)
        if used is None:
            number = _sum_of(partials, num_chunks, MERGED)
        else:
            number = number_with_tokens(used, CELLS, APART).to(tl.float64)
        scale = tl.where(total > 0, number / tl.where(total > 0, total, 1.0), 1.0)
        first = tl.program_id(0).to(tl.int64) * TILE
        while first < tokens:
            place = weights + first + tl.arange(0, TILE)
            tl.store(place, (tl.load(place).to(tl.float64) * scale).to(tl.float32))
            first += tl.num_programs(0) * TILE
    if metrics is not None and tl.program_id(0) == 0:
        _store_metrics(partials, metrics, num_chunks, scale, SUMS, PARTIALS, COLUMNS, MERGED)


def importance_weights_forward(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    correction: Correction,
    places: Places | None,
    *,
    measures: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and metrics of contiguous tensors; ``places`` are None if not needed."""
    inputs = aligned(logprobs), aligned(rollout_logprobs), aligned(loss_mask)
    tokens, device, rejection = loss_mask.shape[0], loss_mask.device, correction.rejection
    level, rejected = correction.level, rejection.level if rejection else ""
    cells, table = None, None
    if places is not None:
        if places.ids is not None:
            places = places._replace(ids=aligned(places.ids))
        cells, table = sum_slots(inputs[2], places, *inputs[:2], clamps=rejected in OF_SEGMENTS)
    num_chunks, num_tiles = cdiv(tokens, CHUNK), cdiv(tokens, TILE)
    weights = torch.empty(num_tiles * TILE, dtype=torch.float32, device=device)
    metrics = torch.empty(SUMS + 2 if measures else 0, dtype=torch.float64, device=device)
    partials = None
    if measures or correction.normalize:
        partials = metrics.new_empty((PARTIALS, num_chunks))
    used = cells if level in OF_SEGMENTS else None
    programs = max(min(num_tiles, MOST_PROGRAMS), 1) if correction.normalize else 1
    launch = launch_on("weigh_kernel", loss_mask.get_device())
    launch(
        weigh_kernel, num_chunks, *inputs, *(places or Places(None, None, None, 0, 0)), table,
        weights, partials, tokens, int(level in OF_SEGMENTS), int(level == "geometric"),
        int(level == "none"), OUTSIDE[correction.outside], correction.low, correction.high,
        *correction.log_window, int(rejection is not None), int(rejected in OF_SEGMENTS),
        int(rejected == "geometric"), *(rejection.log_window if rejection else (0.0, 0.0)),
        TILE=TILE, EACH=EACH, TILES=TILES,
    )  # fmt: skip
    if partials is not None:
        launch(
            merge_kernel, programs, partials, used, weights, metrics if measures else None,
            num_tiles * TILE, num_chunks, int(correction.normalize), SUMS=SUMS, PARTIALS=PARTIALS,
            COLUMNS=triton.next_power_of_2(PARTIALS), MERGED=MERGED, CELLS=CELLS, APART=APART,
            TILE=TILE,
        )  # fmt: skip
    return weights[:tokens], metrics
