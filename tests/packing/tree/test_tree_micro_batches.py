"""Micro-batches of trees are trees of their chains; plans of them are as good as the best."""

import itertools
import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from tests.kernels.test_launches import VIEWS, RecordedOps
from tests.packing.isolation.tiny_models import tiny_model
from tests.packing.tree import tree_oracle as oracle
from tests.packing.tree.test_tree import ROUTES, VALUES, assert_trees_equal, with_fields
from tests.packing.tree.test_tree_models import (
    branching,
    by_tree,
    clipped,
    distance,
    exact,
)
from tests.ptx.executor import on_executor
from trajpack import (
    GRPO,
    Alignment,
    Trajectory,
    Turn,
    TurnReturns,
    pack,
    pack_tree,
    plan_micro_batches,
)
from trajpack.testing import assert_same_bits, trajectory_lists

PADDED = Alignment(total_multiple=8, token_id=5)
BOUNDARIES = st.sampled_from(["shared", "duplicate"])
NODES = ("input_ids", "position_ids", "tree_end", "tree_parent")


def chains_of(trajectories):
    """Return the sequences of layout "merged", and their places in the order of their tokens."""
    batch = pack(trajectories)
    rows = [tuple(row.tolist()) for row in batch.input_ids.split(batch.seqlens)]
    return rows, sorted(range(len(rows)), key=rows.__getitem__)


def num_nodes(rows):
    return len({row[:end] for row in rows for end in range(1, len(row) + 1)})


def partitions(rows, capacity):
    """Return the nodes of the micro-batches of every way to cut sorted rows that fits."""
    found = []
    for count in range(len(rows)):
        for cuts in itertools.combinations(range(1, len(rows)), count):
            bounds = [0, *cuts, len(rows)]
            parts = [num_nodes(rows[begin:end]) for begin, end in itertools.pairwise(bounds)]
            if max(parts) <= capacity:
                found.append(parts)
    return found


@st.composite
def planned(draw, max_chains=8):
    """Draw trajectories of a few chains, and a capacity that none of them passes."""
    trajectories = draw(trajectory_lists(3).filter(bool))
    rows, _ = chains_of(trajectories)
    assume(len(rows) <= max_chains)
    return trajectories, max(map(len, rows)) + draw(st.integers(0, 12))


@given(planned())
@settings(max_examples=40)
def test_no_plan_needs_less(drawn):
    trajectories, capacity = drawn
    plan = pack_tree(trajectories).plan_micro_batches(capacity)
    rows, order = chains_of(trajectories)
    assert sorted(map(rows.__getitem__, plan.order)) == [rows[chain] for chain in plan.order]
    assert np.concatenate([*plan]).tolist() == plan.order.tolist()
    assert sorted(plan.order.tolist()) == sorted(order)
    assert plan.loads.tolist() == [num_nodes([rows[chain] for chain in one]) for one in plan]
    assert max(plan.loads) <= capacity
    ways = partitions([rows[chain] for chain in order], capacity)
    assert (len(plan), plan.num_nodes) == min((len(way), sum(way)) for way in ways)


def test_a_plan_says_what_it_is_and_takes_any_capacity():
    rows = [[0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 2], [2]]
    batch = pack_tree([Trajectory("a", [Turn(row, [], [])]) for row in rows])
    few = batch.plan_micro_batches(6)
    assert (few.loads.tolist(), few.num_nodes, batch.num_nodes) == ([6, 6], 12, 8)
    assert repr(few) == "ChainPlan(2 micro-batches of up to 6 nodes, 4 of 4 chains, 12 nodes)"
    for capacity in (10**12, 10**30):  # beyond any batch: no limit
        assert len(batch.plan_micro_batches(capacity)) == len(batch.plan_ranks(1, capacity)[0]) == 1


