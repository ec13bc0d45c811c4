"""Plans of ranks: equal numbers of micro-batches, labels kept, and even loads."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.packing.plan.plan_loops import EVERY, MIXES, held_by
from trajpack import TransformerCost, plan_micro_batches, plan_ranks
from trajpack.packing.plan.types import RankPlan


def placed(plans):
    """Return (rank, micro-batch) of each sequence."""
    return {
        int(sequence): (rank, number)
        for rank, plan in enumerate(plans.plans)
        for number, held in enumerate(plan)
        for sequence in held
    }


def check_laws(plans, lengths, num_ranks, capacity, **asked):
    align, places = asked.get("align", 1), placed(plans)
    assert sorted(places) == sorted(asked.get("sequences", range(len(lengths))))
    assert len(plans.plans) == num_ranks
    assert len({len(plan) for plan in plans.plans}) == 1, "as many micro-batches on every rank"
    assert len(plans.plan(0)) % asked.get("multiple_of", 1) == 0
    assert len(plans.plan(0)) >= asked.get("min_bins", 1)
    for plan in plans.plans:
        assert plan.loads.max(initial=0) <= capacity
        assert plan.align == align
        assert plan.seqlens.tolist() == list(lengths)
        can_split = "keep_together" not in asked and max(map(len, plan)) > 1
        assert not can_split or min(map(len, plan)) > 0
    kept = {}
    for sequence, label in enumerate(asked.get("keep_together", ())):
        kept.setdefault(label, set()).update({places[sequence]} if sequence in places else ())
    assert all(len(each) <= 1 for each in kept.values())


@settings(max_examples=80)
@given(
    st.lists(st.tuples(*[st.integers(0, 9)] * 2), min_size=4, max_size=30),
    st.sampled_from(EVERY),
    st.integers(1, 4),
    st.fixed_dictionaries(
        {
            "align": st.integers(1, 3),
            "multiple_of": st.integers(1, 3),
            "min_bins": st.integers(1, 3),
        },
        optional={"sequences": st.sets(st.integers(0, 3)).map(list)},
    ),
    st.booleans(),
)
def test_laws_of_any_plan_of_ranks(rows, name, num_ranks, asked, keeps):
    lengths, labels = ([*column] for column in zip(*rows, strict=True))
    asked, capacity = (asked | {"keep_together": labels}, 400) if keeps else (asked, 12)
    plans = plan_ranks(lengths, num_ranks, capacity, algorithm=name, **asked)
    check_laws(plans, lengths, num_ranks, capacity, **asked)


def test_optimizer_steps_share_out_a_batch():
    lengths = np.random.default_rng(5).integers(1, 60, 64)
    steps = np.array_split(np.random.default_rng(6).permutation(64), 4)
    plans = [plan_ranks(lengths, 2, 100, sequences=step) for step in steps]
    for step, plan in zip(steps, plans, strict=True):
        check_laws(plan, lengths, 2, 100, sequences=step)


@pytest.mark.parametrize("cost", [None, TransformerCost(2e9, 2e5)], ids=["tokens", "model"])
@pytest.mark.parametrize("mix", MIXES)
def test_ranks_cost_about_the_same_and_no_room_is_wasted(mix, cost):
    lengths, capacity = MIXES[mix](np.random.default_rng(3), 2048)
    plans = plan_ranks(lengths, 8, capacity, cost=cost)
    shown = plans.statistics()
    assert shown.num_micro_batches <= -(-shown.lower_bound // 8) * 8
    assert shown.num_dummies == 0
    costs = np.array([plan.bin_costs for plan in plans.plans])
    assert shown.rank_cost_imbalance < 1.07
    assert costs.max(axis=0).sum() * 8 / costs.sum() < 1.09, "if ranks wait for each other"


@pytest.mark.parametrize("name", EVERY)
def test_the_nth_micro_batches_of_all_ranks_are_alike(name):
    lengths, capacity = MIXES["chat"](np.random.default_rng(4), 2048)
    plans = plan_ranks(lengths, 4, capacity, algorithm=name)
    loads = np.array([plan.loads for plan in plans.plans])
    assert (np.diff(loads, axis=1) <= 0).all(), "largest first"
    if name == "next_fit":  # micro-batches are dealt out in rounds
        ranked = np.sort(loads.ravel())[::-1].reshape(-1, 4)
        assert (np.sort(loads.T, axis=1)[:, ::-1] == ranked).all()
    waiting = (loads.max(axis=0) - loads).sum() / loads.sum()
    assert waiting < 0.02


def test_ranks_with_little_have_dummies_and_they_come_last():
    plans = plan_ranks([4, 4, 4], 2, 4)
    assert [held_by(plans.plan(rank)) for rank in range(2)] == [[[0], [2]], [[1], []]]
    kept = plan_ranks([2, 2, 2], 2, 6, keep_together=[0, 0, 0])
    assert [held_by(kept.plan(rank)) for rank in range(2)] == [[[0, 1, 2]], [[]]]
    none = plan_ranks([], 3, 4)
    assert [held_by(none.plan(rank)) for rank in range(3)] == [[[]]] * 3


def test_what_is_too_long_is_told_to_the_rank_that_has_it():
    turn_ends = [[3], [3, 9], [2], [9]]
    cut = {"oversized": "truncate_at_turn", "turn_ends": turn_ends}
    plans = plan_ranks([3, 9, 2, 9], 2, 4, **cut)
    assert {plan.dropped for plan in plans.plans} == {(3,)}
    assert [dict(plan.truncated) for plan in plans.plans].count({1: 3}) == 1
    assert {one for plan in plans.plans for one in plan.truncated} == {1}
    alone = plan_ranks([3, 9, 2, 9], 2, 4, oversized="own_bin")
    assert sorted(plan.oversized for plan in alone.plans) == [(1,), (3,)]
    assert alone.statistics().num_oversized == 2


def test_one_rank_holds_what_a_plan_of_micro_batches_holds():
    lengths, capacity = MIXES["code"](np.random.default_rng(6), 300)
    for name in EVERY:
        alone = plan_micro_batches(lengths, capacity, algorithm=name)
        ranked = plan_ranks(lengths, 1, capacity, algorithm=name)
        assert sorted(held_by(ranked.plan(0))) == sorted(held_by(alone))


def test_a_plan_of_ranks_says_what_it_is():
    plans = plan_ranks([8, 7, 2, 3, 5, 6], 2, 10)
    assert isinstance(plans, RankPlan)
    assert repr(plans) == "RankPlan(2 ranks of 2 micro-batches each, fill 0.7750)"


def test_plans_go_to_other_processes_with_the_lengths_once():
    cut = plan_ranks([5, 30, 8], 2, 10, oversized="truncate_at_turn", turn_ends=[[], [7], []])
    assert pickle.loads(pickle.dumps(cut)).plan(1).truncated == {1: 7}
    plans = plan_ranks(np.arange(1, 4001), 64, 8000)
    sent = pickle.dumps(plans)
    assert len(sent) < 4 * plans.plan(0).seqlens.nbytes + 64 * 2000
    again = pickle.loads(sent)
    assert repr(again) == repr(plans)
    assert again.plan(63).order.tolist() == plans.plan(63).order.tolist()


def test_there_is_no_rank_beyond():
    with pytest.raises(IndexError, match=r"rank must be in \[0, 1\], got 2"):
        plan_ranks([3, 4, 5], 2, 100).plan(2)
    with pytest.raises(ValueError, match=r"plan_ranks: num_ranks must be 1 or more, got 0"):
        plan_ranks([3, 4, 5], 0, 100)
