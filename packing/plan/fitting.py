"""Bin packing: few micro-batches, none over its capacity."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np

from trajpack.packing.plan.units import Ints, PlanItems, decreasing


def next_fit(items: PlanItems) -> tuple[Ints, int]:
    """Fill one micro-batch after another, in the order given.

    Reference:
        Johnson, *Near-optimal bin packing algorithms*, 1973.

    Returns:
        The micro-batch of each item, and the number of micro-batches. Cost: O(bins log items),
        and cumulative sums of all items.
    """
    tokens, sequences = (np.cumsum(each).tolist() for each in (items.sizes, items.counts))
    lengths, begin = [], 0
    size = count = 0
    while begin < len(items):
        end = bisect_right(tokens, size + items.capacity, begin)
        end = min(end, bisect_right(sequences, count + items.max_sequences, begin, end))
        lengths.append(end - begin)
        size, count, begin = tokens[end - 1], sequences[end - 1], end
    return np.repeat(np.arange(len(lengths)), lengths), len(lengths)


def fit_decreasing(items: PlanItems, *, best: bool) -> tuple[Ints, int]:
    """Put items, largest first, into the first micro-batch with room, or into the fullest.

    Sizes never grow, so a micro-batch without room for the present size waits until items are
    small enough. Items of one size and number of sequences are placed as a run.

    Reference:
        Johnson, *Near-optimal bin packing algorithms*, 1973. Equal rooms go by number.

    Returns:
        The micro-batch of each item, and the number of micro-batches. Cost: O(items log items),
        less where sizes repeat; where items of several sequences meet a bound of sequences,
        O(items bins) at worst.
    """
    order = decreasing(items.counts)
    order = order[decreasing(items.sizes[order])]
    sizes, counts = items.sizes[order], items.counts[order]
    smallest = int(sizes[-1]) if len(sizes) else 0
    shift = len(items).bit_length()
    mask = (1 << shift) - 1
    room, free = list[int](), list[int]()  # tokens and sequences left, by micro-batch
    # two heaps of keys with a micro-batch's number in the low bits: those with room for the present
    # size, in order of preference, and the others, most room first
    eligible, waiting = list[int](), list[int]()
    pieces = list[tuple[int, int]]()  # a micro-batch, and items of one run placed there
    for size, count, repeat in _runs(sizes, counts):
        while waiting and -(waiting[0] >> shift) >= size:
            number = heappop(waiting) & mask
            heappush(eligible, room[number] << shift | number if best else number)
        passed, left = [], repeat
        while left:
            if eligible:
                number = heappop(eligible) & mask
            else:
                number = len(room)
                room.append(items.capacity)
                free.append(items.max_sequences)
            rest, places = room[number], free[number]
            taken = min(left, places // count)
            if size and taken > 1:
                taken = min(taken, rest // size)
            if taken:
                left -= taken
                rest -= taken * size
                places -= taken * count
                room[number], free[number] = rest, places
                pieces.append((number, taken))
            if rest < smallest or not places:
                continue  # full
            if rest < size:
                heappush(waiting, -rest << shift | number)
            else:
                passed.append(number)
        for number in passed:
            heappush(eligible, room[number] << shift | number if best else number)
    bin_of = np.empty(len(items), np.int64)
    bin_of[order] = np.repeat(*np.array(pieces, np.int64).reshape(-1, 2).T)
    return bin_of, len(room)


def _runs(sizes: Ints, counts: Ints) -> Iterator[tuple[int, int, int]]:
    """Return (size, count, number of items) of each run of equal items."""
    begins = np.flatnonzero(np.diff(sizes, prepend=-1) | np.diff(counts, prepend=0))
    repeats = np.diff(np.append(begins, len(sizes)))
    return zip(sizes[begins].tolist(), counts[begins].tolist(), repeats.tolist(), strict=True)
