"""Bin packing beside loops over bins, its distance to the lower bound, and its speed."""

import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.packing.plan import plan_loops
from tests.packing.plan.plan_loops import MIXES, PACKING, held_by
from trajpack import plan_micro_batches


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


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("seed", range(3))
def test_packing_is_what_a_loop_over_bins_packs(mix, seed):
    lengths, capacity = MIXES[mix](np.random.default_rng(seed), 400)
    plan = plan_micro_batches(lengths, capacity, algorithm="next_fit")
    assert held_by(plan) == plan_loops.next_fit(lengths, capacity)
    for best, name in enumerate(PACKING[1:]):
        plan = plan_micro_batches(lengths, capacity, algorithm=name)
        expected = plan_loops.fit_decreasing(lengths, capacity, best=bool(best))
        assert held_by(plan) == expected, name


SMALL = st.lists(st.integers(0, 12), max_size=40)


@settings(max_examples=150)
@given(SMALL, st.integers(12, 30), st.none() | st.integers(1, 4))
def test_packing_is_so_for_any_lengths_and_any_bound_of_sequences(lengths, capacity, most):
    options = {"max_sequences": most, "min_bins": 0}
    plan = plan_micro_batches(lengths, capacity, algorithm="next_fit", **options)
    assert held_by(plan) == plan_loops.next_fit(lengths, capacity, most)
    for best, name in enumerate(PACKING[1:]):
        plan = plan_micro_batches(lengths, capacity, algorithm=name, **options)
        expected = plan_loops.fit_decreasing(lengths, capacity, best=bool(best), max_sequences=most)
        assert held_by(plan) == expected


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", PACKING[1:])
def test_few_micro_batches_more_than_there_must_be(mix, name):
    for seed, count in ((0, 2000), (1, 20_000)):
        lengths, capacity = MIXES[mix](np.random.default_rng(seed), count)
        plan = plan_micro_batches(lengths, capacity, algorithm=name)
        assert len(plan) <= 1.005 * plan.lower_bound + 1


def test_next_fit_keeps_the_order_of_the_batch_where_it_splits_too():
    plan = plan_micro_batches([5, 9, 2, 2, 7, 1, 8], 16, algorithm="next_fit", min_bins=5)
    assert held_by(plan) == [[0], [1], [2], [3, 4, 5], [6]]
    assert plan.order.tolist() == list(range(7))
