"""How systems plan micro-batches, restated: each takes lengths, and returns lists of sequences."""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict

import numpy as np


def first_fit_by_scan(lengths, capacity):
    """Return bins as slime and prime-rl do: longest first, each bin asked in turn."""
    bins, rooms = [], []
    for sequence in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[sequence]
        for number, room in enumerate(rooms):
            if room >= length:
                bins[number].append(sequence)
                rooms[number] = room - length
                break
        else:
            bins.append([sequence])
            rooms.append(capacity - length)
    return bins


def fewest_held_by_scan(lengths, capacity):
    """Return bins as AReaL does: longest first, into the one of fewest sequences that has room."""
    held, bins = [], []  # held: (tokens, number), ascending
    for sequence in np.argsort(-np.array(lengths)).tolist():
        length = lengths[sequence]
        if not held or held[0][0] + length > capacity:
            bisect.insort(held, (length, len(bins)))
            bins.append([sequence])
            continue
        fitting = bisect.bisect_right(held, (capacity - length, len(lengths)))
        counts = [len(bins[number]) for _, number in held[:fitting]]
        tokens, number = held.pop(int(np.argmin(counts)))
        bisect.insort(held, (tokens + length, number))
        bins[number].append(sequence)
    return bins


class _Rooms:
    """A tree over rooms: at a leaf its room if some bin has it, above it the larger of two."""

    def __init__(self, capacity):
        self.size = 1 << capacity.bit_length()
        self.tree = [0] * (2 * self.size)

    def put(self, room, value):
        tree, node = self.tree, room + self.size
        tree[node] = value
        while node > 1:
            node >>= 1
            tree[node] = max(tree[2 * node], tree[2 * node + 1])

    def least(self, length):
        """Return the least room that is enough; 0 if none is."""
        tree, node = self.tree, length + self.size
        if tree[node]:
            return tree[node]
        while node % 2 or not tree[node + 1]:
            node >>= 1
            if node <= 1:
                return 0
        node += 1
        while node < self.size:
            node = 2 * node if tree[2 * node] else 2 * node + 1
        return tree[node]


def best_fit_by_tree(lengths, capacity):
    """Return bins as TRL does: longest first; a tree over rooms finds the least that is enough."""
    rooms, with_room, bins = _Rooms(capacity), defaultdict(list), []
    for sequence in np.argsort(-np.array(lengths), kind="stable").tolist():
        length = lengths[sequence]
        room = rooms.least(length)
        if room:
            number = with_room[room].pop()
            if not with_room[room]:
                rooms.put(room, 0)
        else:
            number, room = len(bins), capacity
            bins.append([])
        bins[number].append(sequence)
        left = room - length
        if left:
            if not with_room[left]:
                rooms.put(left, left)
            with_room[left].append(number)
    return bins


def longest_first_by_heap(costs, num_bins):
    """Return bins as SkyRL and TRL do to balance: most costly first, to the least loaded."""
    bins, heap = [[] for _ in range(num_bins)], [(0, number) for number in range(num_bins)]
    for sequence in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, number = heap[0]
        heapq.heapreplace(heap, (load + costs[sequence], number))
        bins[number].append(sequence)
    return bins


class _Solution:
    """A partial solution with all its parts, the empty ones too, most costly first."""

    def __init__(self, parts):
        self.parts = sorted(parts, key=lambda part: -part[0])
        self.spread = self.parts[0][0] - self.parts[-1][0]

    def __lt__(self, other):
        return self.spread > other.spread


def differencing_by_rows(costs, num_bins):
    """Return bins as verl does: Karmarkar and Karp's method, each solution with all parts."""
    empty = [(0, [])] * (num_bins - 1)
    heap = [_Solution([(cost, [sequence]), *empty]) for sequence, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(one.parts, reversed(other.parts), strict=True)
        heapq.heappush(
            heap, _Solution([(first[0] + last[0], first[1] + last[1]) for first, last in pairs])
        )
    return [held for _, held in heap[0].parts]
