"""Input of a plan, checked: lengths, costs, limits, labels, and the items that are placed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Cost: TypeAlias = Callable[[Ints], Any] | Sequence[float] | npt.NDArray[Any] | None
"""Cost of a sequence: a function of lengths, one number for each, or ``None`` for its tokens."""
Labels: TypeAlias = Sequence[Any] | npt.NDArray[Any] | None
Algorithm: TypeAlias = Literal["next_fit", "best_fit_decreasing", "karmarkar_karp"]
"""Method that fills micro-batches.

- ``"next_fit"``: in the order given, a new one where the next sequence does not fit.
- ``"best_fit_decreasing"``: longest first, each into the fullest with room: as few as it can.
- ``"karmarkar_karp"``: equal cost, by differencing and exchanges.
"""
Policy: TypeAlias = Literal["raise", "drop", "truncate_at_turn", "own_bin"]
"""Treatment of a sequence that is longer than the capacity:

- ``"raise"``: a ValueError names it.
- ``"drop"``: it is in no micro-batch.
- ``"truncate_at_turn"``: its first turns are kept, as many as fit; where none fits it is dropped.
- ``"own_bin"``: it is alone in a micro-batch over the capacity.
"""
COST_BITS = 42
"""All costs together, scaled to integers, are below two to this power: their sums are exact."""
MAX_CAPACITY = 2**31 - 1
"""Tokens of the largest micro-batch: its boundaries are int32. A greater capacity is no limit."""
MAX_COST = 1e290
"""Largest cost of a sequence: sums of costs stay finite."""


class PlanItems(NamedTuple):
    """Sequences, or sets of sequences that stay together, to be put into micro-batches.

    Attributes:
        sizes, counts, costs: int64 ``[items]``: aligned tokens, sequences, and scaled costs.
        capacity, max_sequences: Maximum tokens and sequences of a micro-batch.
        item_of: int64 ``[sequences]``: item of each sequence.
    """

    sizes: Ints
    counts: Ints
    costs: Ints
    capacity: int
    max_sequences: int
    item_of: Ints

    def __len__(self) -> int:
        return len(self.sizes)


class PlanInput(NamedTuple):
    """Lengths and options of a plan, checked.

    Attributes:
        op: Name of the called function, for error messages.
        seqlens: int64 ``[sequences]``: tokens; the kept ones of a truncated sequence.
        costs: float64 ``[sequences]``: cost of each; ``by_tokens`` if it is the aligned tokens.
        together: int64 ``[sequences]``: labels of sequences that share a micro-batch.
        dropped, truncated, oversized: Sequences that are too long, as in `Plan`.
    """

    op: str
    seqlens: Ints
    costs: Floats
    by_tokens: bool
    capacity: int
    align: int
    max_sequences: int
    algorithm: Algorithm
    min_bins: int
    multiple_of: int
    together: Ints | None
    dropped: tuple[int, ...]
    truncated: Mapping[int, int]
    oversized: tuple[int, ...]

    @property
    def planned(self) -> Ints:
        """Indices of the sequences that are not dropped."""
        return np.delete(np.arange(len(self.seqlens)), np.array(self.dropped, np.int64))

    def items(self, members: Ints) -> PlanItems:
        """Return the items of some sequences; those kept together must fit a micro-batch."""
        capacity = self.capacity // self.align * self.align
        sizes = round_up(self.seqlens[members], self.align)
        counts, costs = np.ones_like(sizes), scaled(self.costs[members])
        item_of = np.arange(len(members))
        if self.together is not None:
            item_of, firsts = numbered(self.together[members])
            sizes, counts, costs = (
                summed(each, item_of, len(firsts)) for each in (sizes, counts, costs)
            )
        crowded = ((sizes > capacity) & (counts > 1)) | (counts > self.max_sequences)
        if crowded.any():
            wrong = int(crowded.argmax())
            together = members[item_of == wrong]
            raise ValueError(
                f"{self.op}: sequences kept together must fit into a micro-batch of {capacity} "
                f"tokens and {self.max_sequences} sequences, got {sizes[wrong]} tokens in "
                f"{len(together)} sequences, from sequence {together[0]} to {together[-1]}"
            )
        # an oversized sequence counts as a full micro-batch
        sizes = np.minimum(sizes, capacity)
        return PlanItems(sizes, counts, costs, capacity, self.max_sequences, item_of)


def read_input(  # noqa: PLR0913
    op: str,
    seqlens: Any,
    capacity: int,
    *,
    algorithm: Algorithm,
    cost: Cost,
    min_bins: int,
    multiple_of: int,
    max_sequences: int | None,
    keep_together: Labels,
    align: int,
    oversized: Policy,
    turn_ends: Sequence[Sequence[int]] | None,
) -> PlanInput:
    """Check the arguments of `plan_micro_batches`, and apply the policy for long sequences."""
    lengths = read_lengths(op, seqlens)
    check_count(op, "capacity", capacity)
    check_count(op, "align", align)
    if max_sequences is not None:
        check_count(op, "max_sequences", max_sequences)
    if capacity < align:
        raise ValueError(
            f"{op}: capacity must be {align} or more, an aligned sequence, got {capacity}"
        )
    align, capacity = int(align), min(int(capacity), MAX_CAPACITY)
    check_choice(op, "oversized", oversized, choices=Policy)
    lengths, dropped, truncated = _fit_lengths(
        op, lengths, capacity // align * align, align=align, policy=oversized, turn_ends=turn_ends
    )
    costs = _read_costs(op, cost, round_up(lengths, align))
    for array in (lengths, costs):  # shared by all plans of a batch
        array.flags.writeable = False
    check_choice(op, "algorithm", algorithm, choices=Algorithm)
    check_count(op, "min_bins", min_bins)
    check_count(op, "multiple_of", multiple_of)
    most = len(lengths) if max_sequences is None else min(int(max_sequences), len(lengths))
    return PlanInput(
        op=op,
        seqlens=lengths,
        costs=costs,
        by_tokens=cost is None,
        capacity=capacity,
        align=align,
        max_sequences=most or 1,
        algorithm=algorithm,
        min_bins=min_bins,
        multiple_of=multiple_of,
        together=read_labels(op, "keep_together", keep_together, num_sequences=len(lengths)),
        dropped=() if oversized == "own_bin" else tuple(dropped),
        truncated=truncated,
        oversized=tuple(dropped) if oversized == "own_bin" else (),
    )


def _fit_lengths(
    op: str, lengths: Ints, room: int, *, align: int, policy: Policy, turn_ends: Any
) -> tuple[Ints, list[int], dict[int, int]]:
    """Return lengths, the sequences that are still too long, and the kept tokens of cut ones."""
    if policy != "truncate_at_turn":
        if turn_ends is not None:
            raise ValueError(
                f"{op}: turn_ends are for oversized='truncate_at_turn', got {policy!r}"
            )
    elif turn_ends is None:
        raise ValueError(f"{op}: oversized='truncate_at_turn' needs turn_ends, got None")
    elif len(turn_ends) != len(lengths):
        raise ValueError(
            f"{op}: turn_ends must have one row for each of {len(lengths)} sequences, "
            f"got {len(turn_ends)}"
        )
    too_long = np.flatnonzero(lengths > room).tolist()
    if too_long and policy == "raise":
        raise ValueError(
            f"{op}: sequence {too_long[0]} has {lengths[too_long[0]]} tokens, more than the "
            f"capacity of {room}{f' in multiples of {align}' if align > 1 else ''}; "
            "oversized='drop', 'truncate_at_turn' or 'own_bin' takes it"
        )
    truncated: dict[int, int] = {}
    for sequence in too_long if turn_ends is not None else ():
        ends = [int(end) for end in turn_ends[sequence]]
        for end in ends:
            if not 0 <= end <= lengths[sequence]:
                raise ValueError(
                    f"{op}: turn_ends of sequence {sequence} must be in "
                    f"[0, {lengths[sequence]}], got {end}"
                )
        if kept := max((end for end in ends if end <= room), default=0):
            lengths[sequence] = truncated[sequence] = kept
    return lengths, [one for one in too_long if one not in truncated], truncated


def read_lengths(op: str, seqlens: Any) -> Ints:
    """Return lengths as a new int64 array, checked."""
    if hasattr(seqlens, "seqlens"):
        got = type(seqlens).__name__
        raise TypeError(f"{op}: seqlens must be lengths, got {got}; pass its .seqlens")
    array = _as_array(seqlens)
    if array.ndim != 1:
        raise ValueError(f"{op}: seqlens must be one row of lengths, got shape {list(array.shape)}")
    if array.size and (array.dtype == bool or not np.issubdtype(array.dtype, np.integer)):
        raise TypeError(f"{op}: seqlens must be integers, got {array.dtype}")
    lengths = array.astype(np.int64)
    wrong = np.flatnonzero((lengths < 0) | (lengths >= 2**31))
    if len(wrong):
        sequence = int(wrong[0])
        raise ValueError(
            f"{op}: seqlens must be in [0, 2147483647], got {lengths[sequence]} at {sequence}"
        )
    grows = lengths.size > 1 and lengths[0] == 0 < lengths[-1] and (np.diff(lengths) >= 0).all()
    if isinstance(seqlens, torch.Tensor) and grows:
        raise ValueError(
            f"{op}: seqlens must be lengths, got a tensor that grows from 0 to {lengths[-1]}, as "
            "boundaries do: pass batch.seqlens, not batch.cu_seqlens"
        )
    return lengths


def _read_costs(op: str, cost: Cost, sizes: Ints) -> Floats:
    # a copy, since a function may write to its argument
    given = sizes if cost is None else cost(sizes.copy()) if callable(cost) else cost
    costs = np.array(_as_array(given), np.float64)
    if costs.shape != sizes.shape:
        raise ValueError(
            f"{op}: cost must be one number for each of {len(sizes)} sequences, "
            f"got shape {list(costs.shape)}"
        )
    wrong = np.flatnonzero(~((costs >= 0) & (costs <= MAX_COST)))
    if len(wrong):
        raise ValueError(
            f"{op}: cost must be in [0, {MAX_COST}], got {costs[wrong[0]]} at {wrong[0]}"
        )
    return costs


def read_labels(op: str, name: str, labels: Labels, *, num_sequences: int) -> Ints | None:
    """Return labels as numbers; each ``None`` among them becomes a separate number."""
    if labels is None:
        return None
    known: dict[Any, int] = {}
    listed = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    if len(listed) != num_sequences:
        raise ValueError(
            f"{op}: {name} must have one label for each of {num_sequences} sequences, "
            f"got {len(listed)}"
        )
    numbers = [
        known.setdefault(object() if label is None else label, len(known)) for label in listed
    ]
    return np.array(numbers, np.int64)


def check_count(op: str, name: str, value: Any, *, least: int = 1) -> None:
    """Raise unless ``value`` is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{op}: {name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{op}: {name} must be {least} or more, got {value}")


def check_choice(op: str, name: str, value: Any, *, choices: Any) -> None:
    """Raise unless ``value`` is one of a ``Literal``'s values."""
    if value not in get_args(choices):
        known = ", ".join(repr(choice) for choice in get_args(choices))
        raise ValueError(f"{op}: {name} must be one of {known}, got {value!r}")


def round_up(value: Any, multiple: int) -> Any:
    """Return a number, or each number of an array, rounded up to a multiple."""
    return value if multiple == 1 else -(-value // multiple) * multiple


def scaled(costs: Floats) -> Ints:
    """Return costs as integers with an exact sum: unchanged, or scaled by a power of two."""
    total = float(np.cumsum(costs)[-1]) if len(costs) else 0.0  # the same order on every machine
    whole = costs.astype(np.int64) if total < 2.0**COST_BITS else None
    if whole is not None and bool((whole == costs).all()):
        return whole
    exponent = COST_BITS - int(np.frexp(total)[1])
    return np.rint(np.ldexp(costs, exponent)).astype(np.int64)


def numbered(labels: Ints) -> tuple[Ints, Ints]:
    """Number labels from 0 in order of appearance; return the numbers and the first indices."""
    _, firsts, inverse = np.unique(labels, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    return inverse_of(order)[inverse], firsts[order]


def inverse_of(order: Ints) -> Ints:
    """Return the place of each number in a permutation."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place


def summed(values: Ints, index: Ints, count: int) -> Ints:
    """Return the exact sums of values with the same index, int64 ``[count]``."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, index, values)
    return sums


def decreasing(values: Ints) -> Ints:
    """Return the indices from the largest value to the smallest; equal values stay in order."""
    largest = int(values.max(initial=0))
    from_largest = largest - values
    if largest < 2**16:
        from_largest = from_largest.astype(np.uint16)  # numpy sorts these by digit
    return np.argsort(from_largest, kind="stable")


def _as_array(values: Any) -> npt.NDArray[Any]:
    return np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values)
