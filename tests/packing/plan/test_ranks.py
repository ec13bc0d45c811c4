"""Plans of ranks: equal numbers of micro-batches, labels kept, and even loads."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.packing.plan.plan_loops import EVERY, MIXES, held_by
from trajpack import TransformerCost, plan_micro_batches, plan_ranks
from trajpack.packing.plan.ranks import RankPlan, deal


def placed(plans):
    """Return (step, rank, micro-batch) of each sequence."""
    return {
        int(sequence): (step, rank, number)
        for step, row in enumerate(plans.plans)
        for rank, plan in enumerate(row)
        for number, held in enumerate(plan)
        for sequence in held
    }


def check_laws(plans, lengths, num_ranks, capacity, **asked):
    align = asked.get("align", 1)
    places = placed(plans)
    assert sorted(places) == list(range(len(lengths)))
    assert (plans.num_ranks, plans.num_steps) == (num_ranks, asked.get("num_steps", 1))
    for row in plans.plans:
        assert len({len(plan) for plan in row}) == 1, "as many micro-batches on every rank"
        assert len(row[0]) % asked.get("multiple_of", 1) == 0
        assert len(row[0]) >= asked.get("min_bins", 1)
        for plan in row:
            assert plan.loads.max(initial=0) <= capacity
            assert plan.align == align
            assert plan.seqlens.tolist() == list(lengths)
            can_split = "keep_together" not in asked and max(map(len, plan)) > 1
            assert not can_split or min(map(len, plan)) > 0
            most = asked.get("max_sequences")
            assert most is None or max(map(len, plan)) <= most
    for name, width in (("keep_in_step", 1), ("keep_together", 3)):
        kept = {}
        for sequence, label in enumerate(asked.get(name) or ()):
            kept.setdefault(label, set()).add(places[sequence][:width])
        assert all(len(each) == 1 for each in kept.values()), name


@settings(max_examples=80)
@given(
    st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=4, max_size=30),
    st.sampled_from(EVERY),
    st.integers(1, 4),
    st.fixed_dictionaries(
        {
            "align": st.integers(1, 3),
            "multiple_of": st.integers(1, 3),
            "min_bins": st.integers(1, 3),
        }
    ),
    st.sets(st.sampled_from(["keep_in_step", "keep_together", "num_steps"])),
)
def test_laws_of_any_plan_of_ranks(rows, name, num_ranks, asked, more):
    lengths, *labels = ([*column] for column in zip(*rows, strict=True))
    for label, row in zip(("keep_in_step", "keep_together"), labels, strict=True):
        if label in more:
            asked = asked | {label: row}
    if "num_steps" in more and not more & {"keep_in_step", "keep_together"}:
        asked = asked | {"num_steps": 3}
    capacity = 12 if "keep_together" not in more else 400
    plans = plan_ranks(lengths, num_ranks, capacity, algorithm=name, **asked)
    check_laws(plans, lengths, num_ranks, capacity, **asked)


def test_steps_take_blocks_in_the_order_of_the_batch():
    labels = [0, 0, 1, 1, 2, 2, 3, 0]
    plans = plan_ranks([4] * 8, 2, 8, num_steps=2, keep_in_step=labels)
    steps = [sorted(one for plan in row for one in plan.order.tolist()) for row in plans.plans]
    assert steps == [[0, 1, 2, 3, 7], [4, 5, 6]]
    alone = plan_ranks([4] * 8, 2, 8, num_steps=4)
    steps = [sorted(one for plan in row for one in plan.order.tolist()) for row in alone.plans]
    assert steps == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_labels_that_share_a_sequence_stay_together():
    """Sequences 0 and 1 share a micro-batch, 1 and 2 a step: then all three share the step."""
    plans = plan_ranks(
        [4] * 6,
        2,
        8,
        num_steps=2,
        keep_together=[0, 0, 1, 2, 3, 4],
        keep_in_step=[0, 1, 1, 2, 3, 4],
    )
    places = placed(plans)
    assert places[0] == places[1]
    assert places[1][0] == places[2][0]


@pytest.mark.parametrize("cost", [None, TransformerCost(2e9, 2e5)], ids=["tokens", "model"])
@pytest.mark.parametrize("mix", MIXES)
def test_ranks_cost_about_the_same_and_no_room_is_wasted(mix, cost):
    lengths, capacity = MIXES[mix](np.random.default_rng(3), 2048)
    for name in ("best_fit_decreasing", "karmarkar_karp"):
        plans = plan_ranks(lengths, 8, capacity, algorithm=name, cost=cost)
        shown = plans.statistics()
        fewest = -(-shown.lower_bound // 8) * 8
        assert shown.num_micro_batches <= 1.05 * fewest + 8
        few = shown.num_micro_batches == shown.lower_bound
        assert shown.rank_cost_imbalance < (1.07 if few else 1.01)
        assert shown.num_dummies == 0


@pytest.mark.parametrize("name", EVERY)
def test_the_nth_micro_batches_of_all_ranks_are_alike(name):
    lengths, capacity = MIXES["chat"](np.random.default_rng(4), 2048)
    plans = plan_ranks(lengths, 4, capacity, algorithm=name)
    loads = np.array([plan.loads for plan in plans.plans[0]])
    assert (np.diff(loads, axis=1) <= 0).all(), "largest first"
    if name == "next_fit":  # micro-batches are dealt out in rounds
        ranked = np.sort(loads.ravel())[::-1].reshape(-1, 4)
        assert (np.sort(loads.T, axis=1)[:, ::-1] == ranked).all()
    waiting = (loads.max(axis=0) - loads).sum() / loads.sum()
    assert waiting < 0.02


@settings(max_examples=80)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_ranks_swap_until_the_most_costly_gains_nothing(num_ranks, rounds, seed):
    costs = np.random.default_rng(seed).integers(0, 1000, num_ranks * rounds) ** 2
    rank_of = deal(costs, np.zeros_like(costs), num_ranks)
    assert np.bincount(rank_of, minlength=num_ranks).tolist() == [rounds] * num_ranks
    order = np.argsort(-costs, kind="stable").reshape(rounds, num_ranks)
    assert (np.sort(rank_of[order], axis=1) == np.arange(num_ranks)).all(), "one of each round"
    held = np.sort(costs[np.argsort(rank_of, kind="stable")].reshape(num_ranks, rounds))[:, ::-1]
    loads = held.sum(axis=1)
    most = int(loads.argmax())
    for other in range(num_ranks):
        for less in held[most] - held[other]:
            assert less <= 0 or max(loads[most] - less, loads[other] + less) >= loads[most]


def test_ranks_with_little_have_dummies_and_they_come_last():
    plans = plan_ranks([4, 4, 4], 2, 4)
    assert [held_by(plans.plan(rank)) for rank in range(2)] == [[[2], [0]], [[1], []]]
    kept = plan_ranks([2, 2, 2], 2, 6, keep_together=[0, 0, 0])
    assert [held_by(kept.plan(rank)) for rank in range(2)] == [[[0, 1, 2]], [[]]]
    none = plan_ranks([], 3, 4)
    assert [held_by(none.plan(rank)) for rank in range(3)] == [[[]]] * 3


def test_what_is_too_long_is_told_to_the_rank_that_has_it():
    turn_ends = [[3], [3, 9], [2], [9]]
    cut = {"oversized": "truncate_at_turn", "turn_ends": turn_ends}
    plans = plan_ranks([3, 9, 2, 9], 2, 4, **cut)
    assert plans.dropped == (3,)
    assert sum(len(plan.dropped) for plan in plans.plans[0]) == 0
    assert [dict(plan.truncated) for plan in plans.plans[0]].count({1: 3}) == 1
    assert {one for plan in plans.plans[0] for one in plan.truncated} == {1}
    alone = plan_ranks([3, 9, 2, 9], 2, 4, oversized="own_bin")
    assert sorted(plan.oversized for plan in alone.plans[0]) == [(1,), (3,)]
    shown = alone.statistics()
    assert (shown.num_oversized, shown.num_tokens_over) == (2, 10)


def test_one_rank_holds_what_a_plan_of_micro_batches_holds():
    lengths, capacity = MIXES["code"](np.random.default_rng(6), 300)
    for name in EVERY:
        alone = plan_micro_batches(lengths, capacity, algorithm=name)
        ranked = plan_ranks(lengths, 1, capacity, algorithm=name)
        assert sorted(held_by(ranked.plan(0))) == sorted(held_by(alone))


def test_a_plan_of_ranks_says_what_it_is():
    plans = plan_ranks([8, 7, 2, 3, 5, 6], 2, 10, num_steps=2)
    assert isinstance(plans, RankPlan)
    assert repr(plans) == "RankPlan(2 ranks, 2 steps of 1, 1 micro-batches each, fill 0.7750)"


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"num_ranks": 0}, ValueError, r"num_ranks must be 1 or more, got 0"),
        ({"num_steps": 4}, ValueError, r"num_steps must be 3 or fewer, .* sequences, got 4"),
        (
            {"num_steps": 3, "keep_in_step": [1, 2, 1]},
            ValueError,
            r"num_steps must be 2 or fewer, as many as there are blocks kept in a step, got 3",
        ),
        ({"keep_in_step": [1]}, ValueError, r"keep_in_step must have one label .* 3 .* got 1"),
    ],
)
def test_what_ranks_cannot_plan_is_named(asked, error, said):
    with pytest.raises(error, match=rf"^plan_ranks: {said}"):
        plan_ranks(**{"seqlens": [3, 4, 5], "capacity": 100, "num_ranks": 2} | asked)


def test_plans_go_to_other_processes_with_the_lengths_once():
    cut = plan_ranks([5, 30, 8], 2, 10, oversized="truncate_at_turn", turn_ends=[[], [7], []])
    assert pickle.loads(pickle.dumps(cut)).plan(0).truncated == {1: 7}
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
