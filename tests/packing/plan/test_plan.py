"""Plans of micro-batches: every rule beside its loop, and laws for any lengths."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.packing.plan import plan_loops
from tests.packing.plan.plan_loops import MIXES, karmarkar_karp
from trajpack import Plan, plan_micro_batches, plan_ranks
from trajpack.packing.plan.units import Algorithm

PACKING = ["next_fit", "first_fit_decreasing", "best_fit_decreasing"]
BALANCING = ["karmarkar_karp", "longest_processing_time"]
EVERY = [*PACKING, *BALANCING]


def held_by(plan):
    return [sequences.tolist() for sequences in plan]


def loads(bins, lengths):
    return sorted(sum(int(lengths[one]) for one in held) for held in bins)


def test_every_algorithm_is_known():
    assert list(Algorithm.__args__) == EVERY


# --- each rule beside its loop


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


@pytest.mark.parametrize("num_bins", [3, 40, 90])
def test_longest_processing_time_is_what_a_loop_does_whichever_way_it_goes(num_bins):
    """Many micro-batches are filled by numpy, few by a heap; capacities are loose and tight."""
    generator = np.random.default_rng(num_bins)
    tried = []
    for count, slack in ((50, 0), (700, 1), (700, 300), (700, 600), (700, 900), (700, 4000)):
        lengths = generator.integers(0, 900, count)
        costs = generator.integers(0, 50, count)
        capacity = max(900, int(lengths.sum()) // num_bins + slack)
        expected = plan_loops.longest_processing_time(lengths, costs, num_bins, capacity)
        tried.append(expected is not None)
        options = {"cost": costs, "min_bins": num_bins, "algorithm": "longest_processing_time"}
        plan = plan_micro_batches(lengths, capacity, **options)
        if expected is None:
            assert len(plan) > num_bins
        else:
            assert held_by(plan) == expected
    assert any(tried)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=25), st.integers(1, 6))
def test_differencing_is_not_behind_a_loop_over_full_rows(costs, num_bins):
    plan = plan_micro_batches(
        [1] * len(costs), 100, cost=costs, min_bins=num_bins, algorithm="karmarkar_karp"
    )
    found = plan.bin_costs
    expected = [sum(costs[one] for one in held) for held in karmarkar_karp(costs, num_bins)]
    assert sum(found) == sum(expected)
    # equal spreads are joined in another order, which may end with another balance
    distinct = len(set(costs)) == len(costs) and num_bins == 2
    assert max(found) <= max(expected) + (0 if distinct else max(costs))


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


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("num_bins", [4, 30])
def test_differencing_balances_better_than_longest_first(mix, num_bins):
    lengths, _ = MIXES[mix](np.random.default_rng(7), 300)
    spread = {}
    for name in BALANCING:
        plan = plan_micro_batches(lengths, 10**8, min_bins=num_bins, algorithm=name)
        assert len(plan) == num_bins
        spread[name] = int(np.ptp(plan.loads))
    assert spread["karmarkar_karp"] <= spread["longest_processing_time"]


# --- laws


def check_laws(plan, lengths, capacity, **asked):
    align = asked.get("align", 1)
    taken = -(-np.asarray(lengths, np.int64) // align) * align
    assert sorted(plan.order.tolist()) == list(range(len(lengths)))
    assert all(np.all(np.diff(sequences) > 0) for sequences in plan)
    assert plan.loads.tolist() == [int(taken[held].sum()) for held in plan]
    assert len(plan) % asked.get("multiple_of", 1) == 0
    assert len(plan) >= max(asked.get("min_bins", 1), plan.lower_bound)
    assert plan.loads.max(initial=0) <= capacity
    most = asked.get("max_sequences")
    assert most is None or max(map(len, plan), default=0) <= most
    labels = asked.get("keep_together")
    if labels is not None:
        bin_of = {one: number for number, held in enumerate(held_by(plan)) for one in held}
        where = {}
        for sequence, label in enumerate(labels):
            if label is not None:
                where.setdefault(label, set()).add(bin_of[sequence])
        assert all(len(bins) == 1 for bins in where.values())
    units = len(lengths) if labels is None else len(where) + list(labels).count(None)
    assert len(plan) > units or not (np.diff(plan.cu_bins) == 0).any()


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.none() | st.integers(0, 8)), max_size=12),
    st.sampled_from(EVERY),
    st.fixed_dictionaries(
        {
            "min_bins": st.integers(1, 7),
            "multiple_of": st.integers(1, 4),
            "align": st.integers(1, 3),
            "max_sequences": st.integers(12, 20) | st.none(),
        }
    ),
    st.booleans(),
    st.integers(120, 130),
)
def test_laws_of_any_plan(rows, name, asked, keeps, capacity):
    lengths, labels = ([*column] for column in zip(*rows, strict=True)) if rows else ([], [])
    if keeps:
        asked = asked | {"keep_together": labels}
    plan = plan_micro_batches(lengths, capacity, algorithm=name, **asked)
    check_laws(plan, lengths, capacity, **asked)


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=60),
    st.sampled_from(EVERY),
    st.integers(30, 64),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_the_capacity_is_kept_where_it_is_tight_and_costs_pull_elsewhere(
    lengths, name, capacity, most, costly, seed
):
    costs = np.random.default_rng(seed).random(len(lengths)) if costly else None
    asked = {"max_sequences": most, "cost": costs}
    plan = plan_micro_batches(lengths, capacity, algorithm=name, **asked)
    check_laws(plan, lengths, capacity, **asked)


@pytest.mark.parametrize("name", EVERY)
def test_units_of_several_sequences_meet_a_bound_of_sequences(name):
    generator = np.random.default_rng(3)
    lengths = generator.integers(1, 20, 300)
    labels = generator.integers(0, 120, 300).tolist()
    options = {"keep_together": labels, "max_sequences": 9}
    for capacity in (200, 240, 400):
        plan = plan_micro_batches(lengths, capacity, algorithm=name, **options)
        check_laws(plan, lengths, capacity, **options)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", PACKING[1:])
def test_few_micro_batches_more_than_there_must_be(mix, name):
    for seed, count in ((0, 2000), (1, 20_000)):
        lengths, capacity = MIXES[mix](np.random.default_rng(seed), count)
        plan = plan_micro_batches(lengths, capacity, algorithm=name)
        assert len(plan) <= 1.005 * plan.lower_bound + 1


@pytest.mark.parametrize("name", BALANCING)
def test_balancing_takes_few_micro_batches_more_and_they_are_even(name):
    for mix in MIXES:
        lengths, capacity = MIXES[mix](np.random.default_rng(0), 2000)
        plan = plan_micro_batches(lengths, capacity, algorithm=name)
        assert len(plan) <= 1.05 * plan.lower_bound + 1
        assert plan.statistics().token_imbalance < 1.06


# --- how many, and which


@pytest.mark.parametrize("name", EVERY)
def test_more_are_made_by_splitting_and_none_is_empty_while_one_can_be_split(name):
    lengths = [5, 9, 2, 2, 7, 1]
    for asked, wanted in (({"min_bins": 5}, 5), ({"multiple_of": 4}, 4), ({"min_bins": 6}, 6)):
        plan = plan_micro_batches(lengths, 30, algorithm=name, **asked)
        assert len(plan) == wanted
        assert min(map(len, plan)) > 0
    plan = plan_micro_batches(lengths, 30, algorithm=name, multiple_of=8)
    assert sorted(map(len, plan)) == [0, 0, 1, 1, 1, 1, 1, 1]


def test_next_fit_keeps_the_order_of_the_batch_where_it_splits_too():
    plan = plan_micro_batches([5, 9, 2, 2, 7, 1, 8], 16, algorithm="next_fit", min_bins=5)
    assert held_by(plan) == [[0], [1], [2], [3, 4, 5], [6]]
    assert plan.order.tolist() == list(range(7))


def test_the_most_costly_are_split():
    plan = plan_micro_batches([4, 4, 4, 4], 8, cost=[1, 1, 1, 9], min_bins=3)
    assert [9.0] in [plan.costs[held].tolist() for held in plan]


@pytest.mark.parametrize("name", EVERY)
def test_sequences_of_no_cost_leave_none_empty(name):
    free = plan_micro_batches([4, 4, 4, 4], 16, cost=[0] * 4, min_bins=4, algorithm=name)
    assert [len(held) for held in free] == [1] * 4


def test_costs_of_a_function_are_of_aligned_lengths():
    plan = plan_micro_batches([3, 8], 16, cost=lambda lengths: lengths**2, align=4)
    assert plan.costs.tolist() == [16.0, 64.0]
    assert plan.bin_costs.tolist() == [80.0]
    assert plan_micro_batches([3, 8], 16, align=4).bin_costs.tolist() == [12.0]


def test_labels_are_of_any_kind_and_none_is_alone():
    lengths = [4, 4, 4, 4]
    for labels in (["a", None, "a", None], [7, 1, 7, 2], torch.tensor([7, 1, 7, 2])):
        plan = plan_micro_batches(lengths, 8, keep_together=labels)
        assert held_by(plan) == [[0, 2], [1, 3]]


def test_without_sequences_micro_batches_are_empty():
    for name in EVERY:
        plan = plan_micro_batches([], 8, algorithm=name, min_bins=3, multiple_of=2)
        assert held_by(plan) == [[]] * 4
        assert (plan.fill, plan.lower_bound) == (0.0, 0)
        assert len(plan_micro_batches([], 8, algorithm=name, min_bins=0)) == 0


# --- sequences that are too long

LONG = [5, 30, 8, 12]


def test_a_sequence_that_is_too_long_is_named():
    with pytest.raises(ValueError, match=r"sequence 1 has 30 tokens, more than the capacity of 10"):
        plan_micro_batches(LONG, 10)
    with pytest.raises(ValueError, match=r"capacity of 8 in multiples of 4"):
        plan_micro_batches([9], 11, align=4)


@pytest.mark.parametrize("name", EVERY)
def test_it_is_dropped_or_alone_or_cut_at_a_turn_and_counted(name):
    plan = plan_micro_batches(LONG, 10, algorithm=name, oversized="drop")
    assert sorted(plan.order.tolist()) == [0, 2]
    assert plan.dropped == (1, 3)
    assert plan.seqlens.tolist() == LONG
    alone = plan_micro_batches(LONG, 10, algorithm=name, oversized="own_bin")
    assert alone.oversized == (1, 3)
    assert sorted(held_by(alone)) == [[0], [1], [2], [3]]
    assert sorted(alone.loads.tolist()) == [5, 8, 12, 30]
    turn_ends = [[5], [4, 9, 20, 30], [2, 8], [11, 12]]
    cut = plan_micro_batches(
        LONG, 10, algorithm=name, oversized="truncate_at_turn", turn_ends=turn_ends
    )
    assert (cut.dropped, dict(cut.truncated)) == ((3,), {1: 9})
    assert cut.seqlens.tolist() == [5, 9, 8, 12]
    assert sorted(cut.order.tolist()) == [0, 1, 2]
    shown = cut.statistics()
    assert (shown.num_dropped, shown.num_truncated, shown.num_oversized) == (1, 1, 0)
    assert shown.num_tokens == 22


def test_a_cut_reckons_with_alignment():
    options = {"oversized": "truncate_at_turn", "turn_ends": [[4, 8, 9]]}
    assert dict(plan_micro_batches([9], 11, align=4, **options).truncated) == {0: 8}
    assert dict(plan_micro_batches([9], 11, align=3, **options).truncated) == {}


# --- one plan everywhere

SAME = """
import numpy as np
from trajpack import plan_micro_batches, plan_ranks
lengths = np.random.default_rng(5).integers(1, 4000, 1000)
options = {"cost": np.sqrt(lengths), "keep_together": [f"group {i // 2}" for i in range(1000)]}
digests = []
for name in %r:
    plan = plan_micro_batches(lengths, 9000, algorithm=name, multiple_of=3, **options)
    ranks = plan_ranks(lengths, 3, 9000, algorithm=name, keep_on_rank=range(1000), num_steps=2)
    for one in (plan, *ranks.plans[0], *ranks.plans[1]):
        digests.append(hash((*one.order.tolist(), *one.cu_bins.tolist())))
