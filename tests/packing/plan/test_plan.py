"""Plans: laws for any lengths, the same plan in every process, and the type itself."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.packing.plan.plan_loops import EVERY, check_laws, held_by
from trajpack import Plan, plan_micro_batches


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8)), max_size=12),
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


def test_without_sequences_micro_batches_are_empty():
    for name in EVERY:
        plan = plan_micro_batches([], 8, algorithm=name, min_bins=3, multiple_of=2)
        assert held_by(plan) == [[]] * 4
        assert (plan.fill, plan.lower_bound) == (0.0, 0)


SAME = """
import numpy as np
from trajpack import plan_micro_batches, plan_ranks
lengths = np.random.default_rng(5).integers(1, 4000, 1000)
options = {"cost": np.sqrt(lengths), "keep_together": [f"group {i // 2}" for i in range(1000)]}
digests = []
for name in %r:
    plan = plan_micro_batches(lengths, 9000, algorithm=name, multiple_of=3, **options)
    ranks = plan_ranks(lengths, 3, 9000, algorithm=name)
    for one in (plan, *ranks.plans):
        digests.append(hash((*one.order.tolist(), *one.cu_bins.tolist())))
"""


@pytest.mark.slow
def test_another_process_with_other_hashes_plans_the_same():
    names = {}
    exec(SAME % (EVERY,), names)
    said = subprocess.run(
        [sys.executable, "-c", SAME % (EVERY,) + "print(digests)"],
        env=os.environ | {"PYTHONHASHSEED": "7"}, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert said.strip() == str(names["digests"])
    assert len(set(names["digests"])) == 4 * len(EVERY)


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


def test_arguments_are_not_written_to_and_plans_are_read_only():
    def twice(lengths):
        lengths *= 2
        return lengths

    given = np.array([3, 4, 5])
    plan = plan_micro_batches(given, 8, cost=twice, algorithm="karmarkar_karp")
    assert given.tolist() == plan.seqlens.tolist() == [3, 4, 5]
    for array in (plan.order, plan.cu_bins, plan.seqlens, plan.costs, plan.loads, plan[0]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    few = plan_micro_batches([5, 3, 4, 2, 6], 10)
    assert held_by(few) == [few[0].tolist(), few[-1].tolist()]
    assert repr(few) == "Plan(2 micro-batches of up to 10 tokens, 5 of 5 sequences, fill 1.0000)"
    with pytest.raises(IndexError):
        few[2]
    with pytest.raises(TypeError, match="Plan: order must be integers, got float64"):
        Plan(order=[0.5], cu_bins=[0, 1], seqlens=[3], capacity=8)
