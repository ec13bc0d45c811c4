"""Balance: micro-batches of about the same cost, as many of them as the capacity needs."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from trajpack.packing.plan.differencing import karmarkar_karp
from trajpack.packing.plan.fitting import decreasing
from trajpack.packing.plan.units import Ints, Limits, Units

SEARCHED = 2**21
"""Micro-batches that are searched for units kept out where the cost is least; then room decides."""
CHUNKED = 64
"""Micro-batches from which many units at a time are placed by numpy."""


def longest_processing_time(units: Units, num_bins: int, limits: Limits) -> Ints | None:
    """Put units, most costly first, into the micro-batch of least cost that has room.

    Reference:
        Graham, *Bounds on multiprocessing timing anomalies*, 1969. Equal costs go by number.

    Returns:
        The micro-batch of each unit, or ``None`` where one found no room. Cost: O(units log
        micro-batches); where many units do not fit where the cost is least, and micro-batches are
        many, too, the last ones go where there is most room.
    """
    order = decreasing(units.costs)
    place = _in_chunks if num_bins >= CHUNKED else _one_by_one
    placed = place(units, order, num_bins, limits)
    if placed is None:
        return None
    bin_of = np.empty(len(units), np.int64)
    bin_of[order] = placed
    return bin_of


def _one_by_one(units: Units, order: Ints, num_bins: int, limits: Limits) -> Ints | None:
    shift = num_bins.bit_length()
    mask = (1 << shift) - 1
    room, places = [limits.capacity] * num_bins, [limits.max_sequences] * num_bins
    by_cost = list(range(num_bins))
    placed = []
    rows = (each[order].tolist() for each in (units.sizes, units.counts, units.costs))
    for size, count, cost in zip(*rows, strict=True):
        key = by_cost[0]
        number = key & mask
        if room[number] >= size and places[number] >= count:
            heapreplace(by_cost, key + (cost << shift))
        else:
            passed = []
            while by_cost:
                key = heappop(by_cost)
                number = key & mask
                if room[number] >= size and places[number] >= count:
                    break
                passed.append(key)
            else:
                return None
            by_cost += [*passed, key + (cost << shift)]
            heapify(by_cost)
        room[number] -= size
        places[number] -= count
        placed.append(number)
    return np.array(placed, np.int64)


def _in_chunks(units: Units, order: Ints, num_bins: int, limits: Limits) -> Ints | None:
    """Do the same for as many units at a time as go to different micro-batches.

    With micro-batches sorted by cost, unit i goes to number i as long as that costs less than
    each one before it with its new unit, and has room.
    """
    costs, sizes, counts = (each[order] for each in (units.costs, units.sizes, units.counts))
    misfits = 0
    load = np.zeros(num_bins, np.int64)
    room = np.full(num_bins, limits.capacity, np.int64)
    places = np.full(num_bins, limits.max_sequences, np.int64)
    placed = np.empty(len(order), np.int64)
    ranked = np.arange(num_bins)
    begin = 0
    while begin < len(order):
        end = min(begin + num_bins, len(order))
        first = ranked[: end - begin]
        after = load[first] + costs[begin:end]
        fits = (room[first] >= sizes[begin:end]) & (places[first] >= counts[begin:end])
        fits[1:] &= load[first[1:]] < np.minimum.accumulate(after)[:-1]
        length = end - begin if fits.all() else int(fits.argmin())
        chosen = first[:length]
        if length == 0:  # the next unit does not fit where the cost is least
            wide = (room[ranked] >= sizes[begin]) & (places[ranked] >= counts[begin])
            if not wide.any():
                return None
            length, chosen = 1, ranked[[int(wide.argmax())]]
            misfits += 1
            if misfits * num_bins > SEARCHED:
                return _by_room(placed, begin, (sizes, counts), (room, places))
        end = begin + length
        placed[begin:end] = chosen
        load[chosen] += costs[begin:end]
        room[chosen] -= sizes[begin:end]
        places[chosen] -= counts[begin:end]
        ranked = np.argsort(load, kind="stable")
        begin = end
    return placed


def _by_room(
    placed: Ints, begin: int, units: tuple[Ints, Ints], state: tuple[Ints, Ints]
) -> Ints | None:
    """Put the units from ``begin`` on where there is most room, since room is what is scarce."""
    (sizes, counts), (room, places) = (
        tuple(each.tolist() for each in pair) for pair in (units, state)
    )
    widest = [(-rest, number) for number, rest in enumerate(room)]
    heapify(widest)
    for unit in range(begin, len(sizes)):
        while widest and places[widest[0][1]] < counts[unit]:
            heappop(widest)
        if not widest or -widest[0][0] < sizes[unit]:
            return None
        rest, number = widest[0]
        heapreplace(widest, (rest + sizes[unit], number))
        places[number] -= counts[unit]
        placed[unit] = number
    return placed


BALANCING: dict[str, Callable[[Units, int, Limits], Ints | None]] = {
    "karmarkar_karp": karmarkar_karp,
    "longest_processing_time": longest_processing_time,
}


def balance(
    units: Units, limits: Limits, algorithm: str, least: int, multiple_of: int
) -> tuple[Ints, int]:
    """Balance over ``least`` micro-batches, or over the next number at which they all fit.

    Returns:
        The micro-batch of each unit, and how many micro-batches there are.
    """
    num_bins = rounded_up(max(least, fewest_bins(units, limits)), multiple_of)
    bin_of = balanced(units, limits, algorithm, num_bins)
    if bin_of is None and algorithm == "karmarkar_karp":
        # differencing is slow where micro-batches are many: how many it takes, the other one finds
        _, num_bins = balance(units, limits, "longest_processing_time", num_bins, multiple_of)
        bin_of = balanced(units, limits, algorithm, num_bins)
    more = max(1, num_bins // 1024)
    while bin_of is None:
        num_bins, more = rounded_up(num_bins + more, multiple_of), 2 * more
        bin_of = balanced(units, limits, algorithm, num_bins)
    return bin_of, num_bins


def balanced(units: Units, limits: Limits, algorithm: str, num_bins: int) -> Ints | None:
    """Balance over so many micro-batches, or return ``None`` where a unit found no room.

    None is empty unless there are too few units, whatever units cost.
    """
    if len(units) == 0:
        return units.sizes
    bin_of = BALANCING[algorithm](units, num_bins, limits)
    if bin_of is None:
        return None
    used, numbers = np.unique(bin_of, return_inverse=True)
    if min(len(units), num_bins) > len(used):  # units of no cost lie together
        bin_of, _ = split_to(numbers, len(used), num_bins, units, in_order=False)
    return bin_of


def fewest_bins(units: Units, limits: Limits) -> int:
    """Return a number of micro-batches below which tokens or sequences cannot fit."""
    if len(units) == 0:
        return 0
    tokens, sequences = int(units.sizes.sum()), int(units.counts.sum())
    return max(1, -(-tokens // limits.capacity), -(-sequences // limits.max_sequences))


def rounded_up(count: int, multiple_of: int) -> int:
    """Return the next multiple."""
    return -(-count // multiple_of) * multiple_of


def split_to(
    bin_of: Ints, num_bins: int, wanted: int, units: Units, *, in_order: bool
) -> tuple[Ints, int]:
    """Split the most costly micro-batches until there are ``wanted``; then some stay empty.

    With ``in_order`` a micro-batch is cut in two where its halves differ least, and micro-batches
    stay in order of what they hold.
    """
    if num_bins in (0, wanted):
        return bin_of, wanted
    bin_of = bin_of.copy()
    ranked = np.argsort(bin_of, kind="stable")
    held = np.split(ranked, np.cumsum(np.bincount(bin_of, minlength=num_bins))[:-1])
    costs = np.bincount(bin_of, units.costs, minlength=num_bins).astype(np.int64)
    heap = [(-int(costs[b]), b) for b in range(num_bins) if len(held[b]) > 1]
    heapify(heap)
    while len(held) < wanted and heap:
        _, number = heappop(heap)
        kept, moved = _halves(held[number], units, in_order)
        bin_of[moved] = len(held)
        for at, half in ((number, kept), (len(held), moved)):
            if len(half) > 1:
                heappush(heap, (-int(units.costs[half].sum()), at))
        held[number] = kept
        held.append(moved)
    if in_order:
        # those that were empty before, of a rank without sequences, stay behind all others
        first = [int(half[0]) if len(half) else len(ranked) for half in held]
        firsts = np.argsort(first, kind="stable")
        rank = np.empty_like(firsts)
        rank[firsts] = np.arange(len(firsts))
        bin_of = rank[bin_of]
    return bin_of, wanted


def _halves(held: Ints, units: Units, in_order: bool) -> tuple[Ints, Ints]:
    costs = units.costs[held]
    if in_order:
        before = np.cumsum(costs)
        largest = np.maximum(before[:-1], before[-1] - before[:-1])
        cut = int(largest.argmin()) + 1
        return held[:cut], held[cut:]
    order = decreasing(costs)
    second = np.zeros(len(held), bool)
    totals = [0, 0]
    for position, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        lighter = int(totals[1] < totals[0])
        totals[lighter] += cost
        second[position] = bool(lighter)
    if not second.any():
        second[order[-1]] = True  # costs of 0 tell no half from the other
    return held[~second], held[second]
