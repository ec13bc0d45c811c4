"""Plans: which sequence goes into which micro-batch, from their lengths alone, on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from trajpack.packing.plan.balance import BALANCING, balance, rounded_up, split_to
from trajpack.packing.plan.bounds import lower_bound
from trajpack.packing.plan.fitting import fit_decreasing, next_fit
from trajpack.packing.plan.oversized import Policy
from trajpack.packing.plan.units import (
    Cost,
    Floats,
    Ints,
    Labels,
    Request,
    Units,
    aligned,
    check_count,
    checked_labels,
    checked_request,
    units_of,
)

if TYPE_CHECKING:
    from trajpack.packing.plan.statistics import PlanStatistics

Algorithm: TypeAlias = Literal[
    "next_fit",
    "first_fit_decreasing",
    "best_fit_decreasing",
    "karmarkar_karp",
    "longest_processing_time",
]
"""How micro-batches are filled.

- ``"next_fit"``: in the order given, a new one where the next sequence does not fit.
- ``"first_fit_decreasing"``: longest first, each into the first with room.
- ``"best_fit_decreasing"``: longest first, each into the fullest with room.
- ``"karmarkar_karp"``: of equal cost, by differencing and exchanges; the best balance.
- ``"longest_processing_time"``: of equal cost, most costly first, each where the cost is least.

