"""Input of plans: what is refused, costs, labels, and sequences that are too long."""

import numpy as np
import pytest
import torch

from tests.packing.plan.plan_loops import EVERY, held_by
from trajpack import plan_micro_batches, plan_ranks


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"seqlens": [[1, 2]]}, ValueError, r"seqlens must be one row of lengths, got shape"),
        (
            {"seqlens": torch.tensor([0, 3, 5])},
            ValueError,
            "grows from 0 to 5, as boundaries do: pass batch.seqlens, not batch.cu_seqlens",
        ),
        ({"seqlens": [1.0]}, TypeError, r"seqlens must be integers, got float64"),
        ({"seqlens": [True]}, TypeError, r"seqlens must be integers, got bool"),
        ({"seqlens": [3, -1]}, ValueError, r"must be in \[0, 2147483647\], got -1 at 1"),
        ({"seqlens": [2**31]}, ValueError, r"got 2147483648 at 0"),
        ({"capacity": 0}, ValueError, r"capacity must be 1 or more, got 0"),
        ({"capacity": 8.0}, TypeError, r"capacity must be an integer, got 8.0"),
        ({"capacity": None}, TypeError, r"capacity must be an integer, got None"),
        ({"capacity": 7, "align": 8}, ValueError, r"capacity must be 8 or more, .*, got 7"),
        ({"align": 0}, ValueError, r"align must be 1 or more, got 0"),
        ({"max_sequences": 0}, ValueError, r"max_sequences must be 1 or more, got 0"),
        ({"min_bins": 0}, ValueError, r"min_bins must be 1 or more, got 0"),
        ({"multiple_of": True}, TypeError, r"multiple_of must be an integer, got True"),
        ({"algorithm": "ffd"}, ValueError, r"algorithm must be one of 'next_fit', .* got 'ffd'"),
        ({"oversized": "cut"}, ValueError, r"oversized must be one of 'raise', .* got 'cut'"),
        ({"cost": [1.0]}, ValueError, r"one number for each of 3 sequences, got shape \[1\]"),
        ({"cost": [1, 2, np.nan]}, ValueError, r"cost must be in \[0, .* got nan at 2"),
        ({"cost": [1, -2, 0]}, ValueError, r"got -2.0 at 1"),
        ({"cost": [1e300, 2, 0]}, ValueError, r"in \[0, 1e\+290\], got 1e\+300 at 0"),
        ({"cost": lambda lengths: 1.0}, ValueError, r"got shape \[\]"),
        ({"keep_together": [1, 2]}, ValueError, r"one label for each of 3 .* got shape \[2\]"),
        ({"sequences": [0, 3]}, ValueError, r"sequences must be integers from 0 to 2, got \[0 3\]"),
        ({"sequences": [True, False, True]}, ValueError, r"sequences must be integers"),
        ({"shapes": 3}, ValueError, r"capacity must be a multiple of .* 3 x 1, got 100"),
        ({"shapes": 0}, ValueError, r"shapes must be 1 or more, got 0"),
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
        ({"capacity": 4}, ValueError, r"sequence 2 has 5 tokens, more than the capacity of 4;"),
        ({"capacity": 7, "align": 4}, ValueError, r"more than the capacity of 4;"),
        ({"turn_ends": [[3], [4], [5]]}, ValueError, r"turn_ends are for .* oversized='raise' and"),
        ({"oversized": "truncate_at_turn"}, ValueError, r"needs them, .* turn_ends=None"),
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
    with pytest.raises(error, match=rf"^plan_ranks: .*{said}"):
        plan_ranks(num_ranks=2, **arguments)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("capacity", [2**31 - 1, 2**31, 10**12, 10**30, np.uint64(2**63)])
def test_a_capacity_beyond_any_batch_is_no_limit(name, capacity):
    plan = plan_micro_batches([2**30, 7, 2**30 - 8], capacity, algorithm=name)
    assert held_by(plan) == [[0, 1, 2]]
    assert (plan.capacity, plan.lower_bound) == (2**31 - 1, 1)
    assert len(plan_ranks([5, 6], 2, capacity, algorithm=name, align=4).plan(1)) == 1
    with pytest.raises(ValueError, match=r"2147483647 tokens|more than the capacity of 214748364"):
        plan_micro_batches([2**30, 2**30], capacity, keep_together=[0, 0], algorithm=name)


def test_costs_of_a_function_are_of_aligned_lengths():
    plan = plan_micro_batches([3, 8], 16, cost=lambda lengths: lengths**2, align=4)
    assert plan.costs.tolist() == [16.0, 64.0]
    assert plan.bin_costs.tolist() == [80.0]
    assert plan_micro_batches([3, 8], 16, align=4).bin_costs.tolist() == [12.0]


def test_labels_are_of_any_kind():
    lengths = [4, 4, 4, 4]
    for labels in (["a", "b", "a", "c"], [7, 1, 7, 2], torch.tensor([7, 1, 7, 2])):
        plan = plan_micro_batches(lengths, 8, keep_together=labels)
        assert held_by(plan) == [[0, 2], [1, 3]]


LONG = [5, 30, 8, 12]


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


def test_lengths_of_any_other_kind_may_begin_with_none():
    for lengths in ([0, 3, 5], torch.tensor([0, 5, 3]), torch.tensor([0]), torch.tensor([0, 0])):
        assert plan_micro_batches(lengths, capacity=16).seqlens.tolist() == list(map(int, lengths))


@pytest.mark.parametrize("oversized", ["raise", "drop", "own_bin"])
def test_sequences_that_are_not_planned_may_be_too_long(oversized):
    plan = plan_micro_batches([3, 99, 2], 8, sequences=[0, 2], oversized=oversized)
    assert sorted(plan.order.tolist()) == [0, 2]
    assert (plan.dropped, plan.oversized) == ((), ())
