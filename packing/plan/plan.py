"""Plans: the sequences of each micro-batch, computed from lengths alone, on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trajpack.packing.plan.algorithms import place_items
from trajpack.packing.plan.statistics import PlanStatistics, fill_of, lower_bound_of, statistics_of
from trajpack.packing.plan.units import (
    Algorithm,
    Cost,
    Floats,
    Ints,
    Labels,
    PlanInput,
    Policy,
    read_input,
    round_up,
)


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
        capacity: Maximum tokens of a micro-batch, each sequence rounded up to a multiple of
            `align`.
        align: Each sequence takes a multiple of this many tokens.
        dropped: Sequences that are in no micro-batch since they are too long.
        truncated: Kept tokens of the sequences that are cut, by sequence.
        oversized: Sequences that are alone in a micro-batch over its capacity.
        costs: float64 ``[sequences]``: cost of each; its aligned tokens if None.
    """

    order: Ints
    cu_bins: Ints
    seqlens: Ints
    capacity: int
    align: int = 1
    dropped: tuple[int, ...] = ()
    truncated: Mapping[int, int] = field(default_factory=dict)
    oversized: tuple[int, ...] = ()
    costs: Floats | None = None

    def __post_init__(self) -> None:
        for name in ("order", "cu_bins", "seqlens", "costs"):
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
        """int64 ``[micro-batches]``: aligned tokens of each."""
        loads = self._sums(round_up(self.seqlens[self.order], self.align)).astype(np.int64)
        loads.flags.writeable = False
        return loads

    @cached_property
    def bin_costs(self) -> Floats:
        """float64 ``[micro-batches]``: cost of each."""
        if self.costs is None:
            return self.loads.astype(np.float64)
        return self._sums(self.costs[self.order])

    @property
    def fill(self) -> float:
        """Tokens, without padding, over the capacity of all micro-batches."""
        return fill_of([self])

    @cached_property
    def lower_bound(self) -> int:
        """Number of micro-batches that every plan of these lengths and this capacity needs.

        See `trajpack.packing.plan.statistics.lower_bound`.
        """
        return lower_bound_of([self])

    def statistics(self) -> PlanStatistics:
        """Count tokens, padding and dummies, and measure how even the micro-batches are."""
        return statistics_of([[self]], self.dropped)

    def _sums(self, values: Any) -> Floats:
        bin_of = np.repeat(np.arange(len(self)), np.diff(self.cu_bins))
        return np.bincount(bin_of, values, minlength=len(self)).astype(np.float64)


def _read_only(name: str, values: Any) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if name != "costs" and array.size and array.dtype.kind not in "iu":
        raise TypeError(f"Plan: {name} must be integers, got {array.dtype}")
    array = array.astype(np.float64 if name == "costs" else np.int64, copy=False)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


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
    source = read_input(
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
    )
    members = source.planned
    items = source.items(members)
    bin_of, num_bins = place_items(items, algorithm, min_bins=min_bins, multiple_of=multiple_of)
    dropped = source.dropped
    return build_plan(source, members, bin_of[items.item_of], num_bins=num_bins, dropped=dropped)


def build_plan(
    source: PlanInput,
    members: Ints,
    bin_of: Ints,
    *,
    num_bins: int,
    dropped: tuple[int, ...] = (),
) -> Plan:
    """Return the plan of ``members``, ascending, by the micro-batch of each."""
    ranked = np.argsort(bin_of.astype(np.uint16) if num_bins < 2**16 else bin_of, kind="stable")
    cu_bins = np.zeros(num_bins + 1, np.int64)
    np.cumsum(np.bincount(bin_of, minlength=num_bins), out=cu_bins[1:])
    held = set(members.tolist()) if source.truncated or source.oversized else set()
    return Plan(
        order=members[ranked],
        cu_bins=cu_bins,
        seqlens=source.seqlens,
        capacity=source.capacity,
        align=source.align,
        dropped=dropped,
        truncated={one: kept for one, kept in source.truncated.items() if one in held},
        oversized=tuple(one for one in source.oversized if one in held),
        costs=None if source.by_tokens else source.costs,
    )
