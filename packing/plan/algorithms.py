"""Algorithms that place items in micro-batches: bin packing, balance, and splitting."""

from __future__ import annotations

from bisect import bisect_right, insort
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from trajpack.packing.plan.statistics import lower_bound
from trajpack.packing.plan.units import (
    Algorithm,
    Ints,
    PlanItems,
    decreasing,
    inverse_of,
    round_up,
    summed,
)

EXCHANGES = 2**18
"""Pairs of items that `karmarkar_karp` looks at for exchanges, at most."""


def place_items(
    items: PlanItems, algorithm: Algorithm, *, min_bins: int, multiple_of: int
) -> tuple[Ints, int]:
    """Return the micro-batch of each item, and the number of micro-batches."""
    if algorithm == "karmarkar_karp":
        by_sequences = -(-int(items.counts.sum()) // items.max_sequences)
        least = max(min_bins, by_sequences, lower_bound(items.sizes, items.capacity))
        return _balance(items, round_up(least, multiple_of), multiple_of)
    in_order = algorithm == "next_fit"
    bin_of, num_bins = (next_fit if in_order else best_fit_decreasing)(items)
    wanted = round_up(max(num_bins, min_bins), multiple_of)
    return split_bins(items, bin_of, num_bins, wanted=wanted, in_order=in_order), wanted


def next_fit(items: PlanItems) -> tuple[Ints, int]:
    """Fill one micro-batch after another, in the order given.

    Reference:
        Johnson, *Near-optimal bin packing algorithms*, 1973.

    Returns:
        The micro-batch of each item, and the number of micro-batches.
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


def best_fit_decreasing(items: PlanItems) -> tuple[Ints, int]:
    """Put items, largest first, into the fullest micro-batch with room.

    Sizes never grow, so a micro-batch without room for the present size waits until items are
    small enough. Items of one size and number of sequences are placed as a run.

    Reference:
        Johnson, *Near-optimal bin packing algorithms*, 1973. Equal rooms go by number.

    Returns:
        The micro-batch of each item, and the number of micro-batches.
    """
    order = decreasing(items.counts)
    order = order[decreasing(items.sizes[order])]
    sizes, counts = items.sizes[order], items.counts[order]
    begins = np.flatnonzero(np.diff(sizes, prepend=-1) | np.diff(counts, prepend=0))
    repeats = np.diff(np.append(begins, len(sizes)))
    smallest = int(sizes[-1]) if len(sizes) else 0
    shift = len(items).bit_length()
    mask = (1 << shift) - 1
    room, free = list[int](), list[int]()  # tokens and sequences left, by micro-batch
    # two heaps of keys with a micro-batch's number in the low bits: those with room for the present
    # size, the fullest first, and the others, most room first
    eligible, waiting = list[int](), list[int]()
    pieces = list[tuple[int, int]]()  # a micro-batch, and items of one run placed there
    runs = (each.tolist() for each in (sizes[begins], counts[begins], repeats))
    for size, count, repeat in zip(*runs, strict=True):
        while waiting and -(waiting[0] >> shift) >= size:
            number = heappop(waiting) & mask
            heappush(eligible, room[number] << shift | number)
        passed, left = [], repeat
        while left:
            if eligible:
                number = heappop(eligible) & mask
            else:
                number = len(room)
                room.append(items.capacity)
                free.append(items.max_sequences)
            taken = min(left, free[number] // count, room[number] // size if size else left)
            if taken:
                left -= taken
                room[number] -= taken * size
                free[number] -= taken * count
                pieces.append((number, taken))
            if room[number] < smallest or not free[number]:
                continue  # full
            if room[number] < size:
                heappush(waiting, -room[number] << shift | number)
            else:
                passed.append(number)
        for number in passed:
            heappush(eligible, room[number] << shift | number)
    bin_of = np.empty(len(items), np.int64)
    bin_of[order] = np.repeat(*np.array(pieces, np.int64).reshape(-1, 2).T)
    return bin_of, len(room)


def _balance(items: PlanItems, num_bins: int, multiple_of: int) -> tuple[Ints, int]:
    """Balance over ``num_bins`` micro-batches, or over more where items find no room.

    Tried are as many as packing needs, then a few more; last, packed items exchange places.
    """
    bin_of = balance_over(items, num_bins)
    if bin_of is not None:
        return bin_of, num_bins
    packed, num_packed = best_fit_decreasing(items)
    enough = round_up(max(num_bins, num_packed), multiple_of)
    more = (enough, *(enough + enough // share + 1 for share in (256, 64)))
    for tried in sorted({round_up(count, multiple_of) for count in more} - {num_bins}):
        bin_of = balance_over(items, tried)
        if bin_of is not None:
            return bin_of, tried
    bin_of = split_bins(items, packed, num_packed, wanted=enough)
    least = max(-(-int(items.costs.sum()) // enough), int(items.costs.max()))
    _exchange(bin_of, items, enough, least=least, budget=EXCHANGES)
    return bin_of, enough


def balance_over(items: PlanItems, num_bins: int) -> Ints | None:
    """Balance over exactly ``num_bins`` micro-batches; ``None`` where an item found no room.

    No micro-batch is empty while there are as many items, whatever they cost.
    """
    if len(items) == 0:
        return items.sizes
    bin_of = karmarkar_karp(items, num_bins)
    if bin_of is None:
        return None
    used, numbers = np.unique(bin_of, return_inverse=True)
    if len(used) < min(len(items), num_bins):  # items of no cost lie together
        return split_bins(items, numbers, len(used), wanted=num_bins)
    return bin_of


def karmarkar_karp(items: PlanItems, num_bins: int) -> Ints | None:
    """Balance by differencing, and improve the result by exchanges.

    Differencing joins the two partial solutions of widest spread, until one is left: the largest
    part of one meets the smallest of the other. It is done twice: from single items, and, unless
    the balance is perfect or the exchanges are used up, from runs of ``num_bins`` items of about
    equal cost, one in each part. Micro-batches over a limit give items to those with room, then
    items are exchanged, and the result with the cheaper most costly micro-batch is kept.

    Reference:
        Karmarkar and Karp, *The differencing method of set partitioning*, 1982; with several parts
        as in Michiels et al., 2003. Equal spreads go by the item that is larger or comes first.

    Returns:
        The micro-batch of each item, or ``None`` where no room was found.
    """
    order = decreasing(items.costs)
    costs = items.costs[order].tolist()
    least = max([-(-sum(costs) // num_bins), *costs[:1]])
    best, lowest, budget = None, -1, EXCHANGES
    for width in (1, num_bins):
        bin_of = np.empty(len(items), np.int64)
        bin_of[order] = _difference(costs, num_bins, width)
        crowded = (summed(items.counts, bin_of, num_bins) > items.max_sequences).any()
        if _repair(bin_of, items, num_bins):
            budget = _exchange(bin_of, items, num_bins, least=least, budget=budget)
            most = int(summed(items.costs, bin_of, num_bins).max())
            if best is None or most < lowest:
                best, lowest = bin_of, most
        if lowest == least or not (budget or crowded):
            break
    return best


def _difference(costs: list[int], num_bins: int, width: int) -> list[int]:
    """Return the part of each item; initial solutions are runs of ``width`` items.

    A solution is the ascending list of its nonempty parts: the cost of each, with its first item
    in the low bits. The items of a part form a linked list.
    """
    count = len(costs)
    shift = max(count, 1).bit_length()
    mask = (1 << shift) - 1
    last, following = list(range(count)), [-1] * count
    parts = [cost << shift | item for item, cost in enumerate(costs)]
    solutions = [sorted(parts[at : at + width]) for at in range(0, count, width)]

    def merge(part: int, other: int) -> int:
        first, added = part & mask, other & mask
        following[last[first]] = added
        last[first] = last[added]
        return part + (other - added)

    def join(left: list[int], right: list[int]) -> list[int]:
        if len(left) < len(right):
            left, right = right, left
        shared = max(0, len(left) + len(right) - num_bins)
        if len(right) == 1:  # the usual case; as below, in place
            insort(left, merge(left.pop(0), right[0]) if shared else right[0])
            return left
        met = map(merge, left[:shared], reversed(right[:shared]))
        return sorted([*met, *left[shared:], *right[shared:]])

    def key(number: int) -> int:
        """Return the negative spread of a solution, with its number in the low bits."""
        sums = solutions[number]
        smallest = sums[0] >> shift if len(sums) == num_bins else 0
        return (smallest - (sums[-1] >> shift)) << shift | number

    heap = [key(number) for number in range(len(solutions))]
    heapify(heap)
    while len(heap) > 1:
        number = heappop(heap) & mask
        other = heap[0] & mask
        solutions[number], solutions[other] = join(solutions[number], solutions[other]), []
        heapreplace(heap, key(number))
    part_of = [0] * count
    for part, sums in enumerate(reversed(solutions[heap[0] & mask] if heap else [])):
        item = sums & mask
        while item >= 0:
            part_of[item] = part
            item = following[item]
    return part_of


def _repair(bin_of: Ints, items: PlanItems, num_bins: int) -> bool:
    """Move items, cheapest first, out of micro-batches over a limit; return whether all fit.

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
            return False
        number = int(wide[held[0, wide].argmin()])
        held[:, number] += amounts[:, item]
        bin_of[item] = number
    return True


def _exchange(bin_of: Ints, items: PlanItems, num_bins: int, *, least: int, budget: int) -> int:
    """Improve ``bin_of`` in place: two items swap micro-batches, or one moves.

    An item of the most costly micro-batch is swapped for a cheaper one of another, or moved to it,
    so that the costlier of the two becomes as cheap as it can. Where no swap does that, the next
    most costly micro-batch is tried; then the most costly again.

    Args:
        bin_of: ``[items]``, within the limits before and after.
        items: Items.
        num_bins: Number of micro-batches.
        least: Lower bound of the most costly micro-batch.
        budget: Pairs of items that may be looked at; the rest is returned, 0 if it was too small.
    """
    amounts, held = _amounts(items, bin_of, num_bins)
    limits = np.array([items.capacity, items.max_sequences])[:, None, None]
    # a move is a swap for an item of zeros, of which each micro-batch has one that never leaves
    amounts = np.concatenate([amounts, np.zeros((3, num_bins), np.int64)], 1)
    places = np.concatenate([bin_of, np.arange(num_bins)])
    tried = 0
    while tried < num_bins and held[0].max() > least:
        most = int(np.argsort(-held[0], kind="stable")[tried])
        own = np.flatnonzero(places[: len(bin_of)] == most)
        budget -= len(own) * len(places)
        if budget < 0:
            budget = 0
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
    bin_of[:] = places[: len(bin_of)]
    return budget


def _amounts(items: PlanItems, bin_of: Ints, num_bins: int) -> tuple[Ints, Ints]:
    """Return costs, tokens and sequences, int64 ``[3, items]``, and their sums by micro-batch."""
    amounts = np.stack([items.costs, items.sizes, items.counts])
    return amounts, np.stack([summed(each, bin_of, num_bins) for each in amounts])


def split_bins(
    items: PlanItems, bin_of: Ints, num_bins: int, *, wanted: int, in_order: bool = False
) -> Ints:
    """Split the most costly micro-batches until there are ``wanted``.

    Where none is left to split, some are empty. ``in_order`` cuts a micro-batch in two where its
    halves differ least, and keeps micro-batches in the order of their items.
    """
    if num_bins in (0, wanted):
        return bin_of
    bin_of = bin_of.copy()
    ranked = np.argsort(bin_of, kind="stable")
    held = np.split(ranked, np.cumsum(np.bincount(bin_of, minlength=num_bins))[:-1])
    costs = summed(items.costs, bin_of, num_bins)
    heap = [(-int(costs[number]), number) for number in range(num_bins) if len(held[number]) > 1]
    heapify(heap)
    while len(held) < wanted and heap:
        _, number = heappop(heap)
        kept, moved = _halves(held[number], items, in_order)
        bin_of[moved] = len(held)
        for at, half in ((number, kept), (len(held), moved)):
            if len(half) > 1:
                heappush(heap, (-int(items.costs[half].sum()), at))
        held[number] = kept
        held.append(moved)
    if in_order:
        # micro-batches that were empty before, of a rank without sequences, stay last
        first = [int(half[0]) if len(half) else len(ranked) for half in held]
        bin_of = inverse_of(np.argsort(first, kind="stable"))[bin_of]
    return bin_of


def _halves(held: Ints, items: PlanItems, in_order: bool) -> tuple[Ints, Ints]:
    costs = items.costs[held]
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
        second[order[-1]] = True  # all costs are 0
    return held[~second], held[second]
