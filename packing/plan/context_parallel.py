"""`plan_context_parallel`: a context-parallel size for each micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from trajpack.packing.plan.algorithms import PlanItems, best_fit_decreasing, even
from trajpack.packing.plan.plan import deal
from trajpack.packing.plan.request import read_request
from trajpack.packing.plan.types import RankPlan
from trajpack.packing.plan.units import (
    MAX_CAPACITY,
    Cost,
    Ints,
    check_count,
    decreasing,
    round_up,
    summed,
)

TOLERANCE = 1.05
"""Time of a narrower group over that of the best one, up to which the narrower is taken."""


def plan_context_parallel(
    seqlens: Any, num_ranks: int, capacity: int, *, cost: Cost = None, align: int = 1
) -> RankPlan:
    """Plan micro-batches that 1, 2, 4, ... ranks share, as many as their sequences need.

    Ranks are those of data and context parallelism together. In the i-th micro-batch, ranks form
    groups of ``plan.cp_sizes[i]`` neighbours, the first of which is a multiple of that: the dynamic
    context parallelism of Megatron-Core. Ranks of a group have the same sequences, and each holds
    a share: ``micro_batch.shard(cp_size, rank % cp_size)``. No rank is without sequences.

    The longest sequences come first, and shorter ones fill their groups. A group is as narrow as
    the capacity allows, or wider where ranks would wait for more than 5 %: then long sequences cost
    less on each rank.

    Args:
        seqlens: ``[sequences]``: tokens of each, of the whole batch.
        num_ranks: Number of ranks, a power of two.
        capacity: Maximum tokens on a rank: a micro-batch of n ranks holds n times as many.
        cost: Cost of a sequence, see `plan_micro_batches`; ranks share it.
        align: Each sequence takes a multiple of this many tokens; `MicroBatch.shard` needs twice
            the widest group.

    Returns:
        The plans of all ranks, with as many micro-batches each.

    Raises:
        TypeError: If lengths or counts are not integers.
        ValueError: If a sequence is too long for all ranks together, or an argument has a wrong
            size or value.

    Example:
        >>> plans = plan_context_parallel([40, 9, 8, 7, 10, 6, 10, 9], num_ranks=4, capacity=10)
        >>> plans.plan(0).cp_sizes, [held.tolist() for held in plans.plan(0)]
        (array([4, 4, 4]), [[0], [2, 3, 5, 7], [1, 4, 6]])
    """
    op = "plan_context_parallel"
    check_count(op, "num_ranks", num_ranks)
    check_count(op, "align", align)
    check_count(op, "capacity", capacity, least=align)
    if num_ranks & (num_ranks - 1):
        raise ValueError(f"{op}: num_ranks must be a power of two, got {num_ranks}")
    room = min(capacity, MAX_CAPACITY // num_ranks) // align * align
    request = read_request(
        op, seqlens, room * num_ranks, algorithm="karmarkar_karp", cost=cost, align=align
    )
    items = replace(request.items, capacity=room)
    width_of, group_of, number_of = np.zeros((3, len(items)), np.int64)
    rest, cp_sizes = decreasing(items.sizes), list[int]()
    while len(rest):
        widths = [1 << power for power in range(num_ranks.bit_length())]
        rows = [_row(items, rest, width, num_ranks) for width in widths]
        least = min(row.time for row in rows)
        row = next(row for row in rows if row.time <= TOLERANCE * least)
        each = row.num_bins * row.width // num_ranks
        width_of[row.items] = row.width
        group_of[row.items], number_of[row.items] = np.divmod(row.bin_of, each)
        number_of[row.items] += len(cp_sizes)
        rest = rest[~np.isin(rest, row.items)]
        cp_sizes += [row.width] * each
    return RankPlan(
        tuple(
            request.planned(
                np.where(group_of == rank // np.maximum(width_of, 1), number_of, -1),
                len(cp_sizes),
                capacity=room,
                cp_sizes=np.array(cp_sizes, np.int64),
            )
            for rank in range(num_ranks)
        )
    )


class _Row(NamedTuple):
    """Micro-batches of groups of one width, which the longest items left begin.

    Attributes:
        width: Ranks of a group.
        time: Cost of these micro-batches for ranks that wait for each other, and the cost of what
            is left over all ranks; infinite if the items do not fit or ranks would be empty.
        items: int64 ``[items of the row]``.
        bin_of: int64 ``[items of the row]``: micro-batch of each, numbered group after group.
        num_bins: Number of micro-batches.
    """

    width: int
    time: float
    items: Ints
    bin_of: Ints
    num_bins: int


def _row(items: PlanItems, rest: Ints, width: int, num_ranks: int) -> _Row:
    """Return the row of a width for the items ``rest``, the longest first."""
    sizes, groups, capacity = items.sizes[rest], num_ranks // width, items.capacity * width
    least = 1 << max(-(-int(sizes[0]) // items.capacity) - 1, 0).bit_length()
    # as many groups as the items need that cannot do with fewer ranks; others fill them
    needed = rest[sizes > items.capacity * least // 2] if least > 1 else rest
    if least > width:
        return _Row(width, np.inf, rest[:0], rest[:0], 0)
    fewest = int(best_fit_decreasing(_some(items, needed, capacity)).max()) + 1
    num_bins = round_up(fewest, groups)
    bin_of = best_fit_decreasing(_some(items, rest, capacity), num_bins)
    chosen, left = rest[bin_of >= 0], rest[bin_of < 0]
    if num_bins > len(chosen):
        return _Row(width, np.inf, rest[:0], rest[:0], 0)
    some = _some(items, chosen, capacity)
    bin_of = even(some, bin_of[bin_of >= 0], num_bins)
    costs = np.sort(summed(some.costs, bin_of, num_bins))[::-1]
    time = costs[::groups].sum() / width + items.costs[left].sum() / num_ranks
    return _Row(width, float(time), chosen, deal(some, bin_of, num_bins, groups), num_bins)


def _some(items: PlanItems, chosen: Ints, capacity: int) -> PlanItems:
    """Return some items, for micro-batches of another capacity."""
    return replace(
        items,
        sizes=items.sizes[chosen],
        counts=items.counts[chosen],
        costs=items.costs[chosen],
        capacity=capacity,
    )