@pytest.mark.parametrize("alignment", [Alignment(), PADDED], ids=["plain", "padded"])
@given(drawn=planned(), boundary=BOUNDARIES)
def test_nodes_are_those_of_a_tree_of_the_chains(alignment, drawn, boundary):
    trajectories, capacity = drawn
    batch = pack_tree(trajectories, boundary=boundary)
    plan = batch.plan_micro_batches(capacity)
    rows, _ = chains_of(trajectories)
    found = [*batch.micro_batches(plan, alignment)]
    assert len(found) == len(plan)
    for one, chains in zip(found, plan, strict=True):
        turns = [Turn(rows[chain], [], []) for chain in chains]
        alone = pack_tree([Trajectory("", [turn]) for turn in turns], boundary=boundary)
        nodes = alone.num_nodes
        assert one.chains.trie.order.tolist() == chains.tolist()
        for name in NODES:
            assert_same_bits(getattr(one, name)[:nodes], getattr(alone, name), name)
        padding = one.num_nodes - nodes
        assert (one.num_padding, one.num_nodes % alignment.total_multiple) == (padding, 0)
        assert padding < alignment.total_multiple
        assert one.input_ids[nodes:].tolist() == [alignment.token_id] * padding
        assert one.tree_end[nodes:].tolist() == [*range(nodes + 1, one.num_nodes + 1)]
        assert one.tree_parent[nodes:].tolist() == [-1] * padding
        assert one.position_ids[nodes:].tolist() == [0] * padding
        assert one.seqlens == (*alone.seqlens, *([padding] if padding else []))
        assert one.cu_seqlens.tolist() == np.cumsum([0, *one.seqlens]).tolist()
        assert one.cu_seqlens.dtype == torch.int32
        ancestors = torch.eye(one.num_nodes, dtype=torch.bool)
        ancestors[:nodes, :nodes] = oracle.mask_of(alone)
        assert torch.equal(one.attention_mask()[0, 0], ancestors)
        assert one.boundary == boundary
        if boundary == "duplicate":
            labels = one.labels()
            assert torch.equal(labels[one.entry_parent], one.entries.input_ids)
            assert set((labels >= 0).nonzero()[:, 0].tolist()) == set(one.entry_parent.tolist())


@given(planned(), st.booleans(), BOUNDARIES)
def test_each_entry_is_in_one_micro_batch_on_the_node_of_its_prefix(drawn, padded, boundary):
    trajectories, capacity = drawn
    batch = pack_tree(trajectories, boundary=boundary).with_advantages(TurnReturns())
    weights = torch.arange(batch.num_entries * 2).view(-1, 2)
    plan, paths = batch.plan_micro_batches(capacity), oracle.entries(trajectories)
    bounds = batch.entries.cu_generated.tolist()
    seen = []
    alignment = PADDED if padded else Alignment()
    for one in batch.micro_batches(plan, alignment, tensors={"weights": weights}):
        turns = one.turns
        assert [*turns] == sorted(turns)
        own = [entry for turn in turns for entry in range(*bounds[turn : turn + 2])]
        seen += own
        of_nodes = oracle.paths_of(one)
        assert [of_nodes[node] for node in one.entry_node] == [paths[entry] for entry in own]
        assert [of_nodes[node] for node in one.entry_parent] == [paths[e][:-1] for e in own]
        assert one.entries.input_ids.tolist() == [paths[entry][-1] for entry in own]
        trained = one.loss_mask.nonzero()[:, 0].tolist()
        assert trained == sorted(set(one.entry_node.tolist()))
        assert one.num_trained == len(trained)
        for name in ("rollout_logprobs", "policy_versions", "returns", "advantages"):
            assert_same_bits(getattr(one, name), getattr(batch, name)[own], name)
        assert torch.equal(one.entries.turn_ids, batch.entries.turn_ids[own])
        assert one.entries.fields.keys() == {"weights"}
        assert torch.equal(one.entries.fields["weights"], weights[own])
        assert one.entries.num_generated == one.num_entries == len(own)
    assert sorted(seen) == [*range(batch.num_entries)]


