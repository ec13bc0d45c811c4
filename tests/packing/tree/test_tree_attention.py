"""Every backend of attention over trees, against attention along each node's ancestors."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention

from trajpack.packing.tree_attention import attention, flex
from trajpack.packing.tree_attention.attention import TreeAttention, visible
from trajpack.packing.tree_attention.flex import block_mask

BLOCK = 16
"""Nodes of a block of FlexAttention in these tests."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(attention, "QUERIES", 24)
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
@pytest.mark.parametrize("backend", ["path", "flex"])
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


@given(
    st.integers(0, 10**6),
    st.integers(1, 90),
    st.sampled_from([0.0, 0.02, 0.2, 0.6]),
    st.sampled_from([None, 1, 5, 30]),
)
@settings(max_examples=60)
def test_calls_hold_each_visible_key_once_and_no_other(seed, nodes, branching, window):
    parents = forest(seed, nodes, branching)
    seen, held = ancestors(parents, window), torch.zeros(nodes, nodes, dtype=torch.bool)
    for queries, keys, mask in TreeAttention(*arrays(parents)).calls(window, torch.float64):
        held[queries, keys] = mask == 0
        assert torch.equal(seen[queries].any(0).nonzero()[:, 0], keys)
    assert torch.equal(held, seen)


@pytest.mark.parametrize("window", [None, 1, 20, 60])
@pytest.mark.parametrize("padding", [0, 1, 2 * BLOCK + 3])
@pytest.mark.parametrize("nodes", [1, BLOCK, BLOCK + 1, 130])
def test_a_block_mask_visits_the_blocks_of_the_dense_mask(nodes, padding, window):
    """I6; a node of padding is a root without descendants."""
    nodes += padding
    for seed in range(6):
        parents = forest(seed, nodes - padding, 0.05) + [-1] * padding
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


@pytest.mark.slow
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


@pytest.mark.parametrize("sinks", [None, torch.zeros(8)])
def test_a_device_never_takes_the_kernel_for_decoding(sinks, monkeypatch):
    """It has no tile for more than 128 queries times the heads that share keys."""
    asked = []

    def compiled(query, *_, kernel_options, return_aux=None, **__):
        asked.append(kernel_options)
        aux = flex_attention.AuxOutput(lse=query[..., 0])
        return query if return_aux is None else (query, aux)

    monkeypatch.setattr(flex, "compiled_flex", lambda: compiled)
    query = torch.empty(1, 8, 100, 16, device="meta")
    sinks = None if sinks is None else sinks.to("meta")
    numbers = {"scaling": None, "softcap": None, "sinks": sinks}
    flex.attend_by_blocks(query, query[:, :2], query[:, :2], mask=None, **numbers)
    assert asked == [{"BACKEND": "TRITON"}]


def test_the_backend_is_chosen_by_the_device_and_can_be_forced():
    ends, depths = arrays(forest(0, 50))
    assert TreeAttention(ends, depths).backend == "path"
    assert TreeAttention(ends.to("meta"), depths.to("meta")).backend == "flex"
    assert TreeAttention(ends, depths, "flex").backend == "flex"
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'path', 'flex', got"):
        TreeAttention(ends, depths, "dense")


def test_visible_parts_are_those_of_the_whole():
    ends, depths = arrays(forest(4, 60))
    whole = visible(ends, depths, 6)
    assert torch.equal(visible(ends, depths, 6, queries=slice(18, 44)), whole[18:44])
    assert torch.equal(whole, ancestors(forest(4, 60), 6))