"""


def test_another_process_with_other_hashes_plans_the_same():
    names = {}
    exec(SAME % (EVERY,), names)
    said = subprocess.run(
        [sys.executable, "-c", SAME % (EVERY,) + "print(digests)"],
        env=os.environ | {"PYTHONHASHSEED": "7"}, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert said.strip() == str(names["digests"])
    assert len(set(names["digests"])) == 7 * len(EVERY)


@pytest.mark.parametrize("name", EVERY)
def test_the_container_of_lengths_does_not_matter(name):
    lengths = np.random.default_rng(1).integers(1, 100, 200)
    expected = plan_micro_batches(lengths.tolist(), 256, algorithm=name, min_bins=0)
    containers = (tuple, np.uint8, np.int32, torch.tensor, lambda each: torch.tensor(each).int())
    for container in containers:
        plan = plan_micro_batches(container(lengths), 256, algorithm=name, min_bins=0)
        assert plan.order.tolist() == expected.order.tolist()
        assert plan.cu_bins.tolist() == expected.cu_bins.tolist()


# --- the plan itself


def test_a_plan_is_read_by_index_and_cannot_be_written_to():
    plan = plan_micro_batches([5, 3, 4, 2, 6], 10)
    assert held_by(plan) == [plan[0].tolist(), plan[-1].tolist()]
    with pytest.raises(IndexError):
        plan[2]
    with pytest.raises(ValueError, match="read-only"):
        plan.order[0] = 1
    assert repr(plan) == "Plan(2 micro-batches of up to 10 tokens, 5 of 5 sequences, fill 1.0000)"


def test_a_plan_by_hand_is_checked():
    lengths = np.array([3, 4])
    assert held_by(Plan(np.array([1, 0]), np.array([0, 1, 2]), lengths, 4)) == [[1], [0]]
    with pytest.raises(ValueError, match="a sequence is in two micro-batches"):
        Plan(np.array([1, 1]), np.array([0, 1, 2]), lengths, 4)
    for ends in ([0, 1], [1, 2], [0, 3, 2], []):
        with pytest.raises(ValueError, match="cu_bins must rise from 0 to 2, got"):
            Plan(np.array([1, 0]), np.array(ends), lengths, 4)
    for order in ([0, 2], [-1, 0]):
        with pytest.raises(ValueError, match="order must hold sequences from 0 to 1"):
            Plan(order, [0, 1, 2], lengths, 4)
    lengths[0] = 9  # the caller's array stays as it was


def test_a_plan_can_be_sent_to_another_process():
    plans = plan_ranks([5, 30, 8], 2, 10, oversized="truncate_at_turn", turn_ends=[[], [7], []])
    for plan in (plans.plan(0), pickle.loads(pickle.dumps(plans)).plan(0)):
        assert held_by(plan) == [[2], []]
        assert plans.plan(1).truncated == {1: 7}
