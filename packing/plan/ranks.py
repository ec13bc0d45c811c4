"""Plans for data-parallel ranks: equal cost, and the same number of micro-batches on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajpack.packing.plan.algorithms import (
    balance_over,
    karmarkar_karp,
    place_items,
    split_bins,
)
from trajpack.packing.plan.plan import Plan, build_plan
from trajpack.packing.plan.statistics import PlanStatistics, fill_of, statistics_of
from trajpack.packing.plan.units import (
    Algorithm,
    Cost,
    Ints,
    Labels,
    PlanInput,
    PlanItems,
    Policy,
    check_count,
    inverse_of,
    numbered,
    read_input,
    read_labels,
    scaled,
    summed,
)

SWAPS_OF_A_RANK = 8
SWAP_TRIALS = 2**22
"""Swaps between ranks that are looked at, at most."""


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The plans of all ranks and steps; every rank computes the same one and takes its own.

    In a step every rank has as many micro-batches. Where a rank has too few sequences for that,
    some are dummies, without sequences.

    Attributes:
        plans: Plans by step, then by rank; each over the sequences of the whole batch.
        dropped: Sequences that no rank has since they are too long.
    """

    plans: tuple[tuple[Plan, ...], ...]
    dropped: tuple[int, ...] = ()

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.plans)

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return len(self.plans[0])

    def plan(self, rank: int, step: int = 0) -> Plan:
        """Return the plan of a rank in a step.

        Its indices are those of the whole batch. Dropped sequences are named in `dropped` alone.

        Raises:
            IndexError: If there is no such rank or step.
        """
        if not 0 <= step < self.num_steps:
            raise IndexError(f"RankPlan: step must be in [0, {self.num_steps - 1}], got {step}")
        if not 0 <= rank < self.num_ranks:
            raise IndexError(f"RankPlan: rank must be in [0, {self.num_ranks - 1}], got {rank}")
        return self.plans[step][rank]

    @property
    def fill(self) -> float:
        """Tokens, without padding, over the capacity of all micro-batches of all ranks."""
        return fill_of([plan for step in self.plans for plan in step])

    def statistics(self) -> PlanStatistics:
        """Count tokens, padding and dummies of all ranks, and measure how even they are."""
        return statistics_of(self.plans, self.dropped)

    def __repr__(self) -> str:
        counts = ", ".join(str(len(step[0])) for step in self.plans)
        return (
            f"RankPlan({self.num_ranks} ranks, {self.num_steps} steps of {counts} micro-batches "
            f"each, fill {self.fill:.4f})"
        )


