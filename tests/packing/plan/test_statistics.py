"""Statistics of plans by hand and by a law; lower bounds beside an exhaustive search."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from trajpack import plan_micro_batches, plan_ranks
from trajpack.packing.plan.algorithms import lower_bound


def test_padding_has_causes():
    plan = plan_micro_batches([3, 6, 5, 1], 10, align=4, multiple_of=6)
    shown = plan.statistics()
    assert plan.loads.tolist().count(0) == 2
    wanted = {
        "num_micro_batches": 6, "num_dummies": 2, "num_sequences": 4, "num_tokens": 15,
        "padding_alignment": 1 + 2 + 3 + 3, "padding_tail": 6 + 2 + 2 + 6, "padding_dummy": 20,
        "padding_shapes": 0, "lower_bound": 3,
    }  # fmt: skip
    assert {name: getattr(shown, name) for name in wanted} == wanted
    assert shown.fill == 15 / 60
    assert shown.cost_imbalance == 8 / (24 / 6)


def test_imbalance_is_of_micro_batches_and_of_ranks():
    plans = plan_ranks([8, 2, 4, 4], 2, 8, cost=[64, 4, 16, 16])
    shown = plans.statistics()
    costs = [float(plan.bin_costs.sum()) for plan in plans.plans]
    assert shown.rank_cost_imbalance == max(costs) / 50
    assert "rank_cost_imbalance" in repr(shown)
    assert repr(shown).splitlines()[5].split() == ["num_dropped", "0"]
    assert max(map(len, repr(shown).splitlines())) < 60


def test_statistics_of_nothing_are_numbers():
    shown = plan_ranks([], 2, 8).statistics()
    assert (shown.fill, shown.cost_imbalance, shown.padding_dummy) == (0.0, 1.0, 16)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 40), max_size=30),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["drop", "own_bin"]),
    st.sampled_from([None, 1, 2]),
)
def test_tokens_and_paddings_are_all_there_is(lengths, num_ranks, align, policy, shapes):
    plans = plan_ranks(lengths, num_ranks, 24, align=align, oversized=policy, shapes=shapes)
    shown = plans.statistics()
    padding = shown.padding_alignment + shown.padding_tail + shown.padding_dummy
    room = 24 * shown.num_micro_batches
    totals = [
        -(-int(load) // plan.total_multiple) * plan.total_multiple
        for plan in plans.plans for load in plan.loads[np.diff(plan.cu_bins) > 0]
    ]  # fmt: skip
    over = sum(max(total - 24, 0) for total in totals)
    assert shown.num_tokens + padding + shown.padding_shapes - over == room
    assert shown.num_shapes == len(set(totals))
    assert shapes is None or over or shown.num_shapes <= shapes
    assert shown.num_sequences + shown.num_dropped == len(lengths)
    assert shown.fill == shown.num_tokens / room
    assert 1 <= shown.rank_cost_imbalance <= num_ranks


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
    plan = plan_micro_batches(lengths, capacity)
    assert plan.lower_bound == bound
    assert len(plan) <= 11 * best / 9 + 6 / 9  # Dósa's bound of first fit decreasing


@pytest.mark.parametrize(
    ("lengths", "capacity", "wanted"),
    [
        ([6, 6, 6, 6], 10, 4),  # no two fit together
        ([7, 7, 3, 2], 10, 2),
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
