# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernel of sums over slots: numbers of tokens, and sums of their logarithmic ratios.

A slot is a segment of tokens, or all segments of one owner. A warp reads tiles of tokens, takes
the slots that it finds there one after another, and keeps the sums of a slot's part of the tile in
a lane. It adds those of all lanes at once, by atomic additions of integers, which are exact in any
order. So the sums of a slot depend on its tokens alone, and a slot may have any length.

Every slot's first tokens are counted once more, as a slot with tokens. A device makes additions to
one address one after another, so a warp adds the new slots of its tile up, and warps spread over
``CELLS`` counters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trajpack.kernels.corrections.slots import FAR, LOG_BOUND, UNIT, Places
from trajpack.kernels.launches import cdiv, launch_on
from trajpack.kernels.search_triton import find_segment, find_segments

PROGRAMS = 8192
"""Programs at most: a device starts about one in a clock."""
LANES = 32
"""Slots of a tile that are added at once."""
CELLS = 32
"""Counters of slots with tokens."""
APART = 2
"""int64 from one counter to the next: they lie on four lines of the cache."""
WORDS = 4
"""int64 of a slot where logarithms are summed: its number of tokens, with marks from bit 32 on of a
NaN, an infinity and a negative one among them; the sums of logarithms and of clamped ones."""
NAN, ABOVE, BELOW = (tl.constexpr(1 << bit) for bit in (32, 33, 34))
_FAR, _BOUND = tl.constexpr(FAR), tl.constexpr(LOG_BOUND)
_SHIFT = tl.constexpr(1.5 * 2**52 * UNIT)
"""A number plus this has the number's multiple of ``UNIT`` as its low bits."""
_SHIFT_BITS = tl.constexpr((1023 + 20 << 52) + (1 << 51))
_NOBODY = tl.constexpr(2**31 - 1)


