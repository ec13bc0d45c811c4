"""Rows of trees, beside those of TRL's own class, through TRL's own attention and loss."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from tests.packing.adapters.cases import clipped_loss, packed_logprobs
from tests.packing.adapters.test_trl import async_loss, collate
from tests.packing.tree.test_tree_models import branching
from tests.packing.tree.tree_oracle import paths_of
from trajpack import GRPO, Alignment, GroupEstimator, Trajectory, Turn, pack, pack_tree
from trajpack.agent import build_tiny_model
from trajpack.packing.adapters.trl import to_async_row, to_async_samples, to_tree_kwargs
from trajpack.testing import assert_same_bits, trajectory_lists


def labelled(trajectories, estimator=None):
    tree = pack_tree(trajectories, boundary="duplicate")
    return tree.with_advantages(estimator or GroupEstimator("dr_grpo"))


@given(trajectories=trajectory_lists())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_row_equals_that_of_trls_own_class(trl, trajectories):
    assume(trajectories)
    samples = to_async_samples(pack(trajectories).with_advantages(GroupEstimator("dr_grpo")))
    samples.sort(key=lambda sample: sample["input_ids"].tolist())
    ours, theirs = to_async_row(labelled(trajectories)), collate(trl, [samples])
    assert set(ours) == set(theirs)
    for key, tensor in theirs.items():
        assert_same_bits(ours[key], tensor, key)


@given(trajectories=trajectory_lists())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_row_of_a_micro_batch_equals_that_of_trls_own_class(trl, trajectories):
    assume(trajectories)
    batch = pack(trajectories).with_advantages(GroupEstimator("dr_grpo"))
    samples, tree = to_async_samples(batch), labelled(trajectories)
    for one in tree.micro_batches(tree.plan_micro_batches(batch.max_seqlen + 3)):
        chosen = [samples[chain] for chain in one.chains.trie.order]
        ours, theirs = to_async_row(one), collate(trl, [chosen])
        assert set(ours) == set(theirs)
        for key, tensor in theirs.items():
            assert_same_bits(ours[key], tensor, key)


@pytest.mark.parametrize("boundary", ["shared", "duplicate"])
@given(trajectories=trajectory_lists(), cut=st.booleans())
@settings(max_examples=20)
def test_the_path_of_a_segment_leads_from_a_root_to_its_end(boundary, trajectories, cut):
    assume(trajectories)
    for tree in trees_of(pack_tree(trajectories, boundary=boundary), cut):
        check_paths(tree)


def trees_of(tree, cut):
    """Return a tree, or its micro-batches with padding."""
    if not cut:
        return [tree]
    plan = tree.plan_micro_batches(int(tree.chains.trie.lengths.max()) + 2)
    return [*tree.micro_batches(plan, Alignment(total_multiple=8))]


def check_paths(tree):
    found = to_tree_kwargs(tree)
    paths, tokens = paths_of(tree), tree.input_ids.tolist()
    starts = found["tree_cu_seqlens_q"].tolist()
    assert starts[0] == 0
    assert starts[-1] == tree.num_nodes
    real = tree.chains.trie.num_nodes
    if real < tree.num_nodes:  # padding is one segment, which depends on no other
        assert starts[-2] == real
        assert found["tree_segment_parents"][-1] == -1
        paths[-1] = tokens[real:]
    bounds = found["tree_cu_seqlens_k"].tolist()
    segment_of = {end - 1: segment for segment, end in enumerate(starts[1:])}
    for segment, end in enumerate(starts[1:]):
        path = found["tree_kv_index"][bounds[segment] : bounds[segment + 1]].tolist()
        assert [tokens[node] for node in path] == list(paths[end - 1])
        assert path[-(end - starts[segment]) :] == [*range(starts[segment], end)]
        above = int(tree.tree_parent[starts[segment]])
        parent = int(found["tree_segment_parents"][segment])
        assert parent == (-1 if above < 0 else segment_of[above])
        levels = found["tree_segment_depths"]
        assert levels[segment] == (0 if parent < 0 else levels[parent] + 1)
    assert found["tree_max_seqlen_q"] == max(b - a for a, b in pairwise(starts))
    assert found["tree_max_seqlen_k"] == max(map(len, paths))


class FlashAttention:
    """The kernel that TRL's attention calls, in plain torch: this machine has no Hopper GPU."""

    @staticmethod
    def flash_attn_varlen_func(
        query, key, value, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size
    ):
        assert causal
        assert window_size == (-1, -1)
        queries, keys = cu_q.diff().tolist(), cu_k.diff().tolist()
        assert (max(queries), max(keys)) == (max_q, max_k)
        parts = []
        for q, k, v in zip(query.split(queries), key.split(keys), value.split(keys), strict=True):
            mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
            out = torch.nn.functional.scaled_dot_product_attention(
                *(rows.transpose(0, 1)[None] for rows in (q, k, v)),
                attn_mask=mask, scale=softmax_scale, enable_gqa=True,
            )  # fmt: skip
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)


