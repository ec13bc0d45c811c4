"""Statistics of plans: causes of padding, evenness, and a lower bound of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trajpack.packing.plan.units import Ints, round_up

if TYPE_CHECKING:
    from trajpack.packing.plan.plan import Plan

DUAL_FUNCTIONS = range(1, 21)


@dataclass(frozen=True)
class PlanStatistics:
    """Plain numbers about a plan, of one rank or of all.

    ``capacity * num_micro_batches`` is ``num_tokens + padding_alignment + padding_tail +
    padding_dummy - num_tokens_over``.

    Attributes:
        num_micro_batches: Micro-batches of all ranks and steps, dummies included.
        num_dummies: Micro-batches without a sequence.
        num_sequences: Sequences in micro-batches.
        num_oversized: Sequences alone in a micro-batch over its capacity.
        num_tokens: Tokens of the sequences in micro-batches.
        num_tokens_over: Tokens over the capacity, in micro-batches of an oversized sequence,
            aligned.
        padding_alignment: Tokens that bring each sequence to a multiple of ``align``.
        padding_tail: Tokens that micro-batches with sequences have left to their capacity.
        padding_dummy: Tokens that dummies could hold.
        padding_rank: Aligned tokens that ranks hold less than the fullest rank, summed over steps;
            a part of the tails and the dummies.
        lower_bound: Micro-batches that every plan needs, all ranks and steps together.
        fill: Tokens over the capacity of all micro-batches.
        token_imbalance: Largest load of a micro-batch over the mean of all; 1 is even.
        cost_imbalance: Largest cost of a micro-batch over the mean of all.
        rank_token_imbalance: Largest load of a rank over the mean of its step, of the least even
            step.
        rank_cost_imbalance: Largest cost of a rank over the mean of its step, of the least even
            step.
    """

    num_ranks: int
    num_steps: int
    num_micro_batches: int
    num_dummies: int
    num_sequences: int
    num_dropped: int
    num_truncated: int
    num_oversized: int
    num_tokens: int
    num_tokens_over: int
    padding_alignment: int
    padding_tail: int
    padding_dummy: int
    padding_rank: int
    lower_bound: int
    fill: float
    token_imbalance: float
    cost_imbalance: float
    rank_token_imbalance: float
    rank_cost_imbalance: float

    def __repr__(self) -> str:
        rows = []
        for one in fields(self):
            value = getattr(self, one.name)
            shown = f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
            rows.append(f"  {one.name:22}{shown:>16}")
        return "\n".join([type(self).__name__, *rows])


def statistics_of(steps: Sequence[Sequence[Plan]], dropped: tuple[int, ...]) -> PlanStatistics:
    """Return the statistics of the plans of each step's ranks."""
    plans = [plan for step in steps for plan in step]
    loads = np.concatenate([plan.loads for plan in plans])
    costs = np.concatenate([plan.bin_costs for plan in plans])
    empty = np.concatenate([np.diff(plan.cu_bins) == 0 for plan in plans])
    capacity = plans[0].capacity
    num_tokens = sum(int(plan.seqlens[plan.order].sum()) for plan in plans)
    left = capacity - loads[~empty]
    ranks_tokens = [np.array([float(plan.loads.sum()) for plan in step]) for step in steps]
    ranks_costs = [np.array([float(plan.bin_costs.sum()) for plan in step]) for step in steps]
    return PlanStatistics(
        num_ranks=len(steps[0]),
        num_steps=len(steps),
        num_micro_batches=len(loads),
        num_dummies=int(empty.sum()),
        num_sequences=sum(len(plan.order) for plan in plans),
        num_dropped=len(dropped),
        num_truncated=sum(len(plan.truncated) for plan in plans),
        num_oversized=sum(len(plan.oversized) for plan in plans),
        num_tokens=num_tokens,
        num_tokens_over=int(np.maximum(-left, 0).sum()),
        padding_alignment=int(loads.sum()) - num_tokens,
        padding_tail=int(np.maximum(left, 0).sum()),
        padding_dummy=capacity * int(empty.sum()),
        padding_rank=sum(int((each.max() - each).sum()) for each in ranks_tokens),
        lower_bound=lower_bound_of(plans),
        fill=fill_of(plans),
        token_imbalance=_imbalance(loads),
        cost_imbalance=_imbalance(costs),
        rank_token_imbalance=max(_imbalance(each) for each in ranks_tokens),
        rank_cost_imbalance=max(_imbalance(each) for each in ranks_costs),
    )


def fill_of(plans: Sequence[Plan]) -> float:
    """Return the tokens of plans over the capacity of all their micro-batches."""
    room = sum(plan.capacity * len(plan) for plan in plans)
    return sum(int(plan.seqlens[plan.order].sum()) for plan in plans) / room if room else 0.0


def _imbalance(values: npt.NDArray[np.generic]) -> float:
    """Return the largest value over the mean; 1 if all are 0."""
    total = float(values.sum())
    return float(values.max()) * len(values) / total if total else 1.0


def lower_bound_of(plans: Sequence[Plan]) -> int:
    """Return `lower_bound` of the sequences of plans of one batch."""
    align = plans[0].align
    capacity = plans[0].capacity // align * align
    lengths = np.concatenate([plan.seqlens[plan.order] for plan in plans])
    return lower_bound(np.minimum(round_up(lengths, align), capacity), capacity)


def lower_bound(sizes: Ints, capacity: int) -> int:
    """Return a number of bins that every packing of these sizes needs.

    The greatest of: all tokens over the capacity; Martello and Toth's L2, in which large sizes
    stand alone and small ones fill the rest; and Fekete and Schepers' dual feasible functions,
    by which sizes just above a k-th of the capacity count as a k-th.

    Args:
        sizes: ``[sequences]``, each at most ``capacity``.
        capacity: Greatest sum of a bin.

    Reference:
        Martello and Toth, *Lower bounds and reduction procedures for the bin packing problem*,
        1990; Fekete and Schepers, *New classes of fast lower bounds for bin packing problems*,
        2001.

    Example:
        >>> lower_bound(np.array([6, 6, 6, 4]), 10)
        3
        >>> lower_bound(np.array([4, 4, 4, 4]), 11)
        2
    """
    if len(sizes) == 0:
        return 0
    distinct, repeats = np.unique(sizes, return_counts=True)
    best = max(1, -(-int((distinct * repeats).sum()) // capacity))
    for k in DUAL_FUNCTIONS:  # round (k + 1) x down to a k-th; a whole (k + 1) x / capacity stays
        whole, rest = np.divmod((k + 1) * distinct, capacity)
        scaled = np.where(rest == 0, k * distinct, whole * capacity)  # times k and the capacity
        best = max(best, -(-int((scaled * repeats).sum()) // (k * capacity)))
    return max(best, _martello_toth(distinct, repeats, capacity))


def _martello_toth(distinct: Ints, repeats: Ints, capacity: int) -> int:
    """Return L2: the best bound with any size of at most half the capacity as threshold."""
    count = np.concatenate([[0], np.cumsum(repeats)])
    total = np.concatenate([[0], np.cumsum(distinct * repeats)])
    half = int(np.searchsorted(distinct, capacity // 2, side="right"))
    thresholds = np.append(distinct[:half], 0)
    begin = np.searchsorted(distinct, thresholds)
    alone = np.searchsorted(distinct, capacity - thresholds, side="right")
    above_half = count[-1] - count[half]
    free = (count[alone] - count[half]) * capacity - (total[alone] - total[half])
    rest = np.maximum(total[half] - total[begin] - free, 0)
    return int((above_half + -(-rest // capacity)).max())
