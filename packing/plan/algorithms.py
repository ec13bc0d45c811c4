"""Algorithms that place items in micro-batches: bin packing, balance, and splitting."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from trajpack.packing.plan.units import Algorithm, Ints, decreasing, inverse_of, round_up, summed

EXCHANGES = 2**18
"""Pairs of items that `balance_over` looks at for exchanges, at most."""
SINGLES = 2**16
"""Items times micro-batches up to which differencing also begins with single items."""


@dataclass(frozen=True)
class PlanItems:
    """Sequences, or sets of sequences that stay together, to be put into micro-batches.

    Attributes:
        sizes, counts, costs: int64 ``[items]``: aligned tokens, sequences, and scaled costs.
        capacity, max_sequences: Maximum tokens and sequences of a micro-batch.
    """

    sizes: Ints
    counts: Ints
    costs: Ints
    capacity: int
    max_sequences: int

    def __len__(self) -> int:
        return len(self.sizes)


def place_items(
    items: PlanItems, algorithm: Algorithm, min_bins: int, multiple_of: int
) -> tuple[Ints, int]:
    """Return the micro-batch of each item, and the number of micro-batches."""
    if algorithm == "karmarkar_karp":
        by_sequences = -(-int(items.counts.sum()) // items.max_sequences)
        least = max(min_bins, by_sequences, lower_bound(items.sizes, items.capacity))
        balanced = balance_over(items, round_up(least, multiple_of))
        if balanced is not None:
            return balanced, round_up(least, multiple_of)
    bin_of = (next_fit if algorithm == "next_fit" else best_fit_decreasing)(items)
    wanted = round_up(max(int(bin_of.max(initial=-1)) + 1, min_bins), multiple_of)
    if algorithm == "karmarkar_karp":
        return even(items, bin_of, wanted), wanted
    return split_bins(items, bin_of, wanted), wanted


def even(items: PlanItems, bin_of: Ints, num_bins: int) -> Ints:
    """Balance over ``num_bins`` micro-batches; where items find no room, even ``bin_of`` out."""
    balanced = balance_over(items, num_bins)
    if balanced is not None:
        return balanced
    return exchange(items, split_bins(items, bin_of, num_bins), num_bins)


def lower_bound(sizes: Ints, capacity: int) -> int:
    """Return a number of bins that every packing of these sizes needs.

    The greater of their sum over the capacity, and the number of those above half of it: no two fit
    together. Sizes are at most the capacity.

    Example:
        >>> lower_bound(np.array([6, 6, 6, 4]), 10), lower_bound(np.array([4, 4, 4]), 10)
        (3, 2)
    """
    return max(-(-int(sizes.sum()) // capacity), int((2 * sizes > capacity).sum()))


def next_fit(items: PlanItems) -> Ints:
    """Fill one micro-batch after another, in the order given; return that of each item.

    Reference:
        Johnson, *Near-optimal bin packing algorithms*, 1973.
    """
    tokens, sequences = (np.cumsum(each).tolist() for each in (items.sizes, items.counts))
    lengths, begin = [], 0
    size = count = 0
    while begin < len(items):
        end = bisect_right(tokens, size + items.capacity, begin)
        end = min(end, bisect_right(sequences, count + items.max_sequences, begin, end))
        lengths.append(end - begin)
        size, count, begin = tokens[end - 1], sequences[end - 1], end
    return np.repeat(np.arange(len(lengths)), lengths)


def best_fit_decreasing(items: PlanItems, max_bins: int | None = None) -> Ints:
    """Put items, largest first, into the fullest micro-batch with room; return that of each item.

    With ``max_bins``, items for which these have no room are in none, -1.

    Reference:
        Johnson, *Near-optimal bin packing algorithms*, 1973. Equal rooms go by number.
    """
    order = decreasing(items.counts)
    order = order[decreasing(items.sizes[order])]
    shift = len(items).bit_length()
    smallest = int(items.sizes.min(initial=items.capacity))
    rooms, free = list[int](), list[int]()  # rooms ascend, with a micro-batch's number in low bits
    placed = []
    for size, count in zip(items.sizes[order].tolist(), items.counts[order].tolist(), strict=True):
        at = bisect_left(rooms, size << shift)
        while at < len(rooms) and free[rooms[at] & ((1 << shift) - 1)] < count:
            at += 1
        if at == len(rooms):
            if len(free) == max_bins:
                placed.append(-1)
                continue
            room = items.capacity << shift | len(free)
            free.append(items.max_sequences)
        else:
            room = rooms.pop(at)
        number = room & ((1 << shift) - 1)
        placed.append(number)
        room -= size << shift
        free[number] -= count
        if free[number] and room >> shift >= smallest:
            insort(rooms, room)
    bin_of = np.empty(len(items), np.int64)
    bin_of[order] = placed
    return bin_of


def balance_over(items: PlanItems, num_bins: int) -> Ints | None:
    """Balance over exactly ``num_bins`` micro-batches, by differencing and exchanges.

    Differencing begins with runs of ``num_bins`` items of about equal cost, one in each part; where
    items are few, it is done again from single items. Micro-batches over a limit give items to
    those with room, then items are exchanged, and the result with the cheaper most costly
    micro-batch is kept. No micro-batch is empty while there are as many items.

    Returns:
        The micro-batch of each item, or ``None`` where an item found no room.
    """
    best, lowest = None, -1
    for width in (num_bins, 1)[: 2 if len(items) * num_bins <= SINGLES else 1]:
        bin_of = _repaired(items, differenced(items.costs, num_bins, width), num_bins)
        if bin_of is None:
            continue
        bin_of = exchange(items, bin_of, num_bins)
        most = int(summed(items.costs, bin_of, num_bins).max())
        if best is None or most < lowest:
            best, lowest = bin_of, most
    return None if best is None else split_bins(items, best, num_bins)


def differenced(costs: Ints, num_bins: int, width: int) -> Ints:
    """Return the part of each item by the differencing method.

    It joins the two partial solutions of widest spread, until one is left: the largest part of one
    meets the smallest of the other. The first solutions are runs of ``width`` items.

    Reference:
        Karmarkar and Karp, *The differencing method of set partitioning*, 1982; with several parts
        as in Michiels et al., 2003.
    """
    order = decreasing(costs)
    missing = -len(costs) % width or (0 if len(costs) else width)
    runs = np.pad(costs[order], (0, missing)).reshape(-1, width)
    sums = np.pad(runs, ((0, 0), (0, num_bins - width)))  # of each solution's parts, descending
    heap = [(int(parts[-1] - parts[0]), number) for number, parts in enumerate(sums)]
    heapify(heap)
    joined = []
    while len(heap) > 1:
        _, first = heappop(heap)
        _, second = heap[0]
        met = sums[first] + sums[second][::-1]
        ranked = decreasing(met)
        sums[first] = met[ranked]
        joined.append((first, second, ranked))
        heapreplace(heap, (int(sums[first, -1] - sums[first, 0]), first))
    part_of = np.empty_like(sums)
    part_of[heap[0][1]] = np.arange(num_bins)
    for first, second, ranked in reversed(joined):
        part_of[first, ranked] = part_of[first].copy()
        part_of[second] = part_of[first, ::-1]
    return part_of[:, :width].ravel()[inverse_of(order)]


def _repaired(items: PlanItems, bin_of: Ints, num_bins: int) -> Ints | None:
    """Move items, cheapest first, out of micro-batches over a limit; ``None`` if not all fit.

    A moved item goes to the micro-batch of least cost that has room.
    """
    amounts, held = _amounts(items, bin_of, num_bins)
    limits = np.array([items.capacity, items.max_sequences])
    moving = []
    for number in np.flatnonzero((held[1:] > limits[:, None]).any(0)).tolist():
        inside = np.flatnonzero(bin_of == number)
        for item in inside[np.argsort(items.costs[inside], kind="stable")].tolist():
            if (held[1:, number] <= limits).all():
                break
            held[:, number] -= amounts[:, item]
            moving.append(item)
    for item in sorted(moving, key=lambda item: (-int(items.costs[item]), item)):
        fits = held[1:] + amounts[1:, item, None] <= limits[:, None]
        wide = np.flatnonzero(fits.all(0))
        if len(wide) == 0:
            return None
        number = int(wide[held[0, wide].argmin()])
        held[:, number] += amounts[:, item]
        bin_of[item] = number
    return bin_of


def exchange(items: PlanItems, bin_of: Ints, num_bins: int) -> Ints:
    """Return a more even plan: two items swap micro-batches, or one moves.

    An item of the most costly micro-batch is swapped for a cheaper one of another, or moved to it,
    so that the costlier of the two becomes as cheap as it can. Where no swap does that, the next
    most costly micro-batch is tried; then the most costly again. At most `EXCHANGES` pairs of items
    are looked at. ``bin_of`` is within the limits, and so is the result.
    """
    amounts, held = _amounts(items, bin_of, num_bins)
    least = max(-(-int(items.costs.sum()) // num_bins), int(items.costs.max(initial=0)))
    limits = np.array([items.capacity, items.max_sequences])[:, None, None]
    # a move is a swap for an item of zeros, of which each micro-batch has one that never leaves
    amounts = np.concatenate([amounts, np.zeros((3, num_bins), np.int64)], 1)
    places = np.concatenate([bin_of, np.arange(num_bins)])
    tried, budget = 0, EXCHANGES
    while tried < num_bins and held[0].max() > least:
        most = int(np.argsort(-held[0], kind="stable")[tried])
        own = np.flatnonzero(places[: len(bin_of)] == most)
        budget -= len(own) * len(places)
        if budget < 0:
            break
        tried += 1
        change = amounts[:, own, None] - amounts[:, None]
        gain = np.minimum(change[0], (held[0, most] - held[0])[places] - change[0])
        for after in (held[1:, None, places] + change[1:], held[1:, most, None, None] - change[1:]):
            gain[(after > limits).any(0)] = 0
        if gain.max(initial=0) <= 0:
            continue
        row, other = divmod(int(gain.argmax()), len(places))
        target = int(places[other])
        held[:, most] -= change[:, row, other]
        held[:, target] += change[:, row, other]
        places[own[row]] = target
        if other < len(bin_of):
            places[other] = most
        tried = 0
    return places[: len(bin_of)]


def _amounts(items: PlanItems, bin_of: Ints, num_bins: int) -> tuple[Ints, Ints]:
    """Return costs, tokens and sequences, int64 ``[3, items]``, and their sums by micro-batch."""
    amounts = np.stack([items.costs, items.sizes, items.counts])
    return amounts, np.stack([summed(each, bin_of, num_bins) for each in amounts])


def split_bins(items: PlanItems, bin_of: Ints, wanted: int) -> Ints:
    """Cut the most costly micro-batches until ``wanted`` have items, or each has one.

    A micro-batch is cut where its halves differ least, in the order of its items. Micro-batches are
    then in the order of their first items; empty ones come last.
    """
    ranked = np.argsort(bin_of, kind="stable")
    held = np.split(ranked, np.flatnonzero(np.diff(bin_of[ranked])) + 1)
    if len(held) >= min(wanted, len(items)):
        return bin_of
    heap = [(-int(items.costs[own].sum()), number) for number, own in enumerate(held)]
    heapify(heap)
    while len(held) < wanted and heap:
        _, number = heappop(heap)
        own = held[number]
        if len(own) > 1:
            before = np.cumsum(items.costs[own])
            cut = int(np.maximum(before[:-1], before[-1] - before[:-1]).argmin()) + 1
            held[number] = own[:cut]
            held.append(own[cut:])
            for at in (number, len(held) - 1):
                heappush(heap, (-int(items.costs[held[at]].sum()), at))
    for number, own in enumerate(sorted(held, key=lambda own: int(own[0]))):
        bin_of[own] = number
    return bin_of