def plan_ranks(  # noqa: PLR0913
    seqlens: Any,
    num_ranks: int,
    capacity: int,
    *,
    algorithm: Algorithm = "karmarkar_karp",
    cost: Cost = None,
    num_steps: int = 1,
    keep_in_step: Labels = None,
    keep_together: Labels = None,
    min_bins: int = 1,
    multiple_of: int = 1,
    max_sequences: int | None = None,
    align: int = 1,
    oversized: Policy = "raise",
    turn_ends: Sequence[Sequence[int]] | None = None,
) -> RankPlan:
    """Plan the micro-batches of every data-parallel rank, as many on each, of about equal cost.

    The plan depends on the numbers alone, so every rank computes the same one without
    communication. Sequences go to ranks first and then to micro-batches, or micro-batches of all
    sequences are dealt out: the way that takes fewer micro-batches, and then the fairer one. A rank
    has its most costly micro-batch first: ranks in step wait little, and memory runs out at once or
    never.

    Args:
        seqlens: ``[sequences]``: tokens of each, of the whole batch.
        num_ranks: Number of data-parallel ranks.
        capacity: Maximum tokens of a micro-batch.
        algorithm: Method that fills them, see `trajpack.packing.plan.units.Algorithm`.
        cost: Cost of a sequence, see `plan_micro_batches`.
        num_steps: Optimizer steps that the batch is for. They take sequences in the order of the
            batch, as many each as the number allows; labels in a step count once each.
        keep_in_step: A label for each sequence: those with equal labels are in one step.
        keep_together: A label for each sequence: equal ones are in one micro-batch.
        min_bins: Minimum micro-batches of a rank in a step, 1 or more: a rank without any would
            not keep step with one that has sequences.
        multiple_of: Their number, for each rank and step, is a multiple of this.
        max_sequences: Maximum sequences of a micro-batch.
        align: Each sequence takes a multiple of this many tokens.
        oversized: Treatment of a sequence longer than the capacity.
        turn_ends: For ``oversized="truncate_at_turn"``, see `plan_micro_batches`.

    Raises:
        TypeError, ValueError: As `plan_micro_batches`, and if there are fewer sequences or labels
            than steps.

    Example:
        >>> plans = plan_ranks([8, 7, 2, 3, 5, 6], num_ranks=2, capacity=10)
        >>> [[sequences.tolist() for sequences in plans.plan(rank)] for rank in range(2)]
        [[[3, 4], [0]], [[2, 5], [1]]]
    """
    op = "plan_ranks"
    source = read_input(
        op,
        seqlens,
        capacity,
        algorithm=algorithm,
        cost=cost,
        min_bins=min_bins,
        multiple_of=multiple_of,
        max_sequences=max_sequences,
        keep_together=keep_together,
        align=align,
        oversized=oversized,
        turn_ends=turn_ends,
    )
    check_count(op, "num_ranks", num_ranks)
    check_count(op, "num_steps", num_steps)
    count = len(source.seqlens)
    in_step = read_labels(op, "keep_in_step", keep_in_step, num_sequences=count)
    plans = []
    for members in _split_steps(source, _joined(in_step, source.together), num_steps):
        bin_of, num_bins = _place(source, members, num_ranks)
        each = num_bins // num_ranks
        rank_of, number = np.divmod(bin_of, each)
        held = [rank_of == rank for rank in range(num_ranks)]
        plans.append(
            tuple(build_plan(source, members[own], number[own], num_bins=each) for own in held)
        )
    return RankPlan(tuple(plans), source.dropped)


def _joined(first: Ints | None, second: Ints | None) -> Ints | None:
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
    for label, other in zip(first.tolist(), second.tolist(), strict=True):
        earlier, later = sorted((root(known.setdefault(other, label)), root(label)))
        parent[later] = earlier
    return np.array([root(label) for label in first.tolist()], np.int64)


def _split_steps(source: PlanInput, labels: Ints | None, num_steps: int) -> list[Ints]:
    """Return the sequences of each step: labels in order of appearance, as many in each."""
    members = source.planned
    if num_steps == 1:
        return [members]
    if labels is None:
        block_of, num_blocks = np.arange(len(members)), len(members)
    else:
        block_of, firsts = numbered(labels[members])
        num_blocks = len(firsts)
    if num_blocks < num_steps:
        raise ValueError(
            f"{source.op}: num_steps must be {num_blocks} or fewer, as many as there are "
            f"{'sequences' if labels is None else 'blocks kept in a step'}, got {num_steps}"
        )
    step_of = block_of * num_steps // num_blocks
    return [members[step_of == step] for step in range(num_steps)]


