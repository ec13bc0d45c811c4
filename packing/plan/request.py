"""Input of a plan, checked: lengths, costs, limits, labels, and the items that are placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.plan.algorithms import PlanItems
from trajpack.packing.plan.types import Plan
from trajpack.packing.plan.units import (
    MAX_CAPACITY,
    Algorithm,
    Cost,
    Floats,
    Ints,
    Labels,
    Policy,
    check_choice,
    check_count,
    numbered,
    round_up,
    scaled,
    summed,
)

MAX_COST = 1e290
"""Largest cost of a sequence: sums of costs stay finite."""


class PlanRequest(NamedTuple):
    """Lengths and limits of a plan, checked.

    Attributes:
        plan: Plan without micro-batches.
        members: int64 ``[planned]``: sequences to plan, ascending.
        items: The items that are placed.
        item_of: int64 ``[planned]``: item of each sequence.
    """

    plan: Plan
    members: Ints
    items: PlanItems
    item_of: Ints

    def planned(self, bin_of: Ints, num_bins: int, **more: Any) -> Plan:
        """Return the plan by the micro-batch of each item; -1 for items of other ranks."""
        number = bin_of[self.item_of]
        own = np.argsort(number, kind="stable")[int((number < 0).sum()) :]
        held = set(self.members[own].tolist())
        return replace(
            self.plan,
            order=self.members[own],
            cu_bins=np.append(0, np.cumsum(np.bincount(number[own], minlength=num_bins))),
            truncated={n: kept for n, kept in self.plan.truncated.items() if n in held},
            oversized=tuple(n for n in self.plan.oversized if n in held),
            **more,
        )


def read_request(  # noqa: PLR0913
    op: str,
    seqlens: Any,
    capacity: int,
    *,
    algorithm: Algorithm,
    cost: Cost,
    align: int,
    min_bins: int = 1,
    multiple_of: int = 1,
    max_sequences: int | None = None,
    keep_together: Labels = None,
    oversized: Policy = "raise",
    turn_ends: Sequence[Sequence[int]] | None = None,
    shapes: int | None = None,
    sequences: Any = None,
) -> PlanRequest:
    """Check the arguments of `plan_micro_batches`, and apply the policy for long sequences."""
    lengths = read_lengths(op, seqlens)
    check_choice(op, "algorithm", algorithm, choices=Algorithm)
    check_choice(op, "oversized", oversized, choices=Policy)
    counts = {"capacity": capacity, "align": align, "min_bins": min_bins}
    for name, count in {**counts, "multiple_of": multiple_of}.items():
        check_count(op, name, count)
    for name, limit in {"max_sequences": max_sequences, "shapes": shapes}.items():
        if limit is not None:
            check_count(op, name, limit)
    if capacity < align:
        raise ValueError(
            f"{op}: capacity must be {align} or more, an aligned sequence, got {capacity}"
        )
    align, capacity = int(align), min(int(capacity), MAX_CAPACITY)
    if shapes is not None and capacity % (shapes * align):
        raise ValueError(
            f"{op}: capacity must be a multiple of shapes x align, {shapes} x {align}, "
            f"got {capacity}"
        )
    chosen = _chosen(op, len(lengths), sequences)
    too_long, truncated = _cut(
        op, lengths, chosen, capacity // align * align, policy=oversized, turn_ends=turn_ends
    )
    costs = _read_costs(op, cost, round_up(lengths, align))
    for array in (lengths, costs):  # shared by all plans of a batch
        array.flags.writeable = False
    is_alone = oversized == "own_bin"
    plan = Plan(
        order=np.zeros(0, np.int64),
        cu_bins=np.zeros(1, np.int64),
        seqlens=lengths,
        capacity=capacity,
        align=align,
        dropped=() if is_alone else tuple(too_long),
        truncated=truncated,
        oversized=tuple(too_long) if is_alone else (),
        costs=costs,
        total_multiple=1 if shapes is None else capacity // shapes,
    )
    members = np.setdiff1d(np.flatnonzero(chosen), plan.dropped)
    most = len(lengths) if max_sequences is None else min(int(max_sequences), len(lengths))
    items, item_of = _items(op, plan, members, keep_together, max_sequences=max(most, 1))
    return PlanRequest(plan, members, items, item_of)


def _chosen(op: str, num_sequences: int, sequences: Any) -> npt.NDArray[np.bool_]:
    """Return which sequences are planned: all, or those given."""
    if sequences is None:
        return np.ones(num_sequences, np.bool_)
    indices, chosen = np.arange(num_sequences), np.asarray(sequences)
    if chosen.size and (chosen.dtype.kind not in "iu" or not np.isin(chosen, indices).all()):
        raise ValueError(
            f"{op}: sequences must be integers from 0 to {num_sequences - 1}, got {chosen}"
        )
    return np.isin(indices, chosen)


def _items(
    op: str, plan: Plan, members: Ints, labels: Labels, *, max_sequences: int
) -> tuple[PlanItems, Ints]:
    """Return the items of some sequences, and the item of each; those with equal labels are one."""
    capacity = plan.capacity // plan.align * plan.align
    sizes, costs = round_up(plan.seqlens[members], plan.align), scaled(plan.costs[members])
    counts, item_of = np.ones_like(sizes), np.arange(len(members))
    if labels is not None:
        named = _as_array(labels)
        if named.shape != plan.seqlens.shape:
            raise ValueError(
                f"{op}: keep_together must have one label for each of {len(plan.seqlens)} "
                f"sequences, got shape {list(named.shape)}"
            )
        item_of, firsts = numbered(named[members])
        sizes, counts, costs = (
            summed(each, item_of, len(firsts)) for each in (sizes, counts, costs)
        )
    crowded = ((sizes > capacity) & (counts > 1)) | (counts > max_sequences)
    if crowded.any():
        wrong = int(crowded.argmax())
        together = members[item_of == wrong]
        raise ValueError(
            f"{op}: sequences kept together must fit into a micro-batch of {capacity} tokens and "
            f"{max_sequences} sequences, got {sizes[wrong]} tokens in {len(together)} sequences, "
            f"from sequence {together[0]} to {together[-1]}"
        )
    # an oversized sequence counts as a full micro-batch
    return PlanItems(np.minimum(sizes, capacity), counts, costs, capacity, max_sequences), item_of


def _cut(
    op: str,
    lengths: Ints,
    chosen: npt.NDArray[np.bool_],
    room: int,
    *,
    policy: Policy,
    turn_ends: Any,
) -> tuple[list[int], dict[int, int]]:
    """Cut sequences at turns; return those that are still too long, and the kept tokens of others.

    Raises:
        ValueError: If a sequence is too long and the policy is to raise, or turn ends are wrong.
    """
    if (turn_ends is None) is (policy == "truncate_at_turn"):
        raise ValueError(
            f"{op}: turn_ends are for oversized='truncate_at_turn', which needs them, got "
            f"oversized={policy!r} and turn_ends={None if turn_ends is None else '[...]'}"
        )
    if turn_ends is not None and len(turn_ends) != len(lengths):
        raise ValueError(
            f"{op}: turn_ends must have one row for each of {len(lengths)} sequences, "
            f"got {len(turn_ends)}"
        )
    too_long, truncated = list[int](), dict[int, int]()
    for sequence in np.flatnonzero((lengths > room) & chosen).tolist():
        if policy == "raise":
            raise ValueError(
                f"{op}: sequence {sequence} has {lengths[sequence]} tokens, more than the capacity "
                f"of {room}; oversized='drop', 'truncate_at_turn' or 'own_bin' takes it"
            )
        ends = [] if turn_ends is None else [int(end) for end in turn_ends[sequence]]
        if wrong := [end for end in ends if not 0 <= end <= lengths[sequence]]:
            raise ValueError(
                f"{op}: turn_ends of sequence {sequence} must be in [0, {lengths[sequence]}], "
                f"got {wrong[0]}"
            )
        if kept := max((end for end in ends if end <= room), default=0):
            lengths[sequence] = truncated[sequence] = kept
        else:
            too_long.append(sequence)
    return too_long, truncated


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


def _as_array(values: Any) -> npt.NDArray[Any]:
    return np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values)
