"""What plans refuse, and how they say it."""

import pickle

import numpy as np
import pytest

from trajpack import Plan, plan_micro_batches, plan_ranks


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"seqlens": [[1, 2]]}, ValueError, r"seqlens must be one row of lengths, got shape"),
        ({"seqlens": [1.0]}, TypeError, r"seqlens must be integers, got float64"),
        ({"seqlens": [True]}, TypeError, r"seqlens must be integers, got bool"),
        ({"seqlens": [3, -1]}, ValueError, r"must be in \[0, 2147483647\], got -1 at 1"),
        ({"seqlens": [2**31]}, ValueError, r"got 2147483648 at 0"),
        ({"capacity": 0}, ValueError, r"capacity must be 1 or more, got 0"),
        ({"capacity": 8.0}, TypeError, r"capacity must be an integer, got 8.0"),
        ({"capacity": None}, TypeError, r"capacity must be an integer, got None"),
        ({"capacity": 2**31}, ValueError, r"must be in \[1, 2147483647\], .* got 2147483648"),
        ({"capacity": 7, "align": 8}, ValueError, r"capacity must be in \[8, 21.*, got 7"),
        ({"align": 0}, ValueError, r"align must be 1 or more, got 0"),
        ({"max_sequences": 0}, ValueError, r"max_sequences must be 1 or more, got 0"),
        ({"min_bins": -1}, ValueError, r"min_bins must be 0 or more, got -1"),
        ({"multiple_of": True}, TypeError, r"multiple_of must be an integer, got True"),
        ({"algorithm": "ffd"}, ValueError, r"algorithm must be one of 'next_fit', .* got 'ffd'"),
        ({"oversized": "cut"}, ValueError, r"oversized must be one of 'raise', .* got 'cut'"),
        ({"cost": [1.0]}, ValueError, r"one number for each of 3 sequences, got shape \[1\]"),
        ({"cost": [1, 2, np.nan]}, ValueError, r"cost must be finite and not .* got nan at 2"),
        ({"cost": [1, -2, 0]}, ValueError, r"got -2.0 at 1"),
        ({"cost": [1e300, 2, 0]}, ValueError, r"cost must be at most 1e\+290, got 1e\+300"),
        ({"cost": lambda lengths: 1.0}, ValueError, r"got shape \[\]"),
        ({"keep_together": [1, 2]}, ValueError, r"one label for each of 3 sequences, got 2"),
        (
            {"keep_together": [0, 1, 0], "capacity": 7},
            ValueError,
            r"into a micro-batch of 7 tokens .* got 8 tokens in 2 sequences, from sequence 0 to 2",
        ),
        (
            {"keep_together": [0, 0, 0], "max_sequences": 2},
            ValueError,
            r"and 2 sequences, got 12 tokens in 3 sequences",
        ),
        ({"turn_ends": [[3], [4], [5]]}, ValueError, r"turn_ends are for .* got 'raise'"),
        ({"oversized": "truncate_at_turn"}, ValueError, r"needs turn_ends, got None"),
        (
            {"oversized": "truncate_at_turn", "turn_ends": [[3]]},
            ValueError,
            r"turn_ends must have one row for each of 3 sequences, got 1",
        ),
        (
            {"oversized": "truncate_at_turn", "turn_ends": [[], [], [9]], "capacity": 4},
            ValueError,
            r"turn_ends of sequence 2 must be in \[0, 5\], got 9",
        ),
    ],
)
def test_what_cannot_be_planned_is_named(asked, error, said):
    arguments = {"seqlens": [3, 4, 5], "capacity": 100} | asked
    with pytest.raises(error, match=rf"^plan_micro_batches: .*{said}"):
        plan_micro_batches(**arguments)
    if "min_bins" not in asked:
        with pytest.raises(error, match=rf"^plan_ranks: .*{said}"):
            plan_ranks(num_ranks=2, **arguments)


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"num_ranks": 0}, ValueError, r"num_ranks must be 1 or more, got 0"),
        ({"min_bins": 0}, ValueError, r"min_bins must be 1 or more, got 0"),
        ({"num_steps": 4}, ValueError, r"num_steps must be 3 or fewer, .* sequences, got 4"),
        (
            {"num_steps": 3, "keep_in_step": [1, 2, 1]},
            ValueError,
            r"num_steps must be 2 or fewer, as many as there are blocks kept in a step, got 3",
        ),
        ({"order": "small"}, ValueError, r"order must be one of 'largest_first', .* got 'small'"),
        ({"keep_on_rank": [1]}, ValueError, r"keep_on_rank must have one label .* 3 .* got 1"),
    ],
)
def test_what_ranks_cannot_plan_is_named(asked, error, said):
    with pytest.raises(error, match=rf"^plan_ranks: {said}"):
        plan_ranks(**{"seqlens": [3, 4, 5], "capacity": 100, "num_ranks": 2} | asked)


def test_what_is_asked_is_not_written_to_and_plans_cannot_be():
    def twice(lengths):
        lengths *= 2
        return lengths

    given = np.array([3, 4, 5])
    plan = plan_micro_batches(given, 8, cost=twice, algorithm="longest_processing_time")
    assert given.tolist() == plan.seqlens.tolist() == [3, 4, 5]
    for array in (plan.order, plan.cu_bins, plan.seqlens, plan.costs, plan.loads, plan[0]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    with pytest.raises(TypeError, match="Plan: order must be integers, got float64"):
        Plan(order=[0.5], cu_bins=[0, 1], seqlens=[3], capacity=8)


def test_plans_go_to_other_processes_with_the_lengths_once():
    plans = plan_ranks(np.arange(1, 4001), 64, 8000)
    sent = pickle.dumps(plans)
    assert len(sent) < 3 * plans.plan(0).seqlens.nbytes + 64 * 2000
    again = pickle.loads(sent)
    assert repr(again) == repr(plans)
    assert again.plan(63).order.tolist() == plans.plan(63).order.tolist()


def test_there_is_no_rank_and_no_step_beyond():
    plans = plan_ranks([3, 4, 5], 2, 100)
    with pytest.raises(IndexError, match=r"rank must be in \[0, 1\], got 2"):
        plans.plan(2)
    with pytest.raises(IndexError, match=r"step must be in \[0, 0\], got 1"):
        plans.plan(0, 1)