The first three make as few as they can, the last two as even as they can.
"""


@dataclass(frozen=True, eq=False)
class Plan:
    """Which sequences of a batch each micro-batch holds. It lives on the host and holds no tokens.

    Made by `plan_micro_batches` or `plan_ranks`; ``plan[i]`` are the sequences of micro-batch i.
    One without sequences is a dummy: a forward pass that only keeps step with other ranks.
    """

    order: Ints
    """int64 ``[planned]``: sequences, micro-batch after micro-batch."""
    cu_bins: Ints
    """int64 ``[micro-batches + 1]``: where each micro-batch begins in `order`."""
    seqlens: Ints
    """int64 ``[sequences]``: tokens of every sequence of the batch, those that are kept where it is
    truncated; of a dropped one as given."""
    capacity: int
    """Most tokens of a micro-batch, each sequence counted as a multiple of `align`."""
    align: int = 1
    """Tokens that each sequence takes a multiple of."""
    dropped: tuple[int, ...] = ()
    """Sequences that are in no micro-batch since they are too long."""
    truncated: Mapping[int, int] = field(default_factory=dict)
    """Tokens that are kept of sequences that are cut, by sequence."""
    oversized: tuple[int, ...] = ()
    """Sequences that are alone in a micro-batch over its capacity."""
    costs: Floats | None = None
    """float64 ``[sequences]``: what each costs; its aligned tokens if None."""

    def __post_init__(self) -> None:
        for name in ("order", "cu_bins", "seqlens", "costs"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _read_only(name, getattr(self, name)))
        count, ends = len(self.seqlens), self.cu_bins.tolist()
        if ((self.order < 0) | (self.order >= count)).any():
            raise ValueError(f"Plan: order must hold sequences from 0 to {count - 1}")
        placed = np.zeros(count, bool)
        placed[self.order] = True
        if np.count_nonzero(placed) != len(self.order):
            raise ValueError("Plan: a sequence is in two micro-batches")
        if not ends or ends != sorted(ends) or (ends[0], ends[-1]) != (0, len(self.order)):
            shown = f"{ends[:1]} to {ends[-1:]}"
            raise ValueError(f"Plan: cu_bins must rise from 0 to {len(self.order)}, got {shown}")

    def __len__(self) -> int:
        """Return how many micro-batches there are, dummies included."""
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
        loads = self._sums(aligned(self.seqlens[self.order], self.align)).astype(np.int64)
        loads.flags.writeable = False
        return loads

    @cached_property
    def bin_costs(self) -> Floats:
        """float64 ``[micro-batches]``: cost of each."""
        return (
            self.loads.astype(np.float64)
            if self.costs is None
            else self._sums(self.costs[self.order])
        )

    @property
    def fill(self) -> float:
        """Tokens, without padding, over the capacity of all micro-batches."""
        room = self.capacity * len(self)
        return int(self.seqlens[self.order].sum()) / room if room else 0.0

    @cached_property
    def lower_bound(self) -> int:
        """Micro-batches that no plan of these lengths and this capacity can do without.

        See `trajpack.packing.plan.bounds.lower_bound`.
        """
        capacity = self.capacity // self.align * self.align
        sizes = aligned(self.seqlens[self.order], self.align)
        return lower_bound(np.minimum(sizes, capacity), capacity)

    def statistics(self) -> PlanStatistics:
        """Count tokens, padding and dummies, and measure how even the micro-batches are."""
        from trajpack.packing.plan.statistics import statistics_of

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
    """Plan micro-batches of at most ``capacity`` tokens. None is ever over it, whatever balances.

    The plan depends on the numbers alone: equal lengths give the equal plan in every process.

    Args:
        seqlens: ``[sequences]``: tokens of each; ints, an integer array or a tensor.
        capacity: Most tokens of a micro-batch; `align` or more, and fewer than 2**31.
        algorithm: How they are filled, see `Algorithm`.
        cost: What a sequence costs, where micro-batches are balanced or split: ``None`` for its
            aligned tokens, one number for each sequence, or a function of aligned lengths such as
            `TransformerCost`. A micro-batch costs what its sequences cost together.
        min_bins: Fewest micro-batches; 0 allows none where there are no sequences.
        multiple_of: Their number is a multiple of this: of ranks, or of a pipeline's group. More
            are made by splitting the most costly; where none is left to split, they are empty.
        max_sequences: Most sequences of a micro-batch, if there is a bound.
        keep_together: A label for each sequence: those with equal labels are in one micro-batch.
            ``None`` is a label of its own.
        align: Tokens that each sequence takes a multiple of.
        oversized: What happens to a sequence longer than the capacity, see
            `trajpack.packing.plan.oversized.Policy`.
        turn_ends: For ``"truncate_at_turn"``: for each sequence, its tokens up to the end of each
            turn (`PackedBatch.turn_ends`).

    Returns:
        The plan; the sequences of a micro-batch are in the order of the batch.

    Raises:
        TypeError: If lengths or counts are not integers.
        ValueError: If a sequence is too long, sequences kept together do not fit, or an argument
            has a wrong size or value.

    Cost: on the host; about O(sequences log sequences). A tensor on a device is read back, which
    waits for it: pass `PackedBatch.seqlens`.

    Example:
        >>> plan = plan_micro_batches([5, 3, 4, 2, 6], capacity=10)
        >>> [sequences.tolist() for sequences in plan]
        [[2, 4], [0, 1, 3]]
        >>> plan.loads, plan.lower_bound
        (array([10, 10]), 2)
    """
    op = "plan_micro_batches"
    request = checked_request(
        op, seqlens, capacity, cost=cost, max_sequences=max_sequences, align=align,
        policy=oversized, turn_ends=turn_ends,
    )  # fmt: skip
    check_algorithm(op, algorithm)
    check_count(op, "min_bins", min_bins, 0)
    check_count(op, "multiple_of", multiple_of)
    labels = checked_labels(op, "keep_together", keep_together, len(request.seqlens))
    units = units_of(request, planned(request), labels)
    bin_of, num_bins = placed(units, request, algorithm, min_bins, multiple_of)
    return plan_of(request, int(capacity), units, bin_of, num_bins)


def check_algorithm(op: str, algorithm: str) -> None:
    """Raise unless ``algorithm`` is known."""
    if algorithm not in get_args(Algorithm):
        known = ", ".join(repr(name) for name in get_args(Algorithm))
        raise ValueError(f"{op}: algorithm must be one of {known}, got {algorithm!r}")


def planned(request: Request) -> Ints:
    """Return the sequences that are not dropped."""
    return np.delete(np.arange(len(request.seqlens)), np.array(request.settled.dropped, np.int64))


def placed(
    units: Units, request: Request, algorithm: Algorithm, min_bins: int, multiple_of: int
) -> tuple[Ints, int]:
    """Return the micro-batch of each unit, and how many there are."""
    if algorithm in BALANCING:
        return balance(units, request.limits, algorithm, min_bins, multiple_of)
    if algorithm == "next_fit":
        bin_of, num_bins = next_fit(units, request.limits)
    else:
        best = algorithm == "best_fit_decreasing"
        bin_of, num_bins = fit_decreasing(units, request.limits, best=best)
    wanted = rounded_up(max(num_bins, min_bins), multiple_of)
    return split_to(bin_of, num_bins, wanted, units, in_order=algorithm == "next_fit")


def plan_of(request: Request, capacity: int, units: Units, bin_of: Ints, num_bins: int) -> Plan:
    """Write down a plan of units and the micro-batch of each."""
    held = bin_of[units.unit_of]
    ranked = np.argsort(held.astype(np.uint16) if num_bins < 2**16 else held, kind="stable")
    cu_bins = np.zeros(num_bins + 1, np.int64)
    np.cumsum(np.bincount(held, minlength=num_bins), out=cu_bins[1:])
    return Plan(
        order=units.members[ranked],
        cu_bins=cu_bins,
        seqlens=request.seqlens,
        capacity=capacity,
        align=request.align,
        dropped=request.settled.dropped,
        truncated=request.settled.truncated,
        oversized=request.settled.alone,
        costs=None if request.by_tokens else request.costs,
    )
