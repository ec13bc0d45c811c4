"""Plans of context parallelism: laws, verl's own adapter, and the scheduler that verl calls."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.packing.plan.plan_loops import MIXES, dynamic_groups
from trajpack import Alignment, Trajectory, TransformerCost, Turn, pack
from trajpack.packing.plan.context_parallel import plan_context_parallel


def slots_of(plans):
    """Return the sequences of each rank, micro-batch after micro-batch."""
    return [[held.tolist() for held in ranks] for ranks in zip(*plans.plans, strict=True)]


def time_of(slots, lengths):
    """Return the time of ranks that wait for each other, in pairs of tokens."""
    pairs = np.asarray(lengths, float) ** 2
    return sum(max(pairs[held].sum() / slot.count(held) for held in slot) for slot in slots)


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 160), max_size=40),
    st.integers(0, 4).map(lambda power: 1 << power),
    st.sampled_from([1, 4]),
    st.sampled_from([None, TransformerCost(1.0, 0.0), TransformerCost(1.0, 1.0)]),
)
def test_laws_of_any_plan_of_context_parallelism(lengths, num_ranks, align, cost):
    capacity = 10 // align * align
    lengths = [min(length, capacity * num_ranks) for length in lengths]
    plans = plan_context_parallel(lengths, num_ranks, 10, cost=cost, align=align)
    taken = -(-np.array(lengths, np.int64) // align) * align
    widths = plans.plan(0).cp_sizes.tolist()
    placed = []
    for width, slot in zip(widths, slots_of(plans), strict=True):
        assert num_ranks % width == 0
        for first in range(0, num_ranks, width):
            held = slot[first]
            assert held, "no rank is without sequences"
            assert slot[first : first + width] == [held] * width
            assert taken[held].sum() <= width * capacity
            placed += held
    assert sorted(placed) == list(range(len(lengths)))
    shown = plans.statistics()
    assert shown.num_tokens == sum(lengths)
    assert shown.num_sequences == len(lengths)
    assert all((plan.loads <= capacity).all() for plan in plans.plans)
    assert len(plans.plans) * len(widths) >= shown.lower_bound


def test_beside_the_scheduler_that_verl_calls():
    """100 drawn batches; the cost is Megatron-Core's: the square of the length."""
    rng, found = np.random.default_rng(0), []
    for number in range(100):
        draw, num_ranks = list(MIXES.values())[number % 5], 1 << int(rng.integers(1, 6))
        lengths, longest = draw(rng, int(rng.integers(num_ranks, num_ranks * 24)))
        capacity = -(-longest // num_ranks) * int(rng.integers(1, 3))
        theirs = dynamic_groups(lengths.tolist(), num_ranks, capacity)
        plans = plan_context_parallel(lengths, num_ranks, capacity, cost=np.square)
        ours = slots_of(plans)
        assert len(ours) <= len(theirs)
        found.append([time_of(slots, lengths) for slots in (ours, theirs)])
    ours, theirs = np.array(found).T
    assert (ours > theirs * 1.0001).sum() <= 15
    assert (ours / theirs).mean() < 0.95


def test_verls_adapter_takes_the_plan(verl, monkeypatch):
    """Its checks: every rank has sequences, and groups are aligned neighbours."""
    tensordict = pytest.importorskip("tensordict")
    module = verl.load("verl.utils.dynamic_cp_scheduler")
    lengths = [40, 9, 8, 7, 10, 6, 10, 9, 3, 20]
    plans = plan_context_parallel(lengths, 4, 16, cost=np.square)

    class Ours:
        def __init__(self, **_):
            pass

        def get_groups_and_subsamples(self, pairs):
            assert pairs == list(enumerate(lengths))
            return slots_of(plans)

    monkeypatch.setattr(module, "get_megatron_dynamic_cp_scheduler_cls", lambda: Ours)
    ids = torch.nested.nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)
    batch = tensordict.TensorDict({"input_ids": ids}, batch_size=len(lengths))
    scheduler = module.DynamicCPScheduler(16, dp_size=2, cp_size=2)
    for rank, plan in enumerate(plans.plans):
        group = SimpleNamespace(size=lambda: 4, rank=lambda rank=rank: rank)
        found = scheduler.schedule(batch, group, tp_size=1)
        assert [one["local_cp_size"] for one in found] == plan.cp_sizes.tolist()
        assert [one[module.DCP_SAMPLE_IDS] for one in found] == [held.tolist() for held in plan]


def test_shares_of_all_ranks_are_the_batch():
    turns = [Turn([1] * size, [2, 3], [-0.5, -0.5]) for size in (70, 6, 30, 9, 14, 3)]
    batch = pack([Trajectory(str(at), [turn]) for at, turn in enumerate(turns)])
    plans = plan_context_parallel(batch.seqlens, 4, 24, align=8)
    tokens = 0
    for rank, plan in enumerate(plans.plans):
        for width, micro_batch in zip(
            plan.cp_sizes.tolist(), batch.split(plan, Alignment(sequence_multiple=8)), strict=True
        ):
            share = micro_batch.shard(width, rank % width)
            assert len(share["input_ids"]) <= 24
            tokens += int(share["loss_mask"].sum())
    assert tokens == int(batch.loss_mask.sum())


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"num_ranks": 6}, ValueError, "num_ranks must be a power of two, got 6"),
        ({"num_ranks": 0}, ValueError, "num_ranks must be 1 or more, got 0"),
        ({"capacity": 7}, ValueError, "capacity must be 8 or more, got 7"),
        ({"align": 0}, ValueError, "align must be 1 or more, got 0"),
        ({"seqlens": [65]}, ValueError, "sequence 0 has 65 tokens, more than the capacity of 64"),
    ],
)
def test_what_cannot_be_planned_is_named(asked, error, said):
    arguments = {"seqlens": [3, 9], "num_ranks": 4, "capacity": 20, "align": 8} | asked
    with pytest.raises(error, match=f"^plan_context_parallel: {said}"):
        plan_context_parallel(**arguments)
