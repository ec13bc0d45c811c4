"""Blocks of sequences that belong to one optimizer step or to one rank, and where they go."""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np

from trajpack.packing.plan.differencing import karmarkar_karp
from trajpack.packing.plan.fitting import decreasing
from trajpack.packing.plan.units import Ints, Limits, Units, numbered, summed

SWAPS_OF_A_RANK = 8
SWAP_TRIALS = 2**22
"""Swaps that are looked at, of all ranks together, at most."""


def joined(first: Ints | None, second: Ints | None) -> Ints | None:
    """Return labels that are equal wherever labels of either kind are, directly or in a chain."""
    if first is None or second is None:
        return second if first is None else first
    parent = list(range(int(first.max(initial=-1)) + 1))

    def root(label: int) -> int:
        while parent[label] != label:
            parent[label] = parent[parent[label]]
            label = parent[label]
        return label

    known: dict[int, int] = {}
    pairs = zip(first.tolist(), second.tolist(), strict=True)
    for label, other in pairs:
        earlier, later = sorted((root(known.setdefault(other, label)), root(label)))
        parent[later] = earlier
    return np.array([root(label) for label in first.tolist()], np.int64)


def steps_of(op: str, members: Ints, blocks: Ints | None, num_steps: int) -> list[Ints]:
    """Return the sequences of each step: blocks in order of their first, as many in each.

    Raises:
        ValueError: If there are fewer blocks than steps.
    """
    if num_steps == 1:
        return [members]
    if blocks is None:
        block_of, num_blocks = np.arange(len(members)), len(members)
    else:
        block_of, firsts = numbered(blocks[members])
        num_blocks = len(firsts)
    if num_blocks < num_steps:
        raise ValueError(
            f"{op}: num_steps must be {num_blocks} or fewer, as many as there are "
            f"{'sequences' if blocks is None else 'blocks kept in a step'}, got {num_steps}"
        )
    step_of = block_of * num_steps // num_blocks
    return [members[step_of == step] for step in range(num_steps)]


class Ranks:
    """Which rank has which block; one that had it in an earlier step keeps it."""

    def __init__(self, num_ranks: int, algorithm: str) -> None:
        self.num_ranks = num_ranks
        self.algorithm = algorithm
        self.owners: dict[int, int] = {}

    def assign(self, blocks: Ints, costs: Ints) -> Ints:
        """Return the rank of each sequence of a step, so that ranks cost about the same.

        Args:
            blocks: ``[members]``: block of each.
            costs: ``[members]``: its cost, as an integer.
        """
        block_of, firsts = numbered(blocks)
        labels = blocks[firsts].tolist()
        totals = summed(costs, block_of, len(firsts))
        known = np.array([self.owners.get(label, -1) for label in labels], np.int64)
        if self.algorithm == "karmarkar_karp" and (known < 0).all():
            ones = np.ones_like(totals)
            units = Units(totals, ones, totals, np.arange(len(ones)), np.arange(len(ones)))
            unbounded = Limits(int(totals.sum()), len(ones))
            found = karmarkar_karp(units, self.num_ranks, unbounded)
            assert found is not None
            rank_of = found
        else:
            rank_of = self._by_cost(totals, known)
        self.owners |= dict(zip(labels, rank_of.tolist(), strict=True))
        return rank_of[block_of]

    def _by_cost(self, totals: Ints, known: Ints) -> Ints:
        """Give the most costly block that no rank has yet to the rank that costs least."""
        rank_of = known.copy()
        kept = np.flatnonzero(known >= 0)
        loads = summed(totals[kept], known[kept], self.num_ranks)
        heap = [(load, rank) for rank, load in enumerate(loads.tolist())]
        heapify(heap)
        fresh = np.flatnonzero(known < 0)
        for block in fresh[decreasing(totals[fresh])].tolist():
            load, rank = heap[0]
            heapreplace(heap, (load + int(totals[block]), rank))
            rank_of[block] = rank
        return rank_of


def dealt(costs: Ints, empty: Ints, num_ranks: int) -> Ints:
    """Deal micro-batches out, the same number to each rank; return the rank of each.

    In rounds, most costly first: the most costly of a round goes to the rank that costs least so
    far. So the n-th of all ranks cost about the same, and so do the ranks. Ranks then swap within
    rounds as long as that takes something from the most costly one.

    Args:
        costs: ``[micro-batches]``, a multiple of the ranks.
        empty: 1 where a micro-batch holds nothing; it is dealt out last.
        num_ranks: Ranks.
    """
    order = np.lexsort((np.arange(len(costs)), -costs, empty)).reshape(-1, num_ranks)
    held = np.empty((num_ranks, len(order)), np.int64)
    loads = np.zeros(num_ranks, np.int64)
    for number, chosen in enumerate(order):
        ranks = np.argsort(loads, kind="stable")
        held[ranks, number] = chosen
        loads[ranks] += costs[chosen]
    _swap(held, costs, loads)
    rank_of = np.empty(len(costs), np.int64)
    rank_of[held] = np.arange(num_ranks)[:, None]
    return rank_of


def _swap(held: Ints, costs: Ints, loads: Ints) -> None:
    """Swap micro-batches of the most costly rank for cheaper ones of the same round."""
    cost = costs[held]
    for _ in range(min(SWAPS_OF_A_RANK * len(held), SWAP_TRIALS // max(held.size, 1))):
        most = int(loads.argmax())
        taken = cost[most] - cost
        gain = np.minimum(taken, (loads[most] - loads)[:, None] - taken)
        other, number = divmod(int(gain.argmax()), held.shape[1])
        if gain[other, number] <= 0:
            return
        pair, swapped = [most, other], [other, most]
        held[pair, number], cost[pair, number] = held[swapped, number], cost[swapped, number]
        loads[pair] += np.array([-1, 1]) * taken[other, number]
