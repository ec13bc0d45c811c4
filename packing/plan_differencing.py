"""Karmarkar and Karp's differencing method, and a repair of micro-batches that overflow."""

from __future__ import annotations

from bisect import insort
from heapq import heapify, heappop, heapreplace

import numpy as np

from trajpack.packing.plan_packing import decreasing
from trajpack.packing.plan_units import Ints, Limits, Units, summed

Sums = list[int]
"""Costs of the parts of a partial solution that are not empty, ascending; each holds in its low
bits one of the units it is of."""


def karmarkar_karp(units: Units, num_bins: int, limits: Limits) -> Ints | None:
    """Balance by differencing: again and again, join the two solutions of widest spread.

    Each unit begins as a solution of its own: ``num_bins`` parts, of which all but one are empty.
    Two solutions are joined so that the largest part of one meets the smallest of the other. Parts
    that are empty are not written down, so the first rounds of all are as cheap as a heap.
    What is then over the capacity gives units to micro-batches that have room.

    Reference:
        Karmarkar and Karp, *The differencing method of set partitioning*, 1982; with several parts
        as in Michiels et al., 2003. Equal spreads go by the unit that is larger or comes first.

    Returns:
        The micro-batch of each unit, or ``None`` where no room was found. Cost: about O(units
        log units), and for what two solutions share O(units log micro-batches) more.
    """
    order = decreasing(units.costs)
    sums, chains, shift = _difference(units.costs[order].tolist(), num_bins)
    first, following = chains
    bin_of = np.empty(len(units), np.int64)
    mask = (1 << shift) - 1
    for number, part in enumerate(reversed(sums)):
        unit = first[part & mask]
        while unit >= 0:
            bin_of[order[unit]] = number
            unit = following[unit]
    return repaired(bin_of, units, num_bins, limits)


def _difference(costs: list[int], num_bins: int) -> tuple[Sums, tuple[list[int], list[int]], int]:
    """Return the parts of the last solution, the chains of their units, and the bits of a unit."""
    count = len(costs)
    shift = max(count, 1).bit_length()
    first, last, following = list(range(count)), list(range(count)), [-1] * count
    chains = (first, last, following)
    solutions: list[Sums] = [[cost << shift | unit] for unit, cost in enumerate(costs)]
    if count == 0:
        return [], (first, following), shift
    bits = (1 << shift) - 1
    single = num_bins == 1
    heap = [(0 if single else -cost) << shift | unit for unit, cost in enumerate(costs)]
    heapify(heap)
    while len(heap) > 1:
        number = heappop(heap) & bits
        other = heap[0] & bits
        joined = _join(solutions[number], solutions[other], num_bins, shift, chains)
        solutions[number], solutions[other] = joined, []
        least = joined[0] >> shift if len(joined) == num_bins else 0
        heapreplace(heap, (least - (joined[-1] >> shift)) << shift | number)
    return solutions[heap[0] & bits], (first, following), shift


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
