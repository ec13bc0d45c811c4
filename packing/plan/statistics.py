"""Statistics of plans: where padding comes from, and how even micro-batches and ranks are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trajpack.packing.plan.units import aligned

if TYPE_CHECKING:
    from trajpack.packing.plan.plan import Plan


@dataclass(frozen=True)
class PlanStatistics:
    """Plain numbers about a plan, of one rank or of all.

    Of what all micro-batches could hold, ``capacity * num_micro_batches``, there are tokens, and
    padding by cause: ``num_tokens + padding_alignment + padding_tail + padding_dummy``, less
    `num_tokens_over`, is all of it.
    """

    num_ranks: int
    num_steps: int
    num_micro_batches: int
    """Micro-batches of all ranks and steps, dummies included."""
    num_dummies: int
    """Micro-batches without a sequence."""
    num_sequences: int
    """Sequences in micro-batches."""
    num_dropped: int
    num_truncated: int
    num_oversized: int
    """Sequences alone in a micro-batch over its capacity."""
    num_tokens: int
    """Tokens of the sequences in micro-batches."""
    num_tokens_over: int
    """Tokens over the capacity, in micro-batches of an oversized sequence, aligned."""
    padding_alignment: int
    """Tokens that bring each sequence to a multiple of ``align``."""
    padding_tail: int
    """Tokens that micro-batches with sequences have left to their capacity."""
    padding_dummy: int
    """Tokens that dummies could hold."""
    padding_rank: int
    """Tokens, aligned, that ranks hold less than the rank with most, step by step; they are part
    of the tails and the dummies."""
    lower_bound: int
    """Micro-batches that no plan can do without, all ranks and steps together."""
    fill: float
    """Tokens over what all micro-batches could hold."""
    token_imbalance: float
    """Largest load of a micro-batch over the mean of all; 1 is even."""
    cost_imbalance: float
    """The same of costs."""
    rank_token_imbalance: float
    """Largest load of a rank over the mean of its step, of the least even step."""
    rank_cost_imbalance: float
    """The same of costs."""

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
    capacity, num_bins = plans[0].capacity, len(loads)
    num_tokens = sum(int(plan.seqlens[plan.order].sum()) for plan in plans)
    left = capacity - loads[~empty]
    ranks_tokens = [np.array([float(plan.loads.sum()) for plan in step]) for step in steps]
    ranks_costs = [np.array([float(plan.bin_costs.sum()) for plan in step]) for step in steps]
    return PlanStatistics(
        num_ranks=len(steps[0]),
        num_steps=len(steps),
        num_micro_batches=num_bins,
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
        lower_bound=_lower_bound(plans),
        fill=num_tokens / (capacity * num_bins) if num_bins else 0.0,
        token_imbalance=_imbalance(loads),
        cost_imbalance=_imbalance(costs),
        rank_token_imbalance=max(_imbalance(each) for each in ranks_tokens),
        rank_cost_imbalance=max(_imbalance(each) for each in ranks_costs),
    )


def _imbalance(values: npt.NDArray[np.generic]) -> float:
    """Return the largest over the mean; 1 where there is nothing."""
    total = float(values.sum())
    return float(values.max()) * len(values) / total if total else 1.0


def _lower_bound(plans: Sequence[Plan]) -> int:
    from trajpack.packing.plan.bounds import lower_bound

    align = plans[0].align
    capacity = plans[0].capacity // align * align
    lengths = np.concatenate([plan.seqlens[plan.order] for plan in plans])
    return lower_bound(np.minimum(aligned(lengths, align), capacity), capacity)
