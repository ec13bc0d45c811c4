"""Bounds of plans, beside a search through all packings, and how long planning takes."""

import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.packing.plan.plan_loops import MIXES
from trajpack import plan_micro_batches
from trajpack.packing.plan.statistics import lower_bound


def fewest(lengths, capacity):
    """Return the fewest bins, by trying every place for every length."""
    best = len(lengths)

    def place(rest, rooms):
        nonlocal best
        if len(rooms) >= best:
            return
        if not rest:
            best = len(rooms)
            return
        for room in set(rooms):
            if room >= rest[0]:
                left = list(rooms)
                left.remove(room)
                place(rest[1:], [*left, room - rest[0]])
        place(rest[1:], [*rooms, capacity - rest[0]])

    place(sorted(lengths, reverse=True), [])
    return best


@settings(max_examples=200)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(20, 40))
def test_no_packing_needs_fewer_than_the_bound(lengths, capacity):
    bound, best = lower_bound(np.array(lengths), capacity), fewest(lengths, capacity)
    assert -(-sum(lengths) // capacity) <= bound <= best
    for name in ("first_fit_decreasing", "best_fit_decreasing"):
        plan = plan_micro_batches(lengths, capacity, algorithm=name)
        assert plan.lower_bound == bound
        assert len(plan) <= 11 * best / 9 + 6 / 9  # Dósa's bound of first fit decreasing


@pytest.mark.parametrize(
    ("lengths", "capacity", "wanted"),
    [
        ([6, 6, 6, 6], 10, 4),  # no two fit together
        ([7, 7, 4, 4], 10, 3),  # no four fits a seven; two fours fit each other
        ([4] * 9, 11, 5),  # just above a third: two to a bin
        ([26] * 13, 101, 5),  # just above a quarter: three to a bin
        ([21] * 9, 100, 3),  # just above a fifth: four to a bin
        ([14, 18, 20], 30, 3),  # 14 fits neither
        ([5, 5, 5, 5], 10, 2),
        ([10], 10, 1),
    ],
)
def test_bounds_by_hand(lengths, capacity, wanted):
    assert lower_bound(np.array(lengths), capacity) == wanted == fewest(lengths, capacity)


def test_the_bound_of_a_plan_reckons_with_alignment_and_long_sequences():
    assert plan_micro_batches([5, 5, 5], 15, align=4).lower_bound == 3
    assert plan_micro_batches([40, 3], 10, oversized="own_bin").lower_bound == 2
    assert plan_micro_batches([40, 3], 10, oversized="drop").lower_bound == 1


@pytest.mark.parametrize("mix", MIXES)
def test_costs_that_pull_against_tight_capacities_are_planned_in_time_too(mix):
    lengths, capacity = MIXES[mix](np.random.default_rng(9), 20_000)
    begin = time.process_time()
    plan = plan_micro_batches(
        lengths, capacity, algorithm="longest_processing_time", cost=lengths.astype(float) ** 2
    )
    assert time.process_time() - begin < 3.0
    assert plan.loads.max() <= capacity
    assert len(plan) <= 1.05 * plan.lower_bound + 1


@pytest.mark.parametrize("mix", MIXES)
def test_a_hundred_thousand_lengths_are_planned_in_no_time(mix):
    """A limit that no loop over lengths and micro-batches keeps, on however slow a machine."""
    lengths, capacity = MIXES[mix](np.random.default_rng(8), 100_000)
    for name in ("next_fit", "best_fit_decreasing", "longest_processing_time"):
        begin = time.process_time()
        plan = plan_micro_batches(lengths, capacity, algorithm=name)
        assert time.process_time() - begin < 1.5, name
        assert len(plan.order) == 100_000
        assert plan.loads.max() <= capacity
    few = plan_micro_batches(lengths, capacity)
    assert len(few) <= 1.005 * few.lower_bound
