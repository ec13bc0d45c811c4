"""`Plan` and `RankPlan`: the sequences of each micro-batch and rank; and their statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trajpack.packing.plan.algorithms import lower_bound
from trajpack.packing.plan.units import Floats, Ints, round_up


@dataclass(frozen=True, eq=False)
class Plan:
    """The sequences of a batch in each micro-batch: integers on the host, no tokens.

    Made by `plan_micro_batches` or `plan_ranks`; ``plan[i]`` are the sequences of micro-batch i.
    One without sequences is a dummy: a forward pass that only keeps step with other ranks.

    Attributes:
        order: int64 ``[planned]``: sequences, micro-batch after micro-batch.
        cu_bins: int64 ``[micro-batches + 1]``: boundaries of the micro-batches in `order`.
        seqlens: int64 ``[sequences]``: tokens of every sequence of the batch; the kept tokens of a
            truncated one, all tokens of a dropped one.
        capacity: Maximum tokens of a micro-batch on a rank, each sequence rounded up to a multiple
            of `align`.
        align: Each sequence takes a multiple of this many tokens.
        dropped: Sequences that are in no micro-batch since they are too long.
        truncated: Kept tokens of the sequences that are cut, by sequence.
        oversized: Sequences that are alone in a micro-batch over its capacity.
        costs: float64 ``[sequences]``: cost of each, by default its aligned tokens.
        total_multiple: Micro-batches are padded to a multiple of this many tokens, for few shapes.
        cp_sizes: int64 ``[micro-batches]``: context-parallel ranks that share each; None for one.
    """

    order: Ints
    cu_bins: Ints
    seqlens: Ints
    capacity: int
    align: int = 1
    dropped: tuple[int, ...] = ()
    truncated: Mapping[int, int] = field(default_factory=dict)
    oversized: tuple[int, ...] = ()
    costs: Floats = field(default_factory=lambda: np.zeros(0))
    total_multiple: int = 1
    cp_sizes: Ints | None = None

    def __post_init__(self) -> None:
        if not len(self.costs):
            object.__setattr__(self, "costs", round_up(np.asarray(self.seqlens), self.align))
        for name in ("order", "cu_bins", "seqlens", "costs", "cp_sizes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _read_only(name, getattr(self, name)))
        count, ends = len(self.seqlens), self.cu_bins.tolist()
        if ((self.order < 0) | (self.order >= count)).any():
            raise ValueError(f"Plan: order must hold sequences from 0 to {count - 1}")
        if np.bincount(self.order, minlength=1).max() > 1:
            raise ValueError("Plan: a sequence is in two micro-batches")
        if not ends or ends != sorted(ends) or (ends[0], ends[-1]) != (0, len(self.order)):
            shown = f"{ends[:1]} to {ends[-1:]}"
            raise ValueError(f"Plan: cu_bins must rise from 0 to {len(self.order)}, got {shown}")

    def __len__(self) -> int:
        """Return the number of micro-batches, dummies included."""
        return len(self.cu_bins) - 1

    def __getitem__(self, index: int) -> Ints:
        """Return the sequences of a micro-batch, ascending."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        index %= len(self)
        return self.order[self.cu_bins[index] : self.cu_bins[index + 1]]

    def __iter__(self) -> Iterator[Ints]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return (
            f"Plan({len(self)} micro-batches of up to {self.capacity} tokens, "
            f"{len(self.order)} of {len(self.seqlens)} sequences, fill {self.fill:.4f})"
        )

    @cached_property
    def loads(self) -> Ints:
        """int64 ``[micro-batches]``: aligned tokens of each; a rank's share, rounded up."""
        loads = np.ceil(self._shares(round_up(self.seqlens, self.align))).astype(np.int64)
        loads.flags.writeable = False
        return loads

    @cached_property
    def bin_costs(self) -> Floats:
        """float64 ``[micro-batches]``: cost of each for a rank."""
        return self._shares(self.costs)

    @property
    def fill(self) -> float:
        """Tokens, without padding, over the capacity of all micro-batches."""
        return self.statistics().fill

    @property
    def lower_bound(self) -> int:
        """Number of micro-batches that every plan of these lengths and this capacity needs.

        See `trajpack.packing.plan.algorithms.lower_bound`.
        """
        return self.statistics().lower_bound

    def statistics(self) -> PlanStatistics:
        """Count tokens and padding, and measure how even the micro-batches are."""
        return statistics_of([self])

    def _shares(self, values: Any) -> Floats:
        """Return the sums of the sequences' values by micro-batch, over the ranks that share it."""
        bin_of = np.repeat(np.arange(len(self)), np.diff(self.cu_bins))
        sums = np.bincount(bin_of, values[self.order], minlength=len(self)).astype(np.float64)
        return sums if self.cp_sizes is None else sums / self.cp_sizes