@given(trajectory_lists(3).filter(bool), st.randoms(use_true_random=False))
@settings(max_examples=15)
def test_fields_come_along(trajectories, random):
    given_fields, fields = with_fields(trajectories, random), [VALUES, ROUTES]
    rows, batch = pack(given_fields, fields=fields), pack_tree(given_fields, fields=fields)
    tokens = [
        *zip(rows.input_ids.tolist(), map(tuple, rows.fields["routes"].tolist()), strict=True)
    ]
    starts, bounds = rows.cu_seqlens.tolist(), batch.entries.cu_generated.tolist()
    for one in batch.micro_batches(batch.plan_micro_batches(max(rows.seqlens) + 2), PADDED):
        real, found = one.num_nodes - one.num_padding, []
        routes = one.fields["routes"].tolist()
        for node in range(real):
            parent = int(one.tree_parent[node])
            above = found[parent] if parent >= 0 else ()
            found.append((*above, (int(one.input_ids[node]), tuple(routes[node]))))
        paths = [tokens[starts[chain] : starts[chain + 1]] for chain in one.chains.trie.order]
        expected = {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}
        assert (len(found), set(found)) == (len(expected), expected)
        assert routes[real:] == [[0, 0]] * one.num_padding
        own = [e for turn in one.turns for e in range(*bounds[turn : turn + 2])]
        assert_same_bits(one.entries.fields["values"], batch.entries.fields["values"][own])


@given(planned(), st.integers(0, 2))
def test_merging_is_the_inverse_and_brings_gradients_back(drawn, width):
    trajectories, capacity = drawn
    batch = pack_tree(trajectories)
    plan = batch.plan_micro_batches(capacity)
    values = torch.randn(batch.num_entries, *[3] * width, dtype=torch.float64)
    parts = [
        one.entries.fields["values"].requires_grad_()
        for one in batch.micro_batches(plan, PADDED, tensors={"values": values})
    ]
    merged = batch.merge(plan, parts)
    assert_same_bits(merged, values)
    found = torch.autograd.grad((merged * values).sum(), parts)
    for gradient, part in zip(found, parts, strict=True):
        assert torch.equal(gradient, part)


