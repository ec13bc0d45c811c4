"""Bin packing and balance beside loops, bounds and other systems' methods; and their speed."""

import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.packing.plan.plan_loops import (
    EVERY,
    MIXES,
    PACKING,
    held_by,
    karmarkar_karp,
)
from trajpack import plan_micro_batches, plan_ranks

SMALL = st.lists(st.integers(0, 12), max_size=40)


DRAWS = {
    "uniform": lambda rng, count: rng.integers(50, 4000, count),
    "lognormal": lambda rng, count: rng.lognormal(6.5, 0.8, count).astype(np.int64) + 1,
    "narrow": lambda rng, count: rng.integers(500, 1500, count),
}


@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
def test_a_hundred_thousand_lengths_are_planned_in_no_time(mix):
    """A limit that no loop over lengths and micro-batches keeps, on however slow a machine."""
    lengths, capacity = MIXES[mix](np.random.default_rng(8), 100_000)
    for name, limit_s in (("next_fit", 1.5), ("best_fit_decreasing", 1.5), ("karmarkar_karp", 8)):
        begin = time.process_time()
        plan = plan_micro_batches(lengths, capacity, algorithm=name)
        assert time.process_time() - begin < limit_s, name
        assert len(plan.order) == 100_000
        assert plan.loads.max() <= capacity
    few = plan_micro_batches(lengths, capacity)
    assert len(few) <= 1.005 * few.lower_bound


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", PACKING)
def test_packing_is_what_a_loop_over_bins_packs(mix, name):
    for seed in range(3):
        lengths, capacity = MIXES[mix](np.random.default_rng(seed), 400)
        plan = plan_micro_batches(lengths, capacity, algorithm=name)
        assert held_by(plan) == PACKING[name](lengths, capacity)


@settings(max_examples=150)
@given(SMALL, st.integers(12, 30), st.none() | st.integers(1, 4))
def test_packing_is_so_for_any_lengths_and_any_bound_of_sequences(lengths, capacity, most):
    for name, loop in PACKING.items():
        plan = plan_micro_batches(lengths, capacity, algorithm=name, max_sequences=most)
        assert held_by(plan) == (loop(lengths, capacity, most) or [[]])


@pytest.mark.parametrize("mix", MIXES)
def test_few_micro_batches_more_than_there_must_be(mix):
    for seed, count in ((0, 2000), (1, 20_000)):
        lengths, capacity = MIXES[mix](np.random.default_rng(seed), count)
        plan = plan_micro_batches(lengths, capacity)
        assert len(plan) <= 1.005 * plan.lower_bound + 1


def test_next_fit_keeps_the_order_of_the_batch_where_it_splits_too():
    plan = plan_micro_batches([5, 9, 2, 2, 7, 1, 8], 16, algorithm="next_fit", min_bins=5)
    assert held_by(plan) == [[0], [1], [2], [3, 4, 5], [6]]
    assert plan.order.tolist() == list(range(7))


def imbalance(bins, lengths):
    """The largest load over the mean."""
    loads = [sum(lengths[one] for one in held) for held in bins]
    return max(loads) * len(loads) / sum(loads)


def planned(lengths, num_bins, **options):
    """Our micro-batches, as lists of sequences."""
    options = {"min_bins": num_bins, "algorithm": "karmarkar_karp"} | options
    plan = plan_micro_batches(lengths, options.pop("capacity", int(sum(lengths))), **options)
    assert len(plan) == num_bins
    return [held.tolist() for held in plan]


def on_ranks(lengths, num_ranks):
    """What our ranks have, as lists of sequences."""
    plans = plan_ranks(lengths, num_ranks, int(sum(lengths)), algorithm="karmarkar_karp")
    return [plans.plan(rank).order.tolist() for rank in range(num_ranks)]


def compare(ours, theirs):
    """Count the cases in which ours is behind, and give both means."""
    ours, theirs = np.array(ours), np.array(theirs)
    return int((ours > theirs + 1e-12).sum()), ours.mean(), theirs.mean()


@pytest.mark.slow
@pytest.mark.parametrize("draw", DRAWS)
def test_balance_is_not_behind_verls_with_any_number_or_equal_numbers(draw):
    """100 cases of each distribution; the method is verl's, restated."""
    rng = np.random.default_rng(0)
    found = {"free": ([], []), "equal": ([], []), "ranks": ([], [])}
    for _ in range(100):
        num_bins, each = (int(number) for number in rng.integers(2, 9, 2))
        lengths = DRAWS[draw](rng, num_bins * each).tolist()
        free = imbalance(karmarkar_karp(lengths, num_bins), lengths)
        equal = imbalance(karmarkar_karp(lengths, num_bins, num_bins), lengths)
        ours = planned(lengths, num_bins, max_sequences=each)
        assert {len(held) for held in ours} == {each}
        for name, bins, theirs in (
            ("free", planned(lengths, num_bins), free),
            ("equal", ours, equal),
            ("ranks", on_ranks(lengths, num_bins), free),
        ):
            found[name][0].append(imbalance(bins, lengths))
            found[name][1].append(theirs)
    for name, (ours, theirs) in found.items():
        behind, mean, of_theirs = compare(ours, theirs)
        assert behind <= 1, name
        assert mean < of_theirs, name