def _read_only(name: str, values: Any) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if name != "costs" and array.size and array.dtype.kind not in "iu":
        raise TypeError(f"Plan: {name} must be integers, got {array.dtype}")
    array = array.astype(np.float64 if name == "costs" else np.int64, copy=False)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The plans of all ranks; every rank computes the same ones and takes its own.

    Every rank has as many micro-batches. Where there are too few sequences for that, some are
    dummies, without sequences.

    Attributes:
        plans: Plan of each rank, over the sequences of the whole batch.
    """

    plans: tuple[Plan, ...]

    def plan(self, rank: int) -> Plan:
        """Return the plan of a rank. Its indices are those of the whole batch.

        Raises:
            IndexError: If there is no such rank.
        """
        if not 0 <= rank < len(self.plans):
            raise IndexError(f"RankPlan: rank must be in [0, {len(self.plans) - 1}], got {rank}")
        return self.plans[rank]

    def statistics(self) -> PlanStatistics:
        """Count tokens and padding of all ranks, and measure how even they are."""
        return statistics_of(self.plans)

    def __repr__(self) -> str:
        return (
            f"RankPlan({len(self.plans)} ranks of {len(self.plans[0])} micro-batches each, "
            f"fill {self.statistics().fill:.4f})"
        )


@dataclass(frozen=True)
class PlanStatistics:
    """Plain numbers about a plan, of one rank or of all.

    ``num_tokens``, ``padding_alignment``, ``padding_shapes``, ``padding_tail`` and
    ``padding_dummy`` add up to the capacity of all micro-batches, unless some are over it.

    Attributes:
        num_micro_batches: Micro-batches of all ranks, dummies included.
        num_dummies: Micro-batches without a sequence.
        num_shapes: Different numbers of tokens that micro-batches with sequences are padded to.
        num_sequences: Sequences in micro-batches.
        num_oversized: Sequences alone in a micro-batch over its capacity.
        num_tokens: Tokens of the sequences in micro-batches.
        padding_alignment: Tokens that bring each sequence to a multiple of ``align``.
        padding_shapes: Tokens that bring each micro-batch to one of few shapes.
        padding_tail: Tokens that micro-batches with sequences have left to their capacity.
        padding_dummy: Tokens that dummies could hold.
        lower_bound: Micro-batches that every plan needs, all ranks together.
        fill: Tokens over the capacity of all micro-batches.
        cost_imbalance: Largest cost of a micro-batch over the mean of all; 1 is even. The cost of a
            sequence is its tokens unless ``cost`` was given.
        rank_cost_imbalance: Largest cost of a rank over the mean of all.
    """

    num_micro_batches: int
    num_dummies: int
    num_shapes: int
    num_sequences: int
    num_dropped: int
    num_truncated: int
    num_oversized: int
    num_tokens: int
    padding_alignment: int
    padding_shapes: int
    padding_tail: int
    padding_dummy: int
    lower_bound: int
    fill: float
    cost_imbalance: float
    rank_cost_imbalance: float

    def __repr__(self) -> str:
        rows = []
        for one in fields(self):
            value = getattr(self, one.name)
            shown = f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
            rows.append(f"  {one.name:22}{shown:>16}")
        return "\n".join([type(self).__name__, *rows])


def statistics_of(plans: Sequence[Plan]) -> PlanStatistics:
    """Return the statistics of the plans of all ranks."""
    first, num_bins = plans[0], sum(map(len, plans))
    planned = np.unique(np.concatenate([plan.order for plan in plans]))
    sizes = np.array(round_up(first.seqlens, first.align))
    alone = [sequence for plan in plans for sequence in plan.oversized]
    sizes[alone] = first.capacity
    loads = np.concatenate([plan.loads for plan in plans])
    empty = np.concatenate([np.diff(plan.cu_bins) == 0 for plan in plans])
    padded = np.where(empty, 0, round_up(loads, first.total_multiple))
    num_tokens = round(sum(float(plan._shares(plan.seqlens).sum()) for plan in plans))
    return PlanStatistics(
        num_micro_batches=num_bins,
        num_dummies=int(empty.sum()),
        num_shapes=len(np.unique(padded[~empty])),
        num_sequences=len(planned),
        num_dropped=len(first.dropped),
        num_truncated=sum(len(plan.truncated) for plan in plans),
        num_oversized=len(alone),
        num_tokens=num_tokens,
        padding_alignment=int(loads.sum()) - num_tokens,
        padding_shapes=int(padded.sum() - loads.sum()),
        padding_tail=int(np.maximum(first.capacity - padded[~empty], 0).sum()),
        padding_dummy=first.capacity * int(empty.sum()),
        lower_bound=lower_bound(sizes[planned], first.capacity // first.align * first.align),
        fill=num_tokens / (first.capacity * num_bins) if num_bins else 0.0,
        cost_imbalance=_imbalance(np.concatenate([plan.bin_costs for plan in plans])),
        rank_cost_imbalance=_imbalance(np.array([plan.bin_costs.sum() for plan in plans])),
    )


def _imbalance(values: npt.NDArray[np.generic]) -> float:
    """Return the largest value over the mean; 1 if all are 0."""
    total = float(values.sum())
    return float(values.max()) * len(values) / total if total else 1.0
