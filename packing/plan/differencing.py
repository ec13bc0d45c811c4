"""Karmarkar and Karp's differencing method, the exchanges that follow it, and a repair."""

from __future__ import annotations

from bisect import insort
from heapq import heapify, heappop, heapreplace

import numpy as np

from trajpack.packing.plan.fitting import decreasing
from trajpack.packing.plan.units import Ints, Limits, Units, summed

Sums = list[int]
"""Costs of the parts of a partial solution that are not empty, ascending; each holds in its low
bits one of the units it is of."""

EXCHANGES = 2**18
"""Pairs of units that one balance looks at, at most, for exchanges after differencing."""


def karmarkar_karp(units: Units, num_bins: int, limits: Limits) -> Ints | None:
    """Balance by differencing, and improve the result by exchanges.

    Differencing joins the two partial solutions of widest spread, until one is left: the largest
    part of one meets the smallest of the other. It is done twice. First each unit begins as a
    solution of its own; then, unless the balance is perfect or the exchanges are used up, each run
    of ``num_bins`` units of about equal cost, one in each part. The parts of the second have
    equally many units, up to one. Micro-batches over a limit give units to those with room, then
    units are exchanged, and the result whose most costly micro-batch costs less is kept.

    Reference:
        Karmarkar and Karp, *The differencing method of set partitioning*, 1982; with several parts
        as in Michiels et al., 2003. Equal spreads go by the unit that is larger or comes first.

    Returns:
        The micro-batch of each unit, or ``None`` where no room was found. Cost: about O(units
        log units), and for what two solutions share O(units log micro-batches) more; exchanges
        look at `EXCHANGES` pairs of units at most.
    """
    order = decreasing(units.costs)
    costs = units.costs[order].tolist()
    least = max([-(-sum(costs) // num_bins), *costs[:1]])
    best, lowest, left = None, -1, EXCHANGES
    for width in (1, num_bins):
        bin_of = np.empty(len(units), np.int64)
        bin_of[order] = _difference(costs, num_bins, width)
        crowded = (summed(units.counts, bin_of, num_bins) > limits.max_sequences).any()
        found = repaired(bin_of, units, num_bins, limits)
        if found is not None:
            left = _exchange(found, units, (num_bins, least), limits, left)
            most = int(summed(units.costs, found, num_bins).max())
            if best is None or most < lowest:
                best, lowest = found, most
        if lowest == least or not (left or crowded):
            break
    return best


def _difference(costs: list[int], num_bins: int, width: int) -> list[int]:
    """Return the part of each unit; solutions begin as ``width`` units that follow each other."""
    count = len(costs)
    shift = max(count, 1).bit_length()
    bits = (1 << shift) - 1
    first, last, following = list(range(count)), list(range(count)), [-1] * count
    chains = (first, last, following)
    parts = [cost << shift | unit for unit, cost in enumerate(costs)]
    solutions: list[Sums] = [sorted(parts[at : at + width]) for at in range(0, count, width)]

    def key(number: int) -> int:
        """Return a number that is least for the widest spread, with the solution's own in it."""
        sums = solutions[number]
        smallest = sums[0] >> shift if len(sums) == num_bins else 0
        return (smallest - (sums[-1] >> shift)) << shift | number

    heap = [key(number) for number in range(len(solutions))]
    heapify(heap)
    while len(heap) > 1:
        number = heappop(heap) & bits
        other = heap[0] & bits
        solutions[number] = _join(solutions[number], solutions[other], num_bins, shift, chains)
        solutions[other] = []
        heapreplace(heap, key(number))
    part_of = [0] * count
    for part, sums in enumerate(reversed(solutions[heap[0] & bits] if heap else [])):
        unit = first[sums & bits]
        while unit >= 0:
            part_of[unit] = part
            unit = following[unit]
    return part_of


def _exchange(
    bin_of: Ints, units: Units, bins: tuple[int, int], limits: Limits, budget: int
) -> int:
    """Write better micro-batches to ``bin_of``: units swap places, or move, two at a time.

    A unit of the most costly micro-batch is swapped for a cheaper one of another, or moved to it,
    so that the costlier of the two micro-batches becomes as cheap as it can. Where no swap does
    that, the next most costly micro-batch is tried; then the most costly again.

    Args:
        bin_of: ``[units]``, within the limits, as all that is written is.
        units: What is exchanged.
        bins: Micro-batches, and a cost below which the most costly cannot be brought.
        limits: What a micro-batch may hold.
        budget: Pairs of units that may be looked at.

    Returns:
        The pairs that are left, 0 if there were too few.
    """
    num_bins, least = bins
    # a move is a swap for a unit of nothing, of which each micro-batch has one that never leaves
    nothing = np.zeros(num_bins, np.int64)
    sizes, counts, costs = (
        np.concatenate([each, nothing]) for each in (units.sizes, units.counts, units.costs)
    )
    places = np.concatenate([bin_of, np.arange(num_bins)])
    load = summed(costs, places, num_bins)
    room = limits.capacity - summed(sizes, places, num_bins)
    free = limits.max_sequences - summed(counts, places, num_bins)
    tried = 0
    while tried < num_bins and load.max() > least:
        most = int(np.argsort(-load, kind="stable")[tried])
        own = np.flatnonzero(bin_of == most)
        budget -= len(own) * len(places)
        if budget < 0:
            return 0
        tried += 1
        cost, size, count = (each[own, None] - each for each in (costs, sizes, counts))
        gain = np.minimum(cost, (load[most] - load)[places] - cost)
        gain[(size > room[places]) | (-size > room[most])] = 0
        gain[(count > free[places]) | (-count > free[most])] = 0
        if gain.max(initial=0) <= 0:
            continue
        row, other = divmod(int(gain.argmax()), len(places))
        pair, moved = [most, int(places[other])], np.array([-1, 1])
        for held, change in ((load, cost), (room, -size), (free, -count)):
            held[pair] += moved * change[row, other]
        places[own[row]] = pair[1]
        if other < len(bin_of):
            places[other] = most
        bin_of[:] = places[: len(bin_of)]
        tried = 0
    return budget


def _join(
    left: Sums, right: Sums, num_bins: int, shift: int, chains: tuple[list[int], ...]
) -> Sums:
    """Join two solutions, largest part to smallest; ``left`` may be written to."""
    if len(left) < len(right):
        left, right = right, left
    shared = len(left) + len(right) - num_bins
    if len(right) == 1:
        part = right[0]
        if shared > 0:
            part = _merged(left.pop(0), part, shift, chains)
        insort(left, part)
        return left
    if shared <= 0:
        return sorted(left + right)
    smallest = right[shared - 1 :: -1] if shared < len(right) else right[::-1]
    met = [
        _merged(one, other, shift, chains)
        for one, other in zip(left[:shared], smallest, strict=True)
    ]
    return sorted(met + left[shared:] + right[shared:])


def _merged(one: int, other: int, shift: int, chains: tuple[list[int], ...]) -> int:
    first, last, following = chains
    bits = (1 << shift) - 1
    kept, added = one & bits, other & bits
    following[last[kept]] = first[added]
    last[kept] = last[added]
    return ((one >> shift) + (other >> shift)) << shift | kept


def repaired(bin_of: Ints, units: Units, num_bins: int, limits: Limits) -> Ints | None:
    """Move units, cheapest first, out of micro-batches that hold too much; ``None`` where none has.

    A unit that moves goes where the cost is least among those with room for it.
    """
    room = limits.capacity - summed(units.sizes, bin_of, num_bins)
    places = limits.max_sequences - summed(units.counts, bin_of, num_bins)
    over = (room < 0) | (places < 0)
    if not over.any():
        return bin_of
    load = summed(units.costs, bin_of, num_bins)
    moving = []
    for number in np.flatnonzero(over).tolist():
        held = np.flatnonzero(bin_of == number)
        for unit in held[np.argsort(units.costs[held], kind="stable")].tolist():
            if room[number] >= 0 and places[number] >= 0:
                break
            _shift(unit, number, -1, units, (room, places, load))
            moving.append(unit)
    for unit in sorted(moving, key=lambda unit: (-int(units.costs[unit]), unit)):
        wide = np.flatnonzero((room >= units.sizes[unit]) & (places >= units.counts[unit]))
        if len(wide) == 0:
            return None
        number = int(wide[load[wide].argmin()])
        _shift(unit, number, 1, units, (room, places, load))
        bin_of[unit] = number
    return bin_of


def _shift(unit: int, number: int, sign: int, units: Units, state: tuple[Ints, ...]) -> None:
    """Account for a unit that comes into a micro-batch, or leaves it."""
    room, places, load = state
    room[number] -= sign * units.sizes[unit]
    places[number] -= sign * units.counts[unit]
    load[number] += sign * units.costs[unit]
