"""Every backend of attention over trees, against attention along each node's ancestors."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention

from trajpack.packing.tree import attention, flex
from trajpack.packing.tree_attention.attention import TreeAttention, query_blocks, visible
from trajpack.packing.tree_attention.flex import block_mask

BLOCK = 16
"""Nodes of a block of FlexAttention, and least queries of a call, in these tests."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention, "MOST_QUERIES", 24)
    monkeypatch.setattr(attention, "PAIRS_OF_CALL", 100)
    monkeypatch.setattr(flex, "BLOCK", BLOCK)
    # torch refuses gradients of FlexAttention on the host, and computes them right uncompiled
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


def forest(seed, nodes, branching=0.1):
    """Return the parents of a random forest, mostly runs, numbered depth first."""
    generator, parents, path = np.random.default_rng(seed), [], []
    for node in range(nodes):
        if generator.random() < branching:
            del path[generator.integers(0, len(path) + 1) :]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents


def arrays(parents):
    """Return `tree_end` and depths, node by node."""
    ends, depths = list(range(1, len(parents) + 1)), []
    for node, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        above = parent
        while above >= 0:
            ends[above], above = node + 1, parents[above]
    return torch.tensor(ends, dtype=torch.int32), torch.tensor(depths, dtype=torch.int32)


def ancestors(parents, window=None):
    """Return bool ``[nodes, nodes]``: a node and its nearest ancestors, by walking up."""
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for query in range(len(parents)):
        node, left = query, window or len(parents)
        while node >= 0 and left:
            seen[query, node] = True
            node, left = parents[node], left - 1
    return seen


