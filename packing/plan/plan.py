"""`plan_micro_batches` and `plan_ranks`: plans from lengths alone, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trajpack.packing.plan.algorithms import PlanItems, place_items
from trajpack.packing.plan.request import read_request
from trajpack.packing.plan.types import Plan, RankPlan
from trajpack.packing.plan.units import (
    Algorithm,
    Cost,
    Ints,
    Labels,
    Policy,
    check_count,
    inverse_of,
    summed,
)


def plan_micro_batches(  # noqa: PLR0913
    seqlens: Any,
    capacity: int,
    *,
    algorithm: Algorithm = "best_fit_decreasing",
    cost: Cost = None,
    min_bins: int = 1,
    multiple_of: int = 1,
    max_sequences: int | None = None,
    keep_together: Labels = None,
    align: int = 1,
    oversized: Policy = "raise",
    turn_ends: Sequence[Sequence[int]] | None = None,
    shapes: int | None = None,
    sequences: Any = None,
) -> Plan:
    """Plan micro-batches of at most ``capacity`` tokens, with every algorithm.

    The plan depends on the numbers alone: equal lengths give the equal plan in every process.

    Args:
        seqlens: ``[sequences]``: tokens of each; ints, an integer array or a tensor.
        capacity: Maximum tokens of a micro-batch, ``align`` or more; from 2³¹ - 1 on, no limit.
        algorithm: Method that fills them, see `trajpack.packing.plan.units.Algorithm`.
        cost: Cost of a sequence, where micro-batches are balanced or split: ``None`` for its
            aligned tokens, one number for each sequence, or a function of aligned lengths such as
            `TransformerCost`. The cost of a micro-batch is the sum of its sequences'.
        min_bins: Minimum number of micro-batches, 1 or more; without sequences they are empty.
        multiple_of: Their number is a multiple of this: of ranks, or of a pipeline's group. More
            are made by splitting the most costly; where none is left to split, they are empty.
        max_sequences: Maximum sequences of a micro-batch.
        keep_together: A label for each sequence: those with equal labels are in one micro-batch.
            ``None`` is a label of its own.
        align: Each sequence takes a multiple of this many tokens.
        oversized: Treatment of a sequence longer than the capacity, see
            `trajpack.packing.plan.units.Policy`.
        turn_ends: For ``"truncate_at_turn"``: for each sequence, its tokens up to the end of each
            turn (`PackedBatch.turn_ends`).
        shapes: Maximum number of shapes: `Plan.total_multiple` is the capacity over this, and
            ``Alignment(total_multiple=...)`` pads micro-batches to multiples of it. The capacity
            must be a multiple of ``shapes * align``.
        sequences: int ``[planned]``: sequences to plan; all if None. The plan is for the whole
            batch, and has no micro-batch with others.

    Returns:
        The plan; the sequences of a micro-batch are in the order of the batch.

    Raises:
        TypeError: If lengths or counts are not integers.
        ValueError: If a sequence is too long, sequences kept together do not fit, or an argument
            has a wrong size or value.

    Example:
        >>> plan = plan_micro_batches([5, 3, 4, 2, 6], capacity=10)
        >>> [sequences.tolist() for sequences in plan]
        [[2, 4], [0, 1, 3]]
        >>> plan.loads, plan.lower_bound
        (array([10, 10]), 2)
    """
    request = read_request(
        "plan_micro_batches",
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
        shapes=shapes,
        sequences=sequences,
    )
    return request.planned(*place_items(request.items, algorithm, min_bins, multiple_of))


def plan_ranks(  # noqa: PLR0913
    seqlens: Any,
    num_ranks: int,
    capacity: int,
    *,
    algorithm: Algorithm = "karmarkar_karp",
    cost: Cost = None,
    keep_together: Labels = None,
    min_bins: int = 1,
    multiple_of: int = 1,
    max_sequences: int | None = None,
    align: int = 1,
    oversized: Policy = "raise",
    turn_ends: Sequence[Sequence[int]] | None = None,
    shapes: int | None = None,
    sequences: Any = None,
) -> RankPlan:
    """Plan the micro-batches of every data-parallel rank, as many on each, of about equal cost.

    The plan depends on the numbers alone, so every rank computes the same one without
    communication. Micro-batches of all sequences are dealt out so that the n-th ones of all ranks
    cost about the same, most costly first: ranks in step wait little, and memory runs out at once
    or never.

    Args:
        seqlens: ``[sequences]``: tokens of each, of the whole batch.
        num_ranks: Number of data-parallel ranks.
        capacity: Maximum tokens of a micro-batch.
        algorithm: Method that fills them, see `trajpack.packing.plan.units.Algorithm`.
        cost: See `plan_micro_batches`.
        keep_together: See `plan_micro_batches`.
        min_bins: Minimum micro-batches of a rank, 1 or more: a rank without any would not keep step
            with one that has sequences.
        multiple_of: The number of micro-batches of each rank is a multiple of this.
        max_sequences: See `plan_micro_batches`.
        align: See `plan_micro_batches`.
        oversized: See `plan_micro_batches`.
        turn_ends: See `plan_micro_batches`.
        shapes: See `plan_micro_batches`.
        sequences: Those to plan, see `plan_micro_batches`. A batch for several optimizer steps
            is planned once for each.

    Raises:
        TypeError, ValueError: As `plan_micro_batches`.

    Example:
        >>> plans = plan_ranks([8, 7, 2, 3, 5, 6], num_ranks=2, capacity=10)
        >>> [[sequences.tolist() for sequences in plans.plan(rank)] for rank in range(2)]
        [[[0], [3, 4]], [[2, 5], [1]]]
    """
    check_count("plan_ranks", "num_ranks", num_ranks)
    request = read_request(
        "plan_ranks",
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
        shapes=shapes,
        sequences=sequences,
    )
    bins = num_ranks * min_bins, num_ranks * multiple_of
    bin_of, num_bins = place_items(request.items, algorithm, *bins)
    each = num_bins // num_ranks
    rank_of, number = np.divmod(deal(request.items, bin_of, num_bins, num_ranks), each)
    return RankPlan(
        tuple(
            request.planned(np.where(rank_of == rank, number, -1), each)
            for rank in range(num_ranks)
        )
    )


def deal(items: PlanItems, bin_of: Ints, num_bins: int, num_ranks: int) -> Ints:
    """Return ``bin_of`` with micro-batches numbered anew, rank after rank.

    Micro-batches are dealt out in rounds, most costly first: the most costly of a round goes to the
    rank that costs least so far. So the n-th micro-batches of all ranks cost about the same, and
    each rank has its most costly one first. Empty ones are dealt out last.
    """
    costs = summed(items.costs, bin_of, num_bins)
    empty = np.bincount(bin_of, minlength=num_bins) == 0
    rounds = np.lexsort((np.arange(num_bins), -costs, empty)).reshape(-1, num_ranks)
    loads = np.zeros(num_ranks, np.int64)
    for dealt in rounds:
        ranks = np.argsort(loads, kind="stable")
        loads[ranks] += costs[dealt]
        dealt[ranks] = dealt.copy()
    return inverse_of(rounds.T.ravel())[bin_of]