@triton.jit
def load_tokens(
    place, ids, logprobs, rollout_logprobs, first, lane, tokens,
    ENDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return what a tile's tokens have of each, 0 behind the last; lanes where there is nothing.

    ``place`` are the places of their counts, in chunks of 4: a mask, which could be loaded by 16,
    would settle the layout of all loads. Where ``ENDS``, counts lie between boundaries.
    """
    inside = lane < tokens - first
    if ENDS:
        count = tl.load(place + 1, mask=inside, other=0) - tl.load(place, mask=inside, other=0)
        segment, new, old = lane, lane, lane
    elif first + TILE <= tokens:  # all loads are in one branch, so they follow each other
        count = tl.load(place)
        segment = lane if ids is None else tl.load(ids + first + lane)
        new = lane if logprobs is None else tl.load(logprobs + first + lane)
        old = lane if logprobs is None else tl.load(rollout_logprobs + first + lane)
    else:
        count = tl.load(place, mask=inside, other=0)
        segment = lane if ids is None else tl.load(ids + first + lane, mask=inside, other=0)
        new = lane if logprobs is None else tl.load(logprobs + first + lane, mask=inside, other=0)
        old = new
        if logprobs is not None:
            old = tl.load(rollout_logprobs + first + lane, mask=inside, other=0)
    return count.to(tl.int32), segment, new, old


@triton.jit
def slots_of(
    bounds, ids, owners, num_segments, num_slots, segment, first, lane, tokens, TILE: tl.constexpr
):
    """Return the slot of each token of a tile, -1 where there is none; ``segment`` are its ids."""
    if ids is not None:
        segment = tl.where((segment >= 0) & (segment < num_segments), segment, -1).to(tl.int32)
    elif bounds is None:
        segment = tl.where(first + lane < tokens, (first + lane).to(tl.int32), -1)
    else:
        start = first.to(tl.int32)
        last = (tl.minimum(first + TILE, tokens) - 1).to(tl.int32)
        low = find_segment(bounds, num_segments, start, 1)
        high = find_segment(bounds, num_segments, last, 1)
        place = tl.minimum(start + lane, last)
        segment = find_segments(bounds, low, high, place, 1)
        begin = tl.load(bounds + segment, mask=segment < num_segments, other=0)
        end = tl.load(bounds + segment + 1, mask=segment < num_segments, other=0)
        segment = tl.where((place >= begin) & (place < end), segment, -1)
    if owners is not None:
        owner = tl.load(owners + segment, mask=segment >= 0, other=-1)
        segment = tl.where((owner >= 0) & (owner < num_slots), owner, -1).to(tl.int32)
    return segment


@triton.jit
def _units(log):
    """Return 2⁵³ plus the multiple of ``UNIT`` next to a logarithm."""
    return (log + _SHIFT).to(tl.int64, bitcast=True) + ((1 << 53) - _SHIFT_BITS)


@triton.jit
def _any(mark):
    return tl.max(mark.to(tl.int32), 0).to(tl.int64)


@triton.jit(
    do_not_specialize=["num_segments", "num_slots", "tokens", "clamps"],
    do_not_specialize_on_alignment=["bounds", "owners"],
)
def sum_slots_kernel(  # noqa: C901 - branches of the compiler
    counts, logprobs, rollout_logprobs, bounds, ids, owners, num_segments, num_slots, cells,
    tokens: tl.int64, clamps, LANES: tl.constexpr, CELLS: tl.constexpr, APART: tl.constexpr,
    WORDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the tokens of tiles to their slots, and the slots that had none yet to a counter."""
    first = tl.program_id(0).to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    table = cells + CELLS * APART
    lanes = tl.arange(0, LANES)
    num_new = tl.full((), 0, tl.int64)
    while first < tokens:
        place = tl.max_contiguous(counts + first + lane, 4)
        count, segment, new, old = load_tokens(
            place, ids, logprobs, rollout_logprobs, first, lane, tokens,
            ids is None and bounds is None, TILE,
        )  # fmt: skip
        slot = slots_of(
            bounds, ids, owners, num_segments, num_slots, segment, first, lane, tokens, TILE
        )
        left = tl.where((slot >= 0) & (count != 0), slot, _NOBODY)
        if logprobs is not None:
            log = (new - old).to(tl.float32).to(tl.float64)
            is_finite = tl.abs(log) < float("inf")
            near = tl.where(log > _FAR, _FAR, tl.where(log < -_FAR, -_FAR, log))
            units = _units(tl.where(is_finite, near, 0.0))
            has_marks = tl.max(((is_finite == 0) & (left < _NOBODY)).to(tl.int32), 0)
        current = tl.min(left, 0)
        while current < _NOBODY:
            slots = tl.zeros((LANES,), tl.int32)
            founds, marks = slots, slots
            totals = tl.zeros((LANES,), tl.int64)
            clampeds = totals
            at = 0
            while (current < _NOBODY) & (at < LANES):
                own, here = left == current, lanes == at
                slots = tl.where(here, current, slots)
                if logprobs is None:
                    found = tl.sum(tl.where(own, count, 0), 0)
                else:
                    total = tl.sum(tl.where(own, units, 0), 0)
                    number = (total + (1 << 52)) >> 53
                    totals = tl.where(here, total - (number << 53), totals)
                    if clamps != 0:
                        clamped = tl.where(
                            log > _BOUND, _BOUND, tl.where(log < -_BOUND, -_BOUND, log)
                        )
                        clamped = _units(tl.where(log == log, clamped, 0.0))  # noqa: PLR0124
                        total = tl.sum(tl.where(own, clamped, 0), 0)
                        clampeds = tl.where(here, total - (number << 53), clampeds)
                    if has_marks != 0:
                        mark = _any(own & (log != log)) * NAN  # noqa: PLR0124
                        mark += _any(own & (log == float("inf"))) * ABOVE
                        mark += _any(own & (log == float("-inf"))) * BELOW
                        marks = tl.where(here, (mark >> 32).to(tl.int32), marks)
                    found = number.to(tl.int32)
                founds = tl.where(here, found, founds)
                left = tl.where(own, _NOBODY, left)
                current = tl.min(left, 0)
                at += 1
            row, is_found = table + slots.to(tl.int64) * WORDS, lanes < at
            if logprobs is not None:
                tl.atomic_add(row + 1, totals, mask=is_found, sem="relaxed")
                if clamps != 0:
                    tl.atomic_add(row + 2, clampeds, mask=is_found, sem="relaxed")
                if has_marks != 0:
                    tl.atomic_or(row, marks.to(tl.int64) << 32, mask=is_found, sem="relaxed")
            known = tl.atomic_add(row, founds.to(tl.int64), mask=is_found, sem="relaxed")
            num_new += tl.sum((is_found & ((known & 0xFFFFFFFF) == 0)).to(tl.int32), 0)
        first += tl.num_programs(0).to(tl.int64) * TILE
    cell = cells + tl.program_id(0) % CELLS * APART
    tl.atomic_add(cell, num_new, mask=num_new > 0, sem="relaxed")


@triton.jit
def number_with_tokens(cells, CELLS: tl.constexpr, APART: tl.constexpr):
    """Return the number of slots with tokens, of what `sum_slots` returns."""
    return tl.sum(tl.load(cells + tl.arange(0, CELLS) * APART).to(tl.int32), 0)


def sum_slots(
    counts: torch.Tensor,
    places: Places,
    logprobs: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
    *,
    clamps: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 ``[CELLS * APART]`` counters of slots with tokens, and ``[slots, words]`` sums.

    Every ``APART``-th counter is used; the number of slots is their sum. ``counts`` are a mask of
    tokens, or boundaries, see `Places`. ``words`` is 1, or `WORDS` where logarithms are summed. A
    launch that fills zeros, and one with a warp for each tile or several.
    """
    words, head = 1 if logprobs is None else WORDS, CELLS * APART
    numbers = torch.zeros(head + places.num_slots * words, dtype=torch.int64, device=counts.device)
    kernel = "sum_slots_kernel" + ", ends" * are_ends(places)
    launch, entries = launch_on(kernel, counts.get_device()), entries_of(counts, places)
    programs = min(cdiv(entries, launch.block), PROGRAMS)
    launch(
        sum_slots_kernel, programs, counts, logprobs, rollout_logprobs, *places,
        numbers, entries, int(clamps), LANES=LANES, CELLS=CELLS, APART=APART, WORDS=words,
        TILE=launch.block,
    )  # fmt: skip
    return numbers[:head], numbers[head:].view(-1, words)


def entries_of(counts: torch.Tensor, places: Places | None) -> int:
    """Return the number of entries that are counted."""
    return counts.shape[0] - int(places is not None and are_ends(places))


def are_ends(places: Places) -> bool:
    """Return whether each entry is a segment, whose tokens boundaries count."""
    return places.ids is None and places.bounds is None
