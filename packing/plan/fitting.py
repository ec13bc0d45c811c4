"""Bin packing: as few micro-batches as a rule finds, none over its capacity."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from trajpack.packing.plan.units import Ints, Limits, Units


def next_fit(units: Units, limits: Limits) -> tuple[Ints, int]:
    """Fill one micro-batch after another, in the order given.

    Reference:
        Johnson, *Near-optimal bin packing algorithms*, 1973.

    Returns:
        The micro-batch of each unit, and how many there are. Cost: O(bins log units), beside
        sums of all units.
    """
    ends, counted = (np.cumsum(each).tolist() for each in (units.sizes, units.counts))
    lengths, begin, total = [], 0, len(ends)
    size = count = 0
    while begin < total:
        end = bisect_right(ends, size + limits.capacity, begin)
        end = min(end, bisect_right(counted, count + limits.max_sequences, begin, end))
        lengths.append(end - begin)
        size, count, begin = ends[end - 1], counted[end - 1], end
    return np.repeat(np.arange(len(lengths)), lengths), len(lengths)


def fit_decreasing(units: Units, limits: Limits, *, best: bool) -> tuple[Ints, int]:
    """Put units, largest first, where they fit: the first micro-batch, or the fullest.

    Sizes never grow, so a micro-batch that has no room for a unit is not looked at again before
    units are small enough: until then it waits. Units of one size are taken as a run: the
    micro-batch that takes the first of them takes as many as fit.

    Reference:
        Johnson, *Near-optimal bin packing algorithms*, 1973. Equal rooms go by number.

    Returns:
        The micro-batch of each unit, and how many there are. Cost: O(units log units), less where
        sizes repeat; where units of several sequences meet a bound of sequences, O(units bins) at
        worst.
    """
    order = decreasing(units.counts) if int(units.counts.max(initial=1)) > 1 else None
    order = decreasing(units.sizes) if order is None else order[decreasing(units.sizes[order])]
    sizes, counts = units.sizes[order], units.counts[order]
    # of units above half of the capacity no two fit together: each begins a micro-batch
    large = int(np.searchsorted(-sizes, -(limits.capacity // 2)))
    filling = _Filling(limits, sizes, counts, large, best)
    for size, count, num_units in _classes(sizes[large:], counts[large:]):
        if filling.waiting:
            filling.wake(size)
        left = filling.fill(size, count, num_units) if filling.eligible else num_units
        if left:
            filling.begin(size, count, left)
    bin_of = np.empty(len(units), np.int64)
    bin_of[order[:large]] = np.arange(large)
    runs = np.array(filling.bins, np.int64), np.array(filling.lengths, np.int64)
    bin_of[order[large:]] = np.repeat(*runs)
    return bin_of, len(filling.room)


def decreasing(values: Ints) -> Ints:
    """Return the order from the largest value to the smallest; equal ones stay in order."""
    largest = int(values.max(initial=0))
    from_largest = largest - values
    if largest < 2**16:
        from_largest = from_largest.astype(np.uint16)  # numpy sorts these by digit
    return np.argsort(from_largest, kind="stable")


def _classes(sizes: Ints, counts: Ints) -> Iterator[tuple[int, int, int]]:
    """Return (size, count, how many units) of runs of equal units."""
    changes = np.flatnonzero((np.diff(sizes) != 0) | (np.diff(counts) != 0)) + 1
    begins = np.concatenate([[0], changes]) if len(sizes) else changes
    repeats = np.diff(np.append(begins, len(sizes)))
    rows = (each.tolist() for each in (sizes[begins], counts[begins], repeats))
    return zip(*rows, strict=True)


class _Filling:
    """Micro-batches that are being filled, the first ones begun with a large unit each."""

    def __init__(
        self, limits: Limits, sizes: Ints, counts: Ints, num_large: int, best: bool
    ) -> None:
        self.capacity, self.max_sequences = limits
        self.bounded = int(counts.sum()) > self.max_sequences
        self.mixed = self.bounded and int(counts.max()) > 1
        self.smallest = int(sizes[-1]) if len(sizes) else 0
        self.best = best
        self.shift = max(len(sizes), 1).bit_length()
        self.mask = (1 << self.shift) - 1
        self.room: list[int] = (self.capacity - sizes[:num_large]).tolist()
        self.places: list[int] = (self.max_sequences - counts[:num_large]).tolist()
        self.eligible: list[int] = []
        """Micro-batches with room for a unit of the present size: for best fit a stack of
        (room, number), descending, since those that wake have less room than those awake; for
        first fit a heap of numbers."""
        self.waiting: list[int] = []
        """The others, a heap of (tokens held, number), numbers descending: most room first."""
        self.bins: list[int] = []
        """For each run of equal units the micro-batch that took it, and how many units."""
        self.lengths: list[int] = []
        for number in range(num_large - 1, -1, -1):  # ascending in tokens held, so it is a heap
            room = self.room[number]
            if room < self.smallest:
                break
            if self.places[number]:
                held = self.capacity - room
                self.waiting.append(held << self.shift | (self.mask - number))

    def wake(self, size: int) -> None:
        """Let those take part that have room by now."""
        waiting, shift, mask, room = self.waiting, self.shift, self.mask, self.room
        last = (self.capacity - size + 1) << shift
        while waiting and waiting[0] < last:
            number = mask - (heappop(waiting) & mask)
            if self.best:
                self.eligible.append(room[number] << shift | number)
            else:
                heappush(self.eligible, number)
        if self.best and self.mixed:  # those that were passed over for their number of sequences
            self.eligible.sort(reverse=True)

    def fill(self, size: int, count: int, left: int) -> int:
        """Fill those that are there with ``left`` units; return how many found no room."""
        room, eligible, shift, mask = self.room, self.eligible, self.shift, self.mask
        best, passed = self.best, []
        while left and eligible:
            number = eligible.pop() & mask if best else heappop(eligible)
            rest = room[number]
            taken = 1 if left == 1 else min(left, rest // size if size else left)
            if self.bounded:
                taken = min(taken, self.places[number] // count)
                if not taken:  # too many sequences for it, though not too many tokens
                    passed.append(number)
                    continue
                self.places[number] -= taken * count
            left -= taken
            rest -= taken * size
            room[number] = rest
            self.bins.append(number)
            self.lengths.append(taken)
            if rest < self.smallest or (self.bounded and not self.places[number]):
                continue
            if rest < size:
                heappush(self.waiting, (self.capacity - rest) << shift | (mask - number))
            else:
                passed.append(number)
        for number in passed:
            if best:
                eligible.append(room[number] << shift | number)
            else:
                heappush(eligible, number)
        if best and self.mixed:
            eligible.sort(reverse=True)
        return left

    def begin(self, size: int, count: int, left: int) -> None:
        """Begin as many micro-batches as ``left`` units need."""
        most = self.max_sequences // count
        each = min(most, self.capacity // size if size else most)
        while left:
            taken, number = min(left, each), len(self.room)
            rest, places = self.capacity - size * taken, self.max_sequences - count * taken
            left -= taken
            self.bins.append(number)
            self.lengths.append(taken)
            self.room.append(rest)
            self.places.append(places)
            if rest >= self.smallest and places:
                held = self.capacity - rest
                heappush(self.waiting, held << self.shift | (self.mask - number))
