"""Plans of micro-batches of trees: cuts of the depth-first order of chains, on the host."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trajpack.packing.plan.units import MAX_CAPACITY, check_count, decreasing
from trajpack.packing.tree.trie import Chains, Ints, Trie


@dataclass(frozen=True, eq=False)
class ChainPlan:
    """The chains of a tree in each micro-batch: integers on the host, no tokens.

    Made by `TreeBatch.plan_micro_batches` or `TreeBatch.plan_ranks`. A chain is a sequence of
    layout ``"merged"``. Micro-batches are stretches of the depth-first order of chains; ``plan[i]``
    are the chains of micro-batch i. One without chains is a dummy.

    Attributes:
        order: int64 ``[chains]``: all chains of the batch, depth first.
        bounds: int64 ``[micro-batches, 2]``: first and end of each in `order`; equal in a dummy.
        loads: int64 ``[micro-batches]``: nodes of each. A prefix that chains of several
            micro-batches have is in each of them.
        capacity: Maximum nodes of a micro-batch.
    """

    order: Ints
    bounds: Ints
    loads: Ints
    capacity: int

    def __len__(self) -> int:
        """Return the number of micro-batches, dummies included."""
        return len(self.bounds)

    def __getitem__(self, index: int) -> Ints:
        """Return the chains of a micro-batch, depth first."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        begin, end = self.bounds[index]
        return self.order[begin:end]

    def __iter__(self) -> Iterator[Ints]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        planned = int(np.diff(self.bounds).sum())
        return (
            f"ChainPlan({len(self)} micro-batches of up to {self.capacity} nodes, "
            f"{planned} of {len(self.order)} chains, {self.num_nodes} nodes)"
        )

    @property
    def num_nodes(self) -> int:
        """Nodes of all micro-batches: those of the batch, and each prefix that is repeated."""
        return int(self.loads.sum())

    @property
    def fill(self) -> float:
        """Nodes, without padding, over the capacity of all micro-batches."""
        return self.num_nodes / (len(self) * self.capacity)


def plan_chains(chains: Chains, capacity: int, ids: Sequence[str]) -> ChainPlan:
    """Implement `TreeBatch.plan_micro_batches`; ``ids`` are the names of the trajectories."""
    capacity = _checked("plan_micro_batches", chains, capacity, ids)
    begins = _begins(chains.trie, capacity)
    bounds = _bounds(chains.trie, begins, max(len(begins), 1))
    return ChainPlan(chains.trie.order, bounds, _loads(chains.trie, bounds), capacity)


def plan_chain_ranks(
    chains: Chains, num_ranks: int, capacity: int, *, ids: Sequence[str]
) -> tuple[ChainPlan, ...]:
    """Implement `TreeBatch.plan_ranks`."""
    check_count("plan_ranks", "num_ranks", num_ranks)
    capacity = _checked("plan_ranks", chains, capacity, ids)
    trie = chains.trie
    places = -(-max(len(_begins(trie, capacity)), 1) // num_ranks) * num_ranks
    low = max(int(trie.lengths.max(initial=1)), -(-trie.num_nodes // places))
    fits = bisect_left(range(low, capacity), True, key=lambda n: len(_begins(trie, n)) <= places)
    begins = _begins(trie, min(low + fits, capacity))
    bounds = _bounds(trie, begins, places)
    rounds = decreasing(_loads(trie, bounds)).reshape(-1, num_ranks)
    rounds[1::2] = rounds[1::2, ::-1].copy()
    return tuple(
        ChainPlan(trie.order, bounds[own], _loads(trie, bounds[own]), capacity) for own in rounds.T
    )


def check_plan(plan: ChainPlan, trie: Trie) -> None:
    """Raise unless a plan is for the chains of a trie."""
    if not isinstance(plan, ChainPlan):
        raise TypeError(
            f"plan must be a ChainPlan, of one rank, as TreeBatch.plan_micro_batches makes it, "
            f"got {type(plan).__name__}"
        )
    if not np.array_equal(plan.order, trie.order) or not np.array_equal(
        plan.loads, _loads(trie, plan.bounds)
    ):
        raise ValueError(
            f"the plan is for another batch: it has {len(plan.order)} chains, the batch has "
            f"{len(trie.order)} of {trie.num_nodes} nodes"
        )


def _checked(op: str, chains: Chains, capacity: int, ids: Sequence[str]) -> int:
    """Return the capacity; raise unless the arguments are known and every chain fits."""
    check_count(op, "capacity", capacity)
    trie = chains.trie
    if trie.lengths.max(initial=0) <= capacity:
        return min(int(capacity), MAX_CAPACITY)
    chain = int(trie.order[trie.lengths > capacity].min())
    place = int(trie.places[chain])
    turns = np.flatnonzero(chains.place == place)
    owner = chains.trajectory[turns[0]]
    first, last = turns[[0, -1]] - np.searchsorted(chains.trajectory, owner)
    raise ValueError(
        f"{op}: trajectory {ids[owner]!r}, turns {first} to {last}, is a chain of "
        f"{trie.lengths[place]} tokens, more than the capacity of {capacity}"
    )


def _begins(trie: Trie, capacity: int) -> list[int]:
    """Return the places at which micro-batches begin: the fewest, then with the fewest nodes.

    By dynamic programming over cuts. A micro-batch from place a to place b has the nodes that these
    places own and ``shared[a]`` nodes of places before, which a cut at a repeats. With a later a it
    is never larger, so the cuts that may precede b are a window that moves forward, and the
    cheapest is found in constant time on average.
    """
    first, count = trie.first, len(trie.order)
    earliest = np.searchsorted(first[:-1] - trie.shared, first[1:] - capacity)
    prices = int(trie.shared.sum()) + 1 + trie.shared  # one more costs more than all repeats
    cheapest: deque[tuple[int, int]] = deque()  # begins with rising costs
    cost, begin_of = 0, list[int]()
    for begin, (low, price) in enumerate(zip(earliest.tolist(), prices.tolist(), strict=True)):
        cost += price
        while cheapest and cheapest[-1][0] >= cost:
            cheapest.pop()
        cheapest.append((cost, begin))
        while cheapest[0][1] < low:
            cheapest.popleft()
        cost, of = cheapest[0]
        begin_of.append(of)
    found, end = list[int](), count
    while end:
        end = begin_of[end - 1]
        found.append(end)
    return found[::-1]


def _bounds(trie: Trie, begins: list[int], num_micro_batches: int) -> Ints:
    """Return first place and end of each micro-batch; the last ones may be dummies."""
    bounds = np.zeros((num_micro_batches, 2), np.int64)
    if begins:
        bounds[: len(begins)] = np.stack([begins, [*begins[1:], len(trie.order)]], 1)
    return bounds


def _loads(trie: Trie, bounds: Ints) -> Ints:
    """Return the nodes of micro-batches."""
    begin, end = bounds.T
    nodes = np.append(trie.shared, 0)[begin] + trie.first[end] - trie.first[begin]
    return np.where(begin < end, nodes, 0)
