"""The micro-batches of all ranks in one optimizer step, and where each of them is done."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from trajpack.packing.plan.balance import BALANCING, balanced, split_to
from trajpack.packing.plan.blocks import Ranks, dealt
from trajpack.packing.plan.plan import Algorithm, placed
from trajpack.packing.plan.units import Ints, Request, Units, scaled, summed, units_of

Order: TypeAlias = Literal["largest_first", "small_at_ends", "as_planned"]
"""Order of a rank's micro-batches.

- ``"largest_first"``: by cost, so that ranks in step wait little, and memory runs out at once or
  never.
- ``"small_at_ends"``: the most costly in the middle: a pipeline fills and drains with small ones.
- ``"as_planned"``: as the algorithm made them.
"""


class Wish(NamedTuple):
    """How micro-batches are made, for each rank."""

    num_ranks: int
    algorithm: Algorithm
    min_bins: int
    multiple_of: int
    order: Order


class Step(NamedTuple):
    """Where each sequence of a step goes."""

    members: Ints
    """Its sequences."""
    places: Ints
    """Micro-batch of each, numbered through rank after rank."""
    num_places: int
    """Micro-batches of all ranks, as many on each."""


def planned_step(
    request: Request,
    members: Ints,
    blocks: tuple[Ints | None, Ints | None],
    ranks: Ranks,
    wish: Wish,
) -> Step:
    """Plan a step.

    Where sequences may go to any rank there are two ways: micro-batches of all sequences, dealt
    out to ranks; or sequences to ranks, and micro-batches of each rank's. The first fills better,
    the second makes ranks cost the same. What takes fewer micro-batches is taken, then what makes
    the most costly rank cost less.

    Args:
        request: Lengths and limits.
        members: Sequences of the step.
        blocks: Labels, by sequence, of what is kept on a rank and of what is kept together.
        ranks: Which rank has which label so far.
        wish: How micro-batches are made.
    """
    on_rank, together = blocks
    if on_rank is not None:
        return _ranks_first(request, members, (on_rank, together), ranks, wish)
    pooled = _micro_batches_first(request, members, together, wish)
    if wish.algorithm == "next_fit" or wish.num_ranks == 1:  # it keeps the order of the batch
        return pooled
    anywhere = np.arange(len(request.seqlens)) if together is None else together
    fresh = Ranks(wish.num_ranks, wish.algorithm)
    spread = _ranks_first(request, members, (anywhere, together), fresh, wish)
    return min(spread, pooled, key=lambda step: _price(request, step, wish.num_ranks))


def _price(request: Request, step: Step, num_ranks: int) -> tuple[int, int]:
    """Return how many micro-batches a step takes, and what its most costly rank costs."""
    costs = scaled(request.costs[np.sort(step.members)])
    each = step.num_places // num_ranks
    rank_of = step.places[np.argsort(step.members)] // each
    return step.num_places, int(summed(costs, rank_of, num_ranks).max())


def _micro_batches_first(
    request: Request, members: Ints, together: Ints | None, wish: Wish
) -> Step:
    """Make micro-batches of all sequences, and deal them out."""
    units = units_of(request, members, together)
    fewest, multiple = wish.num_ranks * wish.min_bins, wish.num_ranks * wish.multiple_of
    bin_of, num_bins = placed(units, request, wish.algorithm, fewest, multiple)
    costs, empty = _costs_of(bin_of, num_bins, units)
    rank_of = dealt(costs, empty, wish.num_ranks)
    place_of = np.empty(num_bins, np.int64)
    each = num_bins // wish.num_ranks
    for rank in range(wish.num_ranks):
        own = np.flatnonzero(rank_of == rank)
        place_of[own[_ordered(costs[own], empty[own], wish.order)]] = rank * each + np.arange(each)
    return Step(members, place_of[bin_of[units.unit_of]], num_bins)


def _ranks_first(
    request: Request,
    members: Ints,
    labels: tuple[Ints, Ints | None],
    ranks: Ranks,
    wish: Wish,
) -> Step:
    """Spread sequences over ranks, and make the micro-batches of each."""
    blocks, together = labels
    rank_of = ranks.assign(blocks[members], scaled(request.costs[members]))
    own = [units_of(request, members[rank_of == rank], together) for rank in range(wish.num_ranks)]
    found = [
        placed(units, request, wish.algorithm, wish.min_bins, wish.multiple_of) for units in own
    ]
    most = max(num_bins for _, num_bins in found)
    places = []
    for rank, (units, (bin_of, num_bins)) in enumerate(zip(own, found, strict=True)):
        again = None
        if num_bins < most and wish.algorithm in BALANCING:
            again = balanced(units, request.limits, wish.algorithm, most)
        if again is None:
            in_order = wish.algorithm == "next_fit"
            again, _ = split_to(bin_of, num_bins, most, units, in_order=in_order)
        costs, empty = _costs_of(again, most, units)
        place_of = np.empty(most, np.int64)
        place_of[_ordered(costs, empty, wish.order)] = rank * most + np.arange(most)
        places.append(place_of[again[units.unit_of]])
    members = np.concatenate([units.members for units in own])
    return Step(members, np.concatenate(places), most * wish.num_ranks)


def _costs_of(bin_of: Ints, num_bins: int, units: Units) -> tuple[Ints, Ints]:
    """Return each micro-batch's cost, and 1 where it holds nothing."""
    empty = (np.bincount(bin_of, minlength=num_bins) == 0).astype(np.int64)
    return summed(units.costs, bin_of, num_bins), empty


def _ordered(costs: Ints, empty: Ints, order: Order) -> Ints:
    """Return micro-batches in the order asked for; those that are empty count as the smallest."""
    numbers = np.arange(len(costs))
    if order == "as_planned":
        return numbers
    falling = np.lexsort((numbers, -costs, empty))
    if order == "largest_first":
        return falling
    return np.concatenate([falling[::2][::-1], falling[1::2]])
