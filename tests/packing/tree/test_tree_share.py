"""Weights of shared nodes give the gradients of explicit rows, one for each chain."""

from collections import defaultdict

import pytest
import torch

from tests.packing.isolation.tiny_models import tiny_model
from tests.packing.tree import tree_oracle as oracle
from tests.packing.tree.test_tree_models import branching, by_tree, distance, exact
from trajpack import GRPO, Trajectory, Turn, pack_tree


def rollouts():
    """Return branches, members that sampled the same, and a prompt with others' tokens in it."""
    found = branching()
    first = found[0].turns[0]
    again = [Trajectory(f"again {n}", [first], "task") for n in range(2)]
    heard = [*first.prompt_ids, *first.completion_ids]
    return [*found, *again, Trajectory("later", [Turn(heard, [5, 6], [-1.5, -1.25], 1.0)], "task")]


def loss_of_rows(model, trajectories, advantages):
    """Return a loss over a row for each chain, which trains whatever a turn generated on its path.

    A token that several turns generated counts as their mean.
    """
    sampled = defaultdict(list)
    for path, advantage in zip(oracle.entries(trajectories), advantages.double(), strict=True):
        sampled[path].append(advantage)
    chains = [chain for one in trajectories for chain in oracle.chains_of(one)]
    total = torch.zeros((), dtype=torch.float64)
    for chain in chains:
        logprobs = model(torch.tensor([chain]), use_cache=False).logits[0].log_softmax(-1)
        for end in range(2, len(chain) + 1):
            if chain[:end] in sampled:
                mean = torch.stack(sampled[chain[:end]]).mean()
                total = total - mean * logprobs[end - 2, chain[end - 1]]
    return total


def test_gradients_are_those_of_rows():
    model, trajectories = exact(tiny_model("qwen3")), rollouts()
    batch = pack_tree(trajectories, "sum").with_advantages(GRPO())
    assert batch.entry_weights.unique().numel() > 3
    weights = batch.loss_weights("constant", denominator=1.0).double()
    torch.testing.assert_close(weights, batch.entry_weights.double())
    loss = -(weights * batch.advantages * by_tree(model, batch, "sdpa")).sum()
    found = torch.autograd.grad(loss, [*model.parameters()])
    model.set_attn_implementation("sdpa")
    expected = loss_of_rows(model, trajectories, batch.advantages)
    assert distance(loss, expected) <= 1e-6  # weights are float32
    for got, want in zip(found, torch.autograd.grad(expected, [*model.parameters()]), strict=True):
        assert distance(got, want) <= 1e-6


@pytest.mark.parametrize("share", ["once", "sum"])
def test_micro_batches_carry_the_weights(share):
    batch = pack_tree(rollouts(), share).with_advantages(GRPO())
    plan = batch.plan_micro_batches(40)
    assert len(plan) > 2
    weights = batch.loss_weights("token_mean")
    parts = [one.entries.fields["w"] for one in batch.micro_batches(plan, tensors={"w": weights})]
    assert torch.equal(batch.merge(plan, parts), weights)


def test_weights_of_a_device_need_no_value_of_it():
    weights = pack_tree(rollouts(), "sum", device="meta").entry_weights
    assert (weights.is_meta, weights.dtype) == (True, torch.float32)
