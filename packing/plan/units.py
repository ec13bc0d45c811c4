"""What is planned: sequences, or sequences that stay together, by tokens, number and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trajpack.packing.plan.oversized import Oversized, Policy, settle_oversized

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Cost: TypeAlias = Callable[[Ints], Any] | Sequence[float] | npt.NDArray[Any] | None
"""What a sequence costs: a function of lengths, one number for each sequence, or its tokens."""
Labels: TypeAlias = Sequence[Any] | npt.NDArray[Any] | None

COST_BITS = 42
"""All costs together, as integers, are below two to this power: sums of them are exact."""
MAX_COST = 1e290
"""Of a sequence: sums of costs are finite."""


class Limits(NamedTuple):
    """What a micro-batch may hold."""

    capacity: int
    max_sequences: int


class Units(NamedTuple):
    """What is put into micro-batches, each as a whole."""

    sizes: Ints
    """Tokens of each unit, aligned."""
    counts: Ints
    """Sequences of each unit."""
    costs: Ints
    """Costs of each unit, scaled to integers."""
    members: Ints
    """Sequences that are planned, ascending."""
    unit_of: Ints
    """Unit of each member."""

    def __len__(self) -> int:
        return len(self.sizes)


class Request(NamedTuple):
    """Lengths and limits, checked."""

    op: str
    seqlens: Ints
    """As planned for: what is truncated has its tokens that are kept."""
    costs: Floats
    limits: Limits
    align: int
    settled: Oversized
    by_tokens: bool
    """Whether a sequence costs its aligned tokens."""


def aligned(lengths: Ints, align: int) -> Ints:
    """Return each length as a multiple of ``align``, rounded up."""
    return lengths if align == 1 else -(-lengths // align) * align


def checked_request(
    op: str,
    seqlens: Any,
    capacity: int,
    *,
    cost: Cost,
    max_sequences: int | None,
    align: int,
    policy: Policy,
    turn_ends: Sequence[Sequence[int]] | None,
) -> Request:
    """Check what is asked, and settle what happens to sequences that are too long."""
    lengths = checked_lengths(op, seqlens)
    for name, value in (("capacity", capacity), ("align", align), ("max_sequences", max_sequences)):
        if value is not None or name != "max_sequences":
            check_count(op, name, value)
    if not align <= capacity < 2**31:
        raise ValueError(
            f"{op}: capacity must be in [{align}, 2147483647], an aligned sequence or more, "
            f"got {capacity}"
        )
    align, most = int(align), len(lengths) if max_sequences is None else int(max_sequences)
    limits = Limits(int(capacity) // align * align, min(most, len(lengths)) or 1)
    settled = settle_oversized(op, lengths, limits.capacity, align, policy, turn_ends)
    for sequence, kept in settled.truncated.items():
        lengths[sequence] = kept
    costs = checked_costs(op, cost, aligned(lengths, align))
    for array in (lengths, costs):  # which all plans of a batch share
        array.flags.writeable = False
    return Request(op, lengths, costs, limits, align, settled, cost is None)


def units_of(request: Request, members: Ints, keep_together: Ints | None) -> Units:
    """Return what is planned of some sequences; those with one label are one unit.

    Raises:
        ValueError: If sequences that must stay together do not fit into one micro-batch.
    """
    limits = request.limits
    sizes = np.minimum(aligned(request.seqlens[members], request.align), limits.capacity)
    costs = scaled(request.costs[members])
    if keep_together is None:
        alone = np.arange(len(members))
        return Units(sizes, np.ones_like(sizes), costs, members, alone)
    unit_of, firsts = numbered(keep_together[members])
    counts = np.bincount(unit_of, minlength=len(firsts))
    totals = summed(aligned(request.seqlens[members], request.align), unit_of, len(firsts))
    wrong = np.flatnonzero(
        ((totals > limits.capacity) & (counts > 1)) | (counts > limits.max_sequences)
    )
    if len(wrong):
        _refuse_unit(request, members[unit_of == wrong[0]], int(totals[wrong[0]]))
    totals = np.minimum(totals, limits.capacity)
    return Units(totals, counts, summed(costs, unit_of, len(firsts)), members, unit_of)


def _refuse_unit(request: Request, together: Ints, tokens: int) -> None:
    first, last = int(together[0]), int(together[-1])
    limits = request.limits
    raise ValueError(
        f"{request.op}: sequences kept together must fit into a micro-batch of {limits.capacity} "
        f"tokens and {limits.max_sequences} sequences, got {tokens} tokens in {len(together)} "
        f"sequences, from sequence {first} to {last}"
    )


def scaled(costs: Floats) -> Ints:
    """Return costs as integers whose sum is exact: themselves, or scaled by a power of two."""
    total = float(np.cumsum(costs)[-1]) if len(costs) else 0.0  # one after another, everywhere
    whole = costs.astype(np.int64) if total < 2.0**COST_BITS else None
    if whole is not None and bool((whole == costs).all()):
        return whole
    exponent = COST_BITS - int(np.frexp(total)[1])
    return np.rint(np.ldexp(costs, exponent)).astype(np.int64)


def numbered(labels: Ints) -> tuple[Ints, Ints]:
    """Number labels from 0 as they first appear; return the numbers, and where each is first."""
    _, firsts, inverse = np.unique(labels, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[inverse], firsts[order]


def summed(values: Ints, unit_of: Ints, num_units: int) -> Ints:
    """Return the sum of the values of each unit, exactly."""
    sums = np.zeros(num_units, np.int64)
    np.add.at(sums, unit_of, values)
    return sums


def checked_lengths(op: str, seqlens: Any) -> Ints:
    """Return lengths as a fresh int64 array.

    Raises:
        TypeError: If they are not integers.
        ValueError: If they are not one row, or one is negative or beyond int32.
    """
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
    return lengths


def checked_costs(op: str, cost: Cost, sizes: Ints) -> Floats:
    """Return the cost of each sequence.

    Raises:
        ValueError: If there is not one finite number, not negative, for each sequence.
    """
    # a function may write to the lengths that it is given
    given = sizes if cost is None else cost(sizes.copy()) if callable(cost) else cost
    costs = np.array(_as_array(given), np.float64)
    if costs.shape != sizes.shape:
        raise ValueError(
            f"{op}: cost must be one number for each of {len(sizes)} sequences, "
            f"got shape {list(costs.shape)}"
        )
    wrong = np.flatnonzero(~((costs >= 0) & (costs < np.inf)))
    if len(wrong):
        raise ValueError(
            f"{op}: cost must be finite and not negative, got {costs[wrong[0]]} at {wrong[0]}"
        )
    if costs.max(initial=0.0) > MAX_COST:
        raise ValueError(f"{op}: cost must be at most {MAX_COST}, got {costs.max()}")
    return costs


def checked_labels(op: str, name: str, labels: Labels, num_sequences: int) -> Ints | None:
    """Return labels as numbers; each ``None`` among them is a label of its own.

    Raises:
        ValueError: If there is not one label for each sequence.
    """
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


def check_count(op: str, name: str, value: Any, least: int = 1) -> None:
    """Raise unless ``value`` is an integer, ``least`` or more."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{op}: {name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{op}: {name} must be {least} or more, got {value}")


def _as_array(values: Any) -> npt.NDArray[Any]:
    if hasattr(values, "device") and hasattr(values, "cpu"):
        values = values.cpu()  # a tensor
    return np.asarray(values)
