"""Layers with a state follow a tree by the package tree-recurrence, from our arrays."""

import pytest
import torch

from tests.packing.adapters.test_trl_tree import FlashAttention
from tests.packing.isolation.tiny_models import tiny_model
from tests.packing.tree.test_tree_models import branching
from trajpack import pack, pack_tree
from trajpack.packing.adapters.trl import to_tree_kwargs

BOUNDARIES = pytest.mark.parametrize("boundary", ["shared", "duplicate"])


@pytest.fixture
def recurrence(peer):
    """The package, without the kernels that it would load: its references run."""
    return peer("tree-recurrence").load("tree_recurrence")


def recurrent(inputs, cu_seqlens, initial_state):
    """Scan with a state that decays; sequences begin with their initial states."""
    (rows,) = inputs
    states = [] if initial_state is None else list(initial_state)
    outs, finals = [], []
    for number, part in enumerate(rows[0].split(cu_seqlens.diff().tolist())):
        state = states[number] if states else rows.new_zeros(rows.shape[-1])
        for row in part:
            state = 0.9 * state + row
            outs.append(state.tanh())
        finals.append(state)
    return torch.stack(outs)[None], torch.stack(finals)


@BOUNDARIES
@pytest.mark.parametrize("saved", [0, 1 << 20], ids=["forked", "rescanned"])
def test_scans_and_convolutions_of_nodes_are_those_of_their_paths(recurrence, boundary, saved):
    tree = pack_tree(branching(), boundary=boundary)
    plan = recurrence.tree_plan(to_tree_kwargs(tree))
    assert plan.num_tokens == tree.num_nodes
    assert plan.num_levels > 2
    rows = torch.randn(1, tree.num_nodes, 4, generator=torch.Generator().manual_seed(0))
    rows = rows.double().requires_grad_()
    weight = torch.linspace(1, 2, 12, dtype=torch.float64).view(4, 3)

    def convolved(given, cu_seqlens):
        padded = torch.nn.functional.pad(given.transpose(1, 2), (2, 0))
        return torch.nn.functional.conv1d(padded, weight[:, None], groups=4).transpose(1, 2)

    policy = recurrence.Policy(fork_min_saved_tokens=saved)
    assert policy.forks(plan) is (saved == 0)
    scanned = recurrence.tree_scan(recurrent, [rows], plan, policy=policy)[0]
    mixed = recurrence.tree_conv(convolved, rows, plan, 3)[0]
    want_scanned, want_mixed = torch.empty_like(scanned), torch.empty_like(mixed)
    for node in range(tree.num_nodes):
        path = [node]
        while (above := int(tree.tree_parent[path[-1]])) >= 0:
            path.append(above)
        alone = rows[:, path[::-1]]
        whole = torch.tensor([0, len(path)])
        want_scanned[node] = recurrent([alone], whole, None)[0][0, -1]
        want_mixed[node] = convolved(alone, whole)[0, -1]
    for got, want in ((scanned, want_scanned), (mixed, want_mixed)):
        torch.testing.assert_close(got, want)
        gradients = [
            torch.autograd.grad(one.square().sum(), rows, retain_graph=True)[0]
            for one in (got, want)
        ]
        torch.testing.assert_close(*gradients)


@BOUNDARIES
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "lfm2", "mamba2"])
def test_hybrid_models_compute_nodes_as_separate_sequences(
    recurrence, trl, monkeypatch, family, boundary
):
    from trl.experimental.async_grpo import packing

    monkeypatch.setattr(packing, "_flash_attn", FlashAttention)
    packing.register_tree_attention()
    trajectories = branching()
    tree, merged = pack_tree(trajectories, boundary=boundary), pack(trajectories)
    model = tiny_model(family)
    alone = [
        model(ids[None], use_cache=False).logits[0].detach()
        for ids in merged.input_ids.split(merged.seqlens)
    ]
    support = recurrence.install(model)
    try:
        assert support.mode == "tree", support.reason
        if family != "mamba2":
            model.set_attn_implementation(packing.TREE_ATTENTION)
        given = {"input_ids": tree.input_ids[None], "position_ids": tree.position_ids[None]}
        logits = model(**given, **to_tree_kwargs(tree), use_cache=False).logits[0].detach()
    finally:
        recurrence.uninstall(model)
    for row, want in zip(paths_of_rows(tree), alone, strict=True):
        torch.testing.assert_close(logits[row], want, rtol=1e-4, atol=1e-4)


def paths_of_rows(tree):
    """Return the nodes of each sequence of layout ``"merged"``."""
    bounds, entries = tree.entries.cu_generated.tolist(), tree.entry_node.tolist()
    tips = {}
    for turn, row in enumerate(tree.entries.turn_sequence.tolist()):
        tips[row] = max(tips.get(row, -1), entries[bounds[turn + 1] - 1])
    paths = []
    for row in sorted(tips):
        path = [tips[row]]
        while (above := int(tree.tree_parent[path[-1]])) >= 0:
            path.append(above)
        paths.append(path[::-1])
    return paths