@given(planned(), st.integers(1, 4))
def test_ranks_have_as_many_micro_batches_and_all_entries(drawn, num_ranks):
    trajectories, capacity = drawn
    batch = pack_tree(trajectories)
    plans = batch.plan_ranks(num_ranks, capacity)
    needed = len(batch.plan_micro_batches(capacity))
    assert {len(plan) for plan in plans} == {-(-needed // num_ranks)}
    chains = [chain for plan in plans for one in plan for chain in one]
    assert sorted(chains) == [*range(len(chains_of(trajectories)[0]))]
    loads = np.stack([plan.loads for plan in plans])
    assert loads.max() <= capacity
    assert (loads.min(0)[:-1] >= loads.max(0)[1:]).all()  # rounds of similar size
    rows, order = chains_of(trajectories)  # the largest is as small as any cuts allow
    ways = partitions([rows[chain] for chain in order], capacity)
    assert loads.max() == min(max(way) for way in ways if len(way) <= loads.size)
    outputs = [[one.rollout_logprobs for one in batch.micro_batches(plan)] for plan in plans]
    merged = [batch.merge(*pair, fill=1.0) for pair in zip(plans, outputs, strict=True)]
    assert_same_bits(torch.stack(merged).min(0).values, batch.rollout_logprobs)


def test_a_dummy_is_padding_without_entries():
    batch = pack_tree([Trajectory("a", [Turn([1, 2], [3], [-0.5])])])
    _, second = batch.plan_ranks(2, 8)
    (dummy,) = batch.micro_batches(second, Alignment(total=4), tensors={"x": torch.ones(1)})
    assert dummy.is_dummy
    assert (dummy.num_nodes, dummy.num_padding, dummy.num_entries) == (4, 4, 0)
    assert (dummy.seqlens, len(dummy), dummy.num_trained) == ((4,), 0, 0)
    assert dummy.tree_end.tolist() == [1, 2, 3, 4]
    assert dummy.loss_mask.tolist() == [False] * 4
    assert batch.merge(second, [dummy.rollout_logprobs], fill=2.0).tolist() == [2.0]
    logits = torch.randn(4, 9, requires_grad=True)
    dummy.logprobs(logits).sum().backward()  # ranks in step need gradients of every rank
    assert torch.equal(logits.grad, torch.zeros(4, 9))
    assert repr(dummy) == (
        "TreeMicroBatch(0 chains, 0 turns in 0 trees; 4 nodes, 4 of padding, 0 entries; cpu)"
    )


def test_an_empty_batch_has_one_dummy():
    batch = pack_tree([])
    plan = batch.plan_micro_batches(8)
    (dummy,) = batch.micro_batches(plan)
    assert (dummy.is_dummy, dummy.num_nodes, dummy.num_entries) == (True, 1, 0)
    assert batch.merge(plan, [dummy.rollout_logprobs]).shape == (0,)
    assert [len(plan) for plan in batch.plan_ranks(2, 8)] == [1, 1]


def test_shapes_are_fixed_for_graphs():
    trajectories = [Trajectory(str(n), [Turn([n], [2], [-0.5])]) for n in range(5)]
    batch = pack_tree(trajectories)
    alignment = Alignment(total=8, max_sequences=4)
    found = [*batch.micro_batches(batch.plan_micro_batches(8), alignment)]
    assert sorted(one.seqlens for one in found) == [(2, 2, 2, 2), (2, 6)]
    assert {one.cu_seqlens.shape for one in found} == {(6,)}
    assert {one.num_nodes for one in found} == {8}
    with pytest.raises(ValueError, match=r"micro-batch 0: .* at most max_sequences=1 sequences"):
        batch.micro_batches(batch.plan_micro_batches(8), Alignment(max_sequences=1))


@pytest.mark.parametrize("attention", ["trajpack_tree, path", "sdpa"])
def test_losses_and_gradients_add_up_to_those_of_the_batch(attention):
    model = exact(tiny_model("qwen3"))
    batch = pack_tree(branching()).with_advantages(GRPO())
    weights = batch.loss_weights("sequence_mean_token_mean").double()

    def loss_of(trees, weights):
        logprobs = by_tree(model, trees, attention)
        return (clipped((logprobs - trees.rollout_logprobs).exp(), trees) * weights).sum(), logprobs

    whole, logprobs = loss_of(batch, weights)
    whole.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    plans = batch.plan_ranks(2, 40)
    assert sum(plan.num_nodes for plan in plans) > batch.num_nodes
    total, merged = torch.zeros((), dtype=torch.float64), []
    for plan in plans:
        outputs = []
        for one in batch.micro_batches(
            plan, Alignment(total_multiple=16), tensors={"weights": weights}
        ):
            part, of_part = loss_of(one, one.entries.fields["weights"])
            part.backward()
            total += part.detach()
            outputs.append(of_part.detach())
        merged.append(batch.merge(plan, outputs))
    assert distance(torch.stack(merged).sum(0), logprobs) <= 1e-10
    assert distance(total, whole) <= 1e-10
    for got, want in zip(model.parameters(), expected, strict=True):
        assert distance(got.grad, want) <= 1e-10


def members(count, prompt=24, device=None):
    turns = [Turn(range(prompt), [n, 1, 2], [-0.5] * 3) for n in range(count)]
    return pack_tree([Trajectory(str(n), [turn]) for n, turn in enumerate(turns)], device=device)


@pytest.mark.parametrize("alignment", [Alignment(), PADDED], ids=["plain", "padded"])
def test_a_plan_is_one_copy_and_two_launches_for_each_micro_batch(alignment):
    batch, host = members(10, device="meta"), members(10)
    plan = batch.plan_micro_batches(36)
    assert len(plan) > 2
    weights = torch.empty(batch.num_entries, device="meta")
    with RecordedOps("meta") as recorded:
        found = [*batch.micro_batches(plan, alignment, tensors={"weights": weights})]
    counts = {op: n for op, n in recorded.counts.items() if op not in VIEWS}
    assert counts.pop("aten._to_copy.default") == 2  # tables; depths as int32
    assert counts.pop("trajpack.select_tokens.default") == 2 * len(plan)
    counts.pop("aten.split_with_sizes.default", None)
    counts.pop("aten.select.int", None)
    padded = sum(one.num_padding > 0 for one in found)
    assert sum(counts.values()) == 2 + 8 * len(plan) + padded, counts
    for one, same in zip(found, host.micro_batches(plan, alignment), strict=True):
        for name in ("input_ids", "position_ids", "tree_end", "tree_parent", "loss_mask"):
            other, tensor = getattr(one, name), getattr(same, name)
            assert (other.shape, other.dtype, other.is_meta) == (tensor.shape, tensor.dtype, True)
        assert one.entry_node.shape == same.entry_node.shape
        assert one.num_trained == same.num_trained


@given(planned())
@settings(max_examples=3)
def test_the_kernel_selects_the_bits_of_the_reference(drawn):
    trajectories, capacity = drawn
    batch = pack_tree(trajectories)
    plan = batch.plan_micro_batches(capacity)
    with on_executor() as executor:
        found = [*batch.micro_batches(plan, PADDED, impl="triton")]
    entries = sum(one.num_entries > 0 for one in found)
    assert executor.launched == ["select_tokens_kernel"] * len(executor.launched)
    assert len(plan) <= len(executor.launched) <= 2 * len(plan)
    assert len(executor.launched) >= len(plan) + entries
    for one, other in zip(found, batch.micro_batches(plan, PADDED, impl="torch"), strict=True):
        assert_trees_equal(one, other)


def test_planning_takes_steps_in_proportion_to_chains():
    steps = []
    for count in (200, 800):
        batch, lines = members(count), [0]

        def step(frame, event, argument, lines=lines):
            lines[0] += event == "line"
            return step

        sys.settrace(step)
        try:
            batch.plan_micro_batches(count)  # a quarter of the chains in each
        finally:
            sys.settrace(None)
        steps.append(lines[0])
    assert steps[1] < 4.5 * steps[0]


def test_wrong_arguments_are_named():
    batch = members(4)
    plan = batch.plan_micro_batches(40)
    for call, kind, match in (
        (lambda: batch.plan_micro_batches(26), ValueError, LONG),
        (lambda: batch.plan_ranks(2, 26), ValueError, LONG.replace("micro_batches", "ranks")),
        (lambda: batch.plan_micro_batches(0), ValueError, "capacity must be 1 or more, got 0"),
        (lambda: batch.plan_micro_batches(2.5), TypeError, "capacity must be an integer, got 2.5"),
        (lambda: batch.plan_ranks(0, 40), ValueError, "num_ranks must be 1 or more, got 0"),
        (
            lambda: batch.micro_batches(plan_micro_batches([5], 8)),
            TypeError,
            "plan must be a ChainPlan, .* got Plan",
        ),
        (lambda: batch.micro_batches(batch.plan_ranks(2, 40)), TypeError, "of one rank, .*tuple"),
        (lambda: members(5).micro_batches(plan), ValueError, "it has 4 chains, the batch has 5"),
        (lambda: members(4, 20).merge(plan, []), ValueError, "the plan is for another batch"),
        (
            lambda: batch.micro_batches(plan, Alignment(sequence_multiple=4)),
            ValueError,
            "sequence_multiple=1 and tail='sequence', got 4 and 'sequence'",
        ),
        (
            lambda: batch.micro_batches(plan, Alignment(total=30)),
            ValueError,
            "micro-batch 0: a micro-batch must have at most total=30 tokens",
        ),
        (
            lambda: batch.micro_batches(plan, tensors={"x": torch.ones(3)}),
            ValueError,
            r"'x' must have shape \[12, ...\], got \[3\]",
        ),
        (
            lambda: batch.micro_batches(plan, tensors={"node": torch.ones(12)}),
            ValueError,
            "has a field 'node' already",
        ),
        (
            lambda: batch.micro_batches(plan, Alignment(max_generated=30)),
            ValueError,
            "trees take no max_generated, got 30",
        ),
        (lambda: batch.merge(plan, []), ValueError, "outputs must be 1, .* got 0"),
        (lambda: plan[1], IndexError, "micro-batch 1 of 1"),
    ):
        with pytest.raises(kind, match=match):
            call()


LONG = (
    "plan_micro_batches: trajectory '0', turns 0 to 0, is a chain of 27 tokens, more than the "
    "capacity of 26"
)