def by_definition(query, key, value, *, seen, scaling, softcap, sinks):
    scores = query @ key.repeat_interleave(2, 1).mT * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    weights = torch.where(seen, scores, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    total = total if sinks is None else total + sinks[:, None, None].exp()
    return weights / total @ value.repeat_interleave(2, 1)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("backend", ["mask", "path", "flex"])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(None, None, False), (7, None, False), (None, 0.8, False), (None, None, True), (5, 1.5, True)],
)
@pytest.mark.parametrize(
    ("seed", "nodes", "branching"), [(0, 150, 0.1), (1, 64, 0.4), (2, 80, 0.02), (3, 1, 0.1)]
)
def test_a_node_attends_to_its_ancestors_and_itself(
    backend, window, softcap, sinks, seed, nodes, branching
):
    torch.manual_seed(seed)
    parents = forest(seed, nodes, branching)
    made = {"dtype": torch.float64, "requires_grad": True}
    inputs = [torch.randn(1, heads, nodes, 8, **made) for heads in (4, 2, 2)]
    given_sinks = torch.randn(4, **made) if sinks else None
    options = {"scaling": 0.3, "softcap": softcap, "sinks": given_sinks}
    attend = TreeAttention(*arrays(parents), backend)
    found = attend(*inputs, window=window, **options)
    want = by_definition(*inputs, seen=ancestors(parents, window), **options)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    leaves, towards = [*inputs, *([given_sinks] if sinks else [])], torch.randn_like(want)
    for got, expected in zip(
        torch.autograd.grad(found, leaves, towards),
        torch.autograd.grad(want, leaves, towards),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@given(st.integers(0, 10**6), st.integers(1, 90), st.sampled_from([0.0, 0.02, 0.2, 0.6]))
@settings(max_examples=40)
def test_blocks_hold_every_ancestor_of_their_nodes(seed, nodes, branching):
    parents = forest(seed, nodes, branching)
    seen, depths = ancestors(parents), arrays(parents)[1]
    attend = TreeAttention(*arrays(parents), "path")
    begin = 0
    for block, keys in zip(attend.blocks, attend._nodes_of_blocks(), strict=True):
        assert block.begin == begin < block.end
        begin = block.end
        held = torch.from_numpy(keys)
        assert (held.diff() > 0).all()
        assert len(held) == block.num_keys == int(depths[block.begin]) + block.end - block.begin
        assert torch.equal(held[: block.depth + 1], seen[block.begin].nonzero()[:, 0])
        elsewhere = torch.ones(nodes, dtype=torch.bool)
        elsewhere[held] = False
        assert not seen[block.begin : block.end, elsewhere].any()
        assert block.is_run == (
            parents[block.begin + 1 : block.end] == list(held[block.depth : -1])
        )
        assert block.is_run or block.end - block.begin <= attention.MOST_QUERIES
    assert begin == nodes


@given(st.integers(0, 10**6), st.integers(1, 90), st.sampled_from([0.02, 0.2, 0.6]))
@settings(max_examples=20)
def test_the_work_that_is_counted_is_that_of_the_calls(seed, nodes, branching):
    attend = TreeAttention(*arrays(forest(seed, nodes, branching)), "path")
    for causal in (True, False):
        rows, calls = attend._calls(None, torch.float32, causal=causal)
        pairs = [0] * len(attend.blocks)
        for call in calls:
            size = call.num_queries
            dense = size * call.num_keys
            pairs[call.block] += size * (size + 1) // 2 if call.mask is None else dense
            assert call.mask is None or call.mask.shape == (size, call.num_keys)
        assert pairs == [block.pairs(causal) for block in attend.blocks]
        assert attend.path_rows == (0 if rows is None else len(rows))
        joined = sum(not block.is_run for block in attend.blocks)
        assert sum(call.mask is None for call in calls) <= (len(pairs) - joined if causal else 0)


def test_joining_small_runs_never_costs_more():
    for seed in range(20):
        depths = arrays(forest(seed, 80, 0.3))[1].numpy()
        alone = sum(
            attention.QueryBlock(begin, end, int(depths[begin]), is_run=True).cost
            for begin, end in runs_of(depths)
        )
        assert sum(block.cost for block in query_blocks(depths)) <= alone


def runs_of(depths):
    begins = [0, *(n for n in range(1, len(depths)) if depths[n] != depths[n - 1] + 1)]
    return zip(begins, [*begins[1:], len(depths)], strict=True)


@pytest.mark.parametrize("window", [None, 1, 20, 60])
@pytest.mark.parametrize("nodes", [1, BLOCK, BLOCK + 1, 130])
def test_a_block_mask_visits_the_blocks_of_the_dense_mask(nodes, window):
    for seed in range(6):
        parents = forest(seed, nodes, 0.05)
        blocks = -(-nodes // BLOCK)
        dense = torch.zeros(blocks * BLOCK, blocks * BLOCK, dtype=torch.bool)
        dense[:nodes, :nodes] = ancestors(parents, window)
        tiles = dense.view(blocks, BLOCK, blocks, BLOCK).transpose(1, 2)
        whole = tiles.clone()
        whole[-1, :, nodes - blocks * BLOCK :] |= nodes % BLOCK != 0  # queries that are padding
        mask = block_mask(*arrays(parents), window)
        part = listed(mask.kv_num_blocks, mask.kv_indices)
        full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
        visited, is_full = tiles.any(-1).any(-1), whole.all(-1).all(-1)
        assert not (part & full).any()
        assert not (full & ~is_full).any()
        assert not (visited & ~(part | full)).any()
        if window is None:
            assert torch.equal(part | full, visited)
            assert torch.equal(full, is_full & ~torch.eye(blocks, dtype=torch.bool))


def listed(counts, columns):
    """Return bool ``[blocks, blocks]`` of the blocks that a list of a `BlockMask` has."""
    found = torch.zeros(columns.shape[2:], dtype=torch.bool)
    for row, (count, of_row) in enumerate(zip(counts[0, 0], columns[0, 0], strict=True)):
        found[row, of_row[:count].long()] = True
    return found


def test_a_block_mask_takes_no_memory_for_pairs_of_nodes():
    nodes = 2**14
    with torch.profiler.profile(profile_memory=True) as profile:
        block_mask(torch.full((nodes,), nodes, dtype=torch.int32), torch.arange(nodes))
    assert max(event.cpu_memory_usage for event in profile.events()) < nodes**2 // BLOCK


@pytest.mark.parametrize("windows", [(None,), (40, 41)])
@pytest.mark.parametrize("softcaps", [(None,), (0.5, 0.8)])
def test_flex_attention_compiles_once_for_all_numbers(windows, softcaps, monkeypatch):
    """Not of a single block, nor a single node: torch makes constants of sizes of 1."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(flex_attention.flex_attention, dynamic=True, backend=counter)
    monkeypatch.setattr(flex, "flex_attention", compiled)
    for seed, nodes in enumerate((100, 101, 33, 250, 400, 130)):
        attend = TreeAttention(*arrays(forest(seed, nodes)), "flex")
        query, key = torch.randn(1, 4, nodes, 8), torch.randn(1, 2, nodes, 8)
        for window, softcap in product(windows * 2, softcaps):  # of layers
            attend(query, key, key, window=window, softcap=softcap)
        assert counter.frame_count == 1


def test_the_backend_with_less_counted_work_is_chosen():
    depths = torch.tensor([*range(2000), *list(range(2000, 2100)) * 10], dtype=torch.int32)
    ends = torch.tensor(
        [*[3000] * 2000, *(2100 + 100 * (n // 100) for n in range(1000))], dtype=torch.int32
    )
    of_group = TreeAttention(ends, depths)
    assert of_group.backend == "path"
    assert of_group.path_rows == 10 * 2100  # the first answer continues the prompt's run
    assert TreeAttention(*arrays(forest(0, 40, 0.5))).backend == "mask"
    assert TreeAttention(ends, depths, "mask").backend == "mask"
    alone = TreeAttention(torch.full((50,), 50), torch.arange(50), "path")
    assert alone.path_rows == 0  # keys are read where they are
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'mask', 'path', 'flex'"):
        TreeAttention(ends, depths, "dense")


def test_visible_parts_are_those_of_the_whole():
    ends, depths = arrays(forest(4, 60))
    whole = visible(ends, depths, 6)
    keys = torch.tensor([0, 3, 20, 41])
    part = visible(ends, depths, 6, queries=slice(18, 44), keys=keys)
    assert torch.equal(part, whole[18:44, keys])
    assert torch.equal(whole, ancestors(forest(4, 60), 6))
