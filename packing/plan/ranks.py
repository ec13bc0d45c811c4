"""Plans for data-parallel ranks: equal cost, and as many micro-batches on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from trajpack.packing.plan.blocks import Ranks, joined, steps_of
from trajpack.packing.plan.oversized import Policy
from trajpack.packing.plan.plan import Algorithm, Plan, check_algorithm, planned
from trajpack.packing.plan.steps import Order, Step, Wish, planned_step
from trajpack.packing.plan.units import (
    Cost,
    Labels,
    Request,
    check_count,
    checked_labels,
    checked_request,
)

if TYPE_CHECKING:
    from trajpack.packing.plan.statistics import PlanStatistics


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The plans of all ranks and steps; every rank computes the same one and takes its own.

    In a step every rank has as many micro-batches. Where a rank has too few sequences for that,
    some are dummies, without sequences.
    """

    plans: tuple[tuple[Plan, ...], ...]
    """By step, then by rank; each over the sequences of the whole batch."""
    dropped: tuple[int, ...] = ()
    """Sequences that no rank has since they are too long."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps."""
        return len(self.plans)

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks."""
        return len(self.plans[0])

    def plan(self, rank: int, step: int = 0) -> Plan:
        """Return the plan of a rank in a step.

        Its indices are those of the whole batch. What was dropped is in `dropped` alone.

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
        plans = [plan for step in self.plans for plan in step]
        room = sum(plan.capacity * len(plan) for plan in plans)
        return sum(int(plan.seqlens[plan.order].sum()) for plan in plans) / room if room else 0.0

    def statistics(self) -> PlanStatistics:
        """Count tokens, padding and dummies of all ranks, and measure how even they are."""
        from trajpack.packing.plan.statistics import statistics_of

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
    algorithm: Algorithm = "longest_processing_time",
    cost: Cost = None,
    num_steps: int = 1,
    keep_in_step: Labels = None,
    keep_on_rank: Labels = None,
    keep_together: Labels = None,
    order: Order = "largest_first",
    min_bins: int = 1,
    multiple_of: int = 1,
    max_sequences: int | None = None,
    align: int = 1,
    oversized: Policy = "raise",
    turn_ends: Sequence[Sequence[int]] | None = None,
) -> RankPlan:
    """Plan the micro-batches of every data-parallel rank, as many on each, of about equal cost.

    The plan depends on the numbers alone, so that every rank computes the same without a word to
    the others. Sequences go to ranks first and then to micro-batches, or micro-batches are made of
    all of them and dealt out: the way that takes fewer micro-batches, and then the fairer one.

    Args:
        seqlens: ``[sequences]``: tokens of each, of the whole batch.
        num_ranks: Data-parallel ranks.
        capacity: Most tokens of a micro-batch.
        algorithm: How they are filled, see `trajpack.packing.plan.plan.Algorithm`.
        cost: What a sequence costs, see `plan_micro_batches`.
        num_steps: Optimizer steps that the batch is for. They take sequences in the order of the
            batch, as many each as the number allows; labels in a step count once each.
        keep_in_step: A label for each sequence: those with equal labels are in one step.
        keep_on_rank: The same for ranks, groups or trajectories: over all steps.
        keep_together: The same for micro-batches.
        order: Order of a rank's micro-batches, see `trajpack.packing.plan.steps.Order`.
        min_bins: Fewest micro-batches of a rank in a step; 1 or more, for a rank without any would
            not keep step with one that has sequences.
        multiple_of: Their number, for each rank and step, is a multiple of this.
        max_sequences: Most sequences of a micro-batch.
        align: Tokens that each sequence takes a multiple of.
        oversized: What happens to a sequence longer than the capacity.
        turn_ends: For ``oversized="truncate_at_turn"``, see `plan_micro_batches`.

    Raises:
        TypeError, ValueError: As `plan_micro_batches`, and if there are fewer sequences or labels
            than steps.

    Cost: on the host, as `plan_micro_batches`; labels cost a step of Python for each sequence.

    Example:
        >>> plans = plan_ranks([8, 7, 2, 3, 5, 6], num_ranks=2, capacity=10)
        >>> [[sequences.tolist() for sequences in plans.plan(rank)] for rank in range(2)]
        [[[0], [3, 4]], [[2, 5], [1]]]
    """
    op = "plan_ranks"
    request = checked_request(
        op, seqlens, capacity, cost=cost, max_sequences=max_sequences, align=align,
        policy=oversized, turn_ends=turn_ends,
    )  # fmt: skip
    wish = Wish(num_ranks, algorithm, min_bins, multiple_of, order)
    _check_wish(op, wish, num_steps)
    count = len(request.seqlens)
    in_step = checked_labels(op, "keep_in_step", keep_in_step, count)
    on_rank = checked_labels(op, "keep_on_rank", keep_on_rank, count)
    together = checked_labels(op, "keep_together", keep_together, count)
    blocks = None if on_rank is None else joined(on_rank, together)
    plans, ranks = [], Ranks(num_ranks, algorithm)
    for members in steps_of(op, planned(request), joined(in_step, together), num_steps):
        step = planned_step(request, members, (blocks, together), ranks, wish)
        plans.append(_plans_of(request, int(capacity), num_ranks, step))
    return RankPlan(tuple(plans), request.settled.dropped)


def _check_wish(op: str, wish: Wish, num_steps: int) -> None:
    check_algorithm(op, wish.algorithm)
    if wish.order not in get_args(Order):
        known = ", ".join(repr(name) for name in get_args(Order))
        raise ValueError(f"{op}: order must be one of {known}, got {wish.order!r}")
    check_count(op, "num_ranks", wish.num_ranks)
    check_count(op, "num_steps", num_steps)
    check_count(op, "min_bins", wish.min_bins)
    check_count(op, "multiple_of", wish.multiple_of)


def _plans_of(request: Request, capacity: int, num_ranks: int, step: Step) -> tuple[Plan, ...]:
    ordered = step.members[np.lexsort((step.members, step.places))]
    each = step.num_places // num_ranks
    ends = np.zeros(step.num_places + 1, np.int64)
    np.cumsum(np.bincount(step.places, minlength=step.num_places), out=ends[1:])
    settled, plans = request.settled, []
    for rank in range(num_ranks):
        cu_bins = ends[rank * each : (rank + 1) * each + 1]
        own = ordered[cu_bins[0] : cu_bins[-1]]
        there = set(own.tolist()) if settled.truncated or settled.alone else set()
        kept = {at: tokens for at, tokens in settled.truncated.items() if at in there}
        plans.append(
            Plan(
                order=own,
                cu_bins=cu_bins - cu_bins[0],
                seqlens=request.seqlens,
                capacity=capacity,
                align=request.align,
                truncated=kept,
                oversized=tuple(at for at in settled.alone if at in there),
                costs=None if request.by_tokens else request.costs,
            )
        )
    return tuple(plans)