def _place(source: PlanInput, members: Ints, num_ranks: int) -> tuple[Ints, int]:
    """Return the micro-batch of each sequence of a step, and their number, rank after rank.

    There are two ways: micro-batches of all sequences, dealt out to ranks, fill better; sequences
    to ranks first, and then to micro-batches, makes ranks cost the same. The way with fewer
    micro-batches is taken, then the one whose most costly rank costs less.
    """
    found = _bins_first(source, members, num_ranks)
    if source.algorithm == "next_fit" or num_ranks == 1:  # it keeps the batch's order
        return found
    costs = scaled(source.costs[members])

    def price(placement: tuple[Ints, int]) -> tuple[int, int]:
        bin_of, num_bins = placement
        return num_bins, int(summed(costs, bin_of // (num_bins // num_ranks), num_ranks).max())

    return min(_ranks_first(source, members, num_ranks), found, key=price)


def _bins_first(source: PlanInput, members: Ints, num_ranks: int) -> tuple[Ints, int]:
    """Make micro-batches of all sequences, and deal them out."""
    items = source.items(members)
    bin_of, num_bins = place_items(
        items,
        source.algorithm,
        min_bins=num_ranks * source.min_bins,
        multiple_of=num_ranks * source.multiple_of,
    )
    costs = summed(items.costs, bin_of, num_bins)
    empty = np.bincount(bin_of, minlength=num_bins) == 0
    rank_of = deal(costs, empty, num_ranks)
    held = [np.flatnonzero(rank_of == rank) for rank in range(num_ranks)]
    ordered = np.concatenate([own[_largest_first(costs[own], empty[own])] for own in held])
    return inverse_of(ordered)[bin_of[items.item_of]], num_bins


def _ranks_first(source: PlanInput, members: Ints, num_ranks: int) -> tuple[Ints, int]:
    """Assign sequences to ranks so that ranks cost the same, and make each rank's micro-batches."""
    together = np.arange(len(members)) if source.together is None else source.together[members]
    block_of, firsts = numbered(together)
    totals = summed(scaled(source.costs[members]), block_of, len(firsts))
    ones = np.ones_like(totals)
    unbounded = PlanItems(totals, ones, totals, int(totals.sum()), len(ones), ones)
    assigned = karmarkar_karp(unbounded, num_ranks)
    assert assigned is not None  # without limits there is room
    held = [np.flatnonzero(assigned[block_of] == rank) for rank in range(num_ranks)]
    items = [source.items(members[own]) for own in held]
    bounds = {"min_bins": source.min_bins, "multiple_of": source.multiple_of}
    found = [place_items(one, source.algorithm, **bounds) for one in items]
    most = max(num_bins for _, num_bins in found)
    placed = np.empty(len(members), np.int64)
    for rank, (own, one, (bin_of, num_bins)) in enumerate(zip(held, items, found, strict=True)):
        again = None
        if num_bins < most and source.algorithm == "karmarkar_karp":
            again = balance_over(one, most)
        if again is None:
            again = split_bins(one, bin_of, num_bins, wanted=most)
        empty = np.bincount(again, minlength=most) == 0
        ordered = _largest_first(summed(one.costs, again, most), empty)
        placed[own] = rank * most + inverse_of(ordered)[again[one.item_of]]
    return placed, most * num_ranks


def _largest_first(costs: Ints, empty: Any) -> Ints:
    """Return the micro-batches by falling cost; empty ones come last."""
    return np.lexsort((np.arange(len(costs)), -costs, empty))


def deal(costs: Ints, empty: Any, num_ranks: int) -> Ints:
    """Deal micro-batches out, the same number to each rank; return the rank of each.

    In rounds, most costly first: the most costly of a round goes to the rank that costs least so
    far, so that the n-th micro-batches of all ranks cost about the same. Ranks then swap within
    rounds while that lowers the cost of the most costly rank. Empty ones are dealt out last.
    """
    order = _largest_first(costs, empty).reshape(-1, num_ranks)
    held = np.empty((num_ranks, len(order)), np.int64)
    loads = np.zeros(num_ranks, np.int64)
    for number, chosen in enumerate(order):
        ranks = np.argsort(loads, kind="stable")
        held[ranks, number] = chosen
        loads[ranks] += costs[chosen]
    cost = costs[held]
    for _ in range(min(SWAPS_OF_A_RANK * len(order), SWAP_TRIALS // max(held.size, 1))):
        most = int(loads.argmax())
        taken = cost[most] - cost
        gain = np.minimum(taken, (loads[most] - loads)[:, None] - taken)
        other, number = divmod(int(gain.argmax()), held.shape[1])
        if gain[other, number] <= 0:
            break
        pair, swapped = [most, other], [other, most]
        loads[pair] += np.array([-1, 1]) * taken[other, number]
        held[pair, number], cost[pair, number] = held[swapped, number], cost[swapped, number]
    rank_of = np.empty(len(costs), np.int64)
    rank_of[held] = np.arange(num_ranks)[:, None]
    return rank_of