@pytest.fixture
def tree_attention(trl, monkeypatch):
    """TRL's attention over trees, registered."""
    from trl.experimental.async_grpo import packing

    monkeypatch.setattr(packing, "_flash_attn", FlashAttention)
    packing.register_tree_attention()
    return packing.TREE_ATTENTION


class Scorer(torch.nn.Module):
    """A model as the asynchronous trainer calls it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, shift_labels, fused_lm_head, **given):
        logprobs = self.model(**given, use_cache=False).logits.log_softmax(-1)
        chosen = logprobs.gather(2, shift_labels.clamp(min=0)[..., None])[..., 0]
        return SimpleNamespace(log_probs=chosen, entropy=-(logprobs.exp() * logprobs).sum(-1))


@pytest.mark.parametrize("every", [1000, 3], ids=["all", "some are dropped"])
def test_the_trainers_loss_and_gradient_are_those_of_separate_sequences(trl, tree_attention, every):
    trajectories = branching()
    tree, merged = labelled(trajectories, GRPO()), pack(trajectories).with_advantages(GRPO())
    tokens = torch.cat([torch.arange(*span) for span in merged.turn_spans.tolist()])
    dropped = torch.arange(tree.num_entries) % every == 1
    tree = tree.with_loss_mask(~dropped)
    merged = merged.with_loss_mask(
        torch.ones_like(merged.loss_mask).index_fill(0, tokens[dropped], False)
    )
    num_trained = int((~dropped).sum())
    assert tree.num_nodes < merged.num_tokens / 2
    model, _ = build_tiny_model(seed=0)
    weights = list(model.parameters())
    expected = clipped_loss(
        packed_logprobs(model, merged), merged.rollout_logprobs, merged.advantages, merged.loss_mask
    )
    want = torch.autograd.grad(expected, weights)
    model.set_attn_implementation(tree_attention)
    loss, state = async_loss(trl, Scorer(model), to_async_row(tree))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    for got, gradient in zip(torch.autograd.grad(loss, weights), want, strict=True):
        torch.testing.assert_close(got, gradient, rtol=1e-3, atol=1e-5)
    assert state._step_trained_tokens == num_trained
    assert state._step_forward_tokens == tree.num_nodes
    several = to_async_row(tree, num_trained=torch.tensor(2 * num_trained))
    torch.testing.assert_close(async_loss(trl, Scorer(model), several)[0], loss / 2)


def test_other_trees_are_refused():
    one = [Trajectory("a", [Turn([1], [2], [-0.5])])]
    with pytest.raises(ValueError, match="the batch has no advantages"):
        to_async_row(pack_tree(one, boundary="duplicate"))
    with pytest.raises(ValueError, match="boundary='duplicate'\\), got 'shared'"):
        to_async_row(pack_tree(one).with_advantages(GroupEstimator("dr_grpo")))
    with pytest.raises(ValueError, match="to_tree_kwargs: the tree must have nodes"):
        to_async_row(labelled([]))
    with pytest.raises(
        TypeError, match="tree must be a TreeBatch or TreeMicroBatch, got PackedBatch"
    ):
        to_tree_kwargs(pack(one))