def test_a_tight_capacity_is_kept_and_balanced():
    """With 5 % of room, balance is ahead of the same method without a capacity."""
    rng, ours, theirs = np.random.default_rng(2), [], []
    for _ in range(60):
        num_bins = int(rng.integers(2, 9))
        lengths = rng.integers(50, 1000, num_bins * int(rng.integers(4, 9))).tolist()
        capacity = max(*lengths, int(sum(lengths) / num_bins * 1.05) + 1)
        plan = plan_micro_batches(lengths, capacity, min_bins=num_bins, algorithm="karmarkar_karp")
        assert plan.loads.max() <= capacity
        ours.append(imbalance(plan, lengths))
        theirs.append(imbalance(karmarkar_karp(lengths, len(plan)), lengths))
    behind, mean, of_theirs = compare(ours, theirs)
    assert behind <= 2
    assert mean < of_theirs


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=24),
    st.integers(1, 6),
    st.integers(30, 90),
    st.none() | st.integers(2, 9),
)
def test_no_exchange_with_the_most_costly_makes_both_cheaper(rows, num_bins, capacity, most):
    """Of tokens and costs that have nothing to do with each other, within both limits."""
    lengths, costs = ([*column] for column in zip(*rows, strict=True))
    plan = plan_micro_batches(
        lengths, capacity, cost=costs, min_bins=num_bins, max_sequences=most,
        algorithm="karmarkar_karp",
    )  # fmt: skip
    most = most or len(lengths)
    bins, loads = [held.tolist() for held in plan], plan.bin_costs
    first = int(loads.argmax())
    least = max(*costs, -(-sum(costs) // len(bins)))
    if len(bins) > len(lengths) or loads[first] <= least:  # no plan could be better
        return
    for number, held in enumerate(bins):
        for one in bins[first]:
            for other in [*held, None]:
                if number == first:
                    continue
                given_up = costs[one] - (0 if other is None else costs[other])
                tokens = lengths[one] - (0 if other is None else lengths[other])
                sizes = plan.loads[number] + tokens, plan.loads[first] - tokens
                fits = max(sizes) <= capacity and (other is not None or len(held) < most)
                after = max(loads[first] - given_up, loads[number] + given_up)
                assert not (fits and after < loads[first])


@pytest.mark.parametrize(
    ("costs", "num_bins", "wanted"),
    [
        ([4, 5, 6, 7, 8], 2, [15, 15]),  # Korf's example: differencing alone is 2 off
        ([8, 7, 6, 5, 4], 3, [8, 11, 11]),
        ([10, 8, 7, 6, 5], 2, [18, 18]),
        ([1, 1, 1, 1], 4, [1, 1, 1, 1]),
        ([5, 3, 3], 2, [5, 6]),
        ([9], 2, [0, 9]),
        ([0, 0, 7], 1, [7]),
    ],
)
def test_differencing_by_hand(costs, num_bins, wanted):
    plan = plan_micro_batches(
        [1] * len(costs), 99, cost=costs, min_bins=num_bins, algorithm="karmarkar_karp"
    )
    assert sorted(plan.bin_costs.tolist()) == wanted


def test_balancing_takes_few_micro_batches_more_and_they_are_even():
    for mix in MIXES:
        lengths, capacity = MIXES[mix](np.random.default_rng(0), 2000)
        plan = plan_micro_batches(lengths, capacity, algorithm="karmarkar_karp")
        assert len(plan) <= 1.02 * plan.lower_bound + 1
        assert plan.statistics().cost_imbalance < 1.06


@pytest.mark.parametrize("name", EVERY)
def test_more_are_made_by_splitting_and_none_is_empty_while_one_can_be_split(name):
    lengths = [5, 9, 2, 2, 7, 1]
    for asked, wanted in (({"min_bins": 5}, 5), ({"multiple_of": 4}, 4), ({"min_bins": 6}, 6)):
        plan = plan_micro_batches(lengths, 30, algorithm=name, **asked)
        assert len(plan) == wanted
        assert min(map(len, plan)) > 0
    plan = plan_micro_batches(lengths, 30, algorithm=name, multiple_of=8)
    assert sorted(map(len, plan)) == [0, 0, 1, 1, 1, 1, 1, 1]


def test_the_most_costly_are_split():
    plan = plan_micro_batches([4, 4, 4, 4], 8, cost=[1, 1, 1, 9], min_bins=3)
    assert [9.0] in [plan.costs[held].tolist() for held in plan]


@pytest.mark.parametrize("name", EVERY)
def test_sequences_of_no_cost_leave_none_empty(name):
    free = plan_micro_batches([4, 4, 4, 4], 16, cost=[0] * 4, min_bins=4, algorithm=name)
    assert [len(held) for held in free] == [1] * 4


@pytest.mark.parametrize("mix", MIXES)
def test_costs_that_pull_against_tight_capacities_need_few_micro_batches_more_too(mix):
    """Where balance finds no room, packed sequences exchange places; at most 3 tries in all."""
    lengths, capacity = MIXES[mix](np.random.default_rng(9), 4000)
    for cost in (lengths.astype(float) ** 2, np.random.default_rng(9).random(4000)):
        plan = plan_micro_batches(lengths, capacity, algorithm="karmarkar_karp", cost=cost)
        packed = plan_micro_batches(lengths, capacity, cost=cost)
        assert plan.loads.max() <= capacity
        assert len(plan) <= 65 / 64 * len(packed) + 1
        assert plan.bin_costs.max() <= packed.bin_costs.max()
