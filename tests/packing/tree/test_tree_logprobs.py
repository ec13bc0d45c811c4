"""Log-probabilities of entries: each trained node once, with the gradients of separate rows."""

import pytest
import torch

from tests.packing.isolation.tiny_models import VOCABULARY, tiny_model
from tests.packing.tree.test_tree_models import branching, by_rows, exact, gradients
from tests.packing.tree.tree_oracle import entries, paths_of, prefixes
from trajpack import GRPO, Alignment, Trajectory, Turn, pack_tree
from trajpack.kernels.logprobs.token_logprobs import token_logprobs
from trajpack.packing.adapters.huggingface import LMHead, register_tree_attention
from trajpack.packing.micro_batches import logprobs
from trajpack.testing import assert_same_bits


def outputs_of(batch, dtype=torch.float64, width=5):
    """Return hidden states, weights of an LM head, and weights of a loss over entries."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    return normal(batch.num_nodes, width), normal(VOCABULARY, width), normal(batch.num_entries)


def dense(batch, hidden, weight):
    """Return log-probabilities and entropies of the entries, each read at its parent."""
    every = (hidden @ weight.T)[batch.entry_parent].log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    return every.gather(1, batch.entries.input_ids[:, None])[:, 0], entropy


def test_each_trained_node_is_a_row_once():
    trajectories = branching()
    batch = pack_tree(trajectories)
    rows, targets, _ = batch.generated.distinct()
    trained = sorted(set(entries(trajectories)))
    nodes = prefixes(trajectories)
    assert len(trained) < batch.num_entries
    assert batch.num_trained == len(trained)
    assert rows.tolist() == [nodes.index(path[:-1]) for path in trained]
    assert targets.tolist() == [path[-1] for path in trained]


@pytest.mark.parametrize("way", ["hidden", "logits"])
def test_entries_get_the_numbers_of_the_dense_way_and_its_gradients(way):
    batch = pack_tree(branching())
    hidden, weight, weights = outputs_of(batch)
    want = dense(batch, hidden, weight)
    given = (hidden, weight) if way == "hidden" else ((hidden @ weight.T)[None],)
    got = batch.logprobs(*given, entropy=True)
    assert_same_bits(got[0].detach(), batch.logprobs(*given).detach())
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        found, expected = (
            torch.autograd.grad((x * weights).sum(), (hidden, weight), retain_graph=True)
            for x in (one, other)
        )
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("way", ["hidden", "logits"])
def test_temperatures_divide_the_logits_of_a_row(way):
    batch = pack_tree(branching())
    hidden, weight, _ = outputs_of(batch)
    logits = hidden @ weight.T
    given = (hidden, weight) if way == "hidden" else (logits,)
    each = torch.linspace(0.5, 2, batch.num_entries)
    for temperature, of_entry in ((0.7, torch.tensor(0.7)), (each, each)):
        want = (logits[batch.entry_parent] / of_entry.reshape(-1, 1)).log_softmax(-1)
        want = want.gather(1, batch.entries.input_ids[:, None])[:, 0]
        got = batch.logprobs(*given, temperature=temperature)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_a_token_that_cannot_be_sampled_adds_no_entropy():
    batch = pack_tree(branching())
    logits = torch.zeros(batch.num_nodes, VOCABULARY + 4).requires_grad_()
    closed = torch.arange(VOCABULARY + 4) >= VOCABULARY
    _, entropy = batch.logprobs(logits.masked_fill(closed, -torch.inf), entropy=True)
    torch.testing.assert_close(entropy, torch.full_like(entropy, VOCABULARY).log())
    assert torch.autograd.grad(entropy.sum(), logits)[0].isfinite().all()


def test_the_head_computes_trained_nodes_alone_and_nothing_waits(monkeypatch):
    batch = pack_tree(branching())
    hidden, weight, _ = outputs_of(batch)
    computed = []

    def noted(hidden, weight, rows, targets, **options):
        computed.append(len(rows))
        return token_logprobs(hidden, weight, rows, targets, **options)

    monkeypatch.setattr(logprobs, "token_logprobs", noted)
    batch.logprobs(hidden, weight)
    assert computed == [batch.num_trained]
    on_meta = batch.to("meta")  # a host value of a device would raise
    found = on_meta.logprobs(hidden.to("meta"), weight.to("meta"), entropy=True)
    assert [one.shape[0] for one in found] == [batch.num_entries] * 2


def test_repeats_have_the_same_bits():
    batch = pack_tree(branching())
    hidden, weight, weights = outputs_of(batch, torch.float32)

    def results():
        found = batch.logprobs(hidden, weight)
        return found.detach(), *torch.autograd.grad((found * weights).sum(), (hidden, weight))

    first = results()
    for _ in range(20):
        for one, other in zip(results(), first, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("boundary", ["shared", "duplicate"])
def test_micro_batches_add_up_to_the_batch(boundary):
    batch = pack_tree(branching(), boundary=boundary)
    hidden, weight, weights = outputs_of(batch)
    row_of = {path: row for row, path in enumerate(paths_of(batch))}
    of_nodes = hidden[[row_of[path] for path in paths_of(batch)]]  # equal where duplicated
    want = batch.logprobs(of_nodes, weight)
    plan = batch.plan_micro_batches(capacity := 2 * max(map(len, row_of)))
    assert len(plan) > 1
    outputs = []
    for one in batch.micro_batches(plan, Alignment(total=capacity + 3)):
        assert one.num_padding
        assert one.num_trained == int(one.loss_mask.sum())
        own = [row_of[path] for path in paths_of(one)[: one.num_nodes - one.num_padding]]
        padded = torch.cat([hidden[own], hidden.new_full((one.num_padding, 5), torch.nan)])
        outputs.append(one.logprobs(padded, weight))
    got = batch.merge(plan, outputs)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        *(torch.autograd.grad((x * weights).sum(), (hidden, weight)) for x in (got, want)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_model_and_its_head_learn_from_a_tree_what_they_learn_from_rows(family):
    register_tree_attention()
    trajectories = branching()
    batch = pack_tree(trajectories).with_advantages(GRPO())
    model = exact(tiny_model(family).train())
    weights = batch.advantages * batch.loss_weights("token_mean")
    rows = by_rows(model, trajectories)
    ratio = (rows - batch.rollout_logprobs).exp()  # another one for each entry of a node
    want = gradients(model, (ratio * weights).sum())
    model.set_attn_implementation("trajpack_tree")
    tree = LMHead(model).logprobs(batch)
    torch.testing.assert_close(tree, rows, rtol=1e-10, atol=1e-10)
    ratio = (tree - batch.rollout_logprobs).exp()
    got = gradients(model, (ratio * weights).sum())
    assert (got - want).norm() <= 1e-10 * want.norm()


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite"])
def test_soft_caps_and_scales_are_those_of_the_model(name):
    register_tree_attention("path")
    trajectories = branching()
    batch = pack_tree(trajectories)
    model = tiny_model(name).eval()
    with torch.no_grad():
        rows = by_rows(model, trajectories, "eager")
        model.set_attn_implementation("trajpack_tree")
        tree = LMHead(model).logprobs(batch)
    torch.testing.assert_close(tree, rows, rtol=1e-4, atol=1e-5)


def test_trees_without_generated_tokens_have_no_rows():
    for trajectories in ([], [Trajectory("a", [Turn([1, 2], [], [])])]):
        batch = pack_tree(trajectories)
        assert batch.num_trained == 0
        hidden = torch.zeros(batch.num_nodes, 3, requires_grad=True)
        for given in ((hidden, torch.zeros(9, 3)), (hidden,)):
            found = batch.logprobs(*given, entropy=True)
            assert [len(one) for one in found] == [0, 0]
            assert not torch.autograd.grad(found[0].sum(), hidden)[0].any()
