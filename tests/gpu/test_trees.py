"""Trees on real hardware: those of the host, without a wait, with gradients that repeat."""

from __future__ import annotations

import copy
import dataclasses
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gpu.conftest import no_waiting
from tests.packing.tree.test_tree import ROUTES, VALUES, assert_trees_equal, with_fields
from tests.packing.tree.test_tree_models import branching, clipped, distance, gradients
from trajpack import GRPO, Alignment, Trajectory, TrajectoryBuffer, TreeBatch, pack_tree
from trajpack.agent import build_tiny_model
from trajpack.packing.adapters.huggingface import (
    LMHead,
    check_tree_attention,
    register_tree_attention,
)
from trajpack.packing.tree_attention.attention import TreeAttention
from trajpack.testing import assert_same_bits

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SHARES: Any = ("once", "sum")
BOUNDARIES: Any = ("shared", "duplicate")


def groups(count: int = 12) -> list[Trajectory]:
    """Groups that branch, of more nodes together than a block of attention has."""
    return [
        replace(one, id=f"{seed} {one.id}", group=f"{seed} {one.group}")
        for seed in range(count)
        for one in branching(seed)
    ]


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_tree_is_that_of_the_host_and_nobody_waits(boundary: Any) -> None:
    trajectories = with_fields(groups(), random.Random(0))
    host, device, again = (
        TrajectoryBuffer(device=place, fields=[ROUTES, VALUES]) for place in ("cpu", DEVICE, DEVICE)
    )
    for buffer in (host, device, again):
        buffer.extend(trajectories)
    expected = pack_tree(host, boundary=boundary)
    assert expected.num_nodes > 4 * 128
    assert_trees_equal(pack_tree(device, boundary=boundary), expected)  # compiles
    with no_waiting():
        batch = pack_tree(again, boundary=boundary)
    assert_trees_equal(batch, expected)
    assert batch.unpack() == trajectories


def results(batch: TreeBatch, hidden: torch.Tensor, lm_head: torch.Tensor) -> dict[str, Any]:
    """What a loss reads of a tree."""
    batch = batch.with_advantages(GRPO())
    logprobs, entropies = batch.logprobs(hidden, lm_head, entropy=True)
    return {
        "advantages": batch.advantages,
        "weights": batch.loss_weights("sequence_mean_token_mean"),
        "entry weights": batch.entry_weights,
        "parents": batch.entry_parent,
        "logprobs": logprobs,
        "entropies": entropies,
    }


@pytest.mark.parametrize("share", SHARES)
def test_what_a_loss_reads_is_that_of_the_host_and_nobody_waits(share: Any) -> None:
    trajectories = groups()
    host = pack_tree(trajectories, share)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(size, 64, generator=generator) for size in (host.num_nodes, 384)]
    moved = [one.to(DEVICE) for one in inputs]
    first, second = (pack_tree(trajectories, share, device=DEVICE) for _ in range(2))
    again = results(first, *moved)  # compiles
    with no_waiting():
        found = results(second, *moved)
    for name, tensor in results(host, *inputs).items():
        torch.testing.assert_close(found[name].cpu(), tensor, rtol=1e-5, atol=1e-5)
        assert_same_bits(found[name], again[name], name)


def test_micro_batches_are_those_of_the_host_and_nobody_waits() -> None:
    host = pack_tree(groups()).with_advantages(GRPO())
    device, plan = host.to(DEVICE), host.plan_micro_batches(300)
    alignment = Alignment(total_multiple=64)
    weights = {"weights": host.loss_weights("token_mean")}
    moved = {name: tensor.to(DEVICE) for name, tensor in weights.items()}

    def cut() -> tuple[list[Any], torch.Tensor]:
        found = list(device.micro_batches(plan, alignment, tensors=moved))
        return found, device.merge(plan, [one.rollout_logprobs for one in found])

    cut()  # compiles
    with no_waiting():
        found, merged = cut()
    assert len(found) > 2
    for one, other in zip(found, host.micro_batches(plan, alignment, tensors=weights), strict=True):
        for part, of in ((one, other), (one.entries, other.entries)):
            for name, tensor in tensors_of(of).items():
                assert_same_bits(tensors_of(part)[name], tensor, name)
    assert_same_bits(merged, host.rollout_logprobs)


def tensors_of(part: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of nodes or of entries, extra fields too."""
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    tensors = {name: one for name, one in values.items() if isinstance(one, torch.Tensor)}
    return tensors | dict(part.fields)


def gradient(model: Any, batch: TreeBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of a tree and the gradient of a clipped loss, on the host."""
    logprobs = LMHead(model).logprobs(batch)
    ratio = (logprobs - batch.rollout_logprobs).exp()
    loss = (clipped(ratio, batch) * batch.loss_weights("token_mean")).sum()
    return logprobs.detach().cpu(), gradients(model, loss).cpu()


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """A model that computes trees, on the host and on the device, there by FlexAttention."""
    register_tree_attention()
    host, _ = build_tiny_model(seed=0)
    host.set_attn_implementation("trajpack_tree")
    device = copy.deepcopy(host).to(DEVICE)
    check_tree_attention(device)
    return host, device


@pytest.mark.parametrize("count", [1, 12])
def test_log_probabilities_and_gradients_are_those_of_the_host(
    models: tuple[Any, Any], count: int
) -> None:
    batch = pack_tree(groups(count)).with_advantages(GRPO())
    wanted, found = (gradient(model, batch.to(model.device)) for model in models)
    assert wanted[1].norm() > 0
    for got, want in zip(found, wanted, strict=True):
        assert distance(got, want) < 1e-4


@pytest.mark.parametrize("nodes", [2, 64, 65, 127, 128, 129])
def test_trees_of_about_a_block_of_nodes(nodes: int) -> None:
    """Up to 127 nodes torch has another kernel, for decoding, which takes fewer queries."""
    ends, depths = torch.full((nodes,), nodes, dtype=torch.int32), torch.arange(nodes)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, n, nodes, 16, generator=generator) for n in (8, 2, 2))
    wanted = TreeAttention(ends, depths, "path")(query, key, value)
    moved = [one.to(DEVICE) for one in (query, key, value)]
    found = TreeAttention(ends.to(DEVICE), depths.to(DEVICE), "flex")(*moved)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-2, atol=1e-2)  # products may be TF32


def test_gradients_repeat_to_the_bit(models: tuple[Any, Any]) -> None:
    batch = pack_tree(groups(), device=DEVICE).with_advantages(GRPO())
    first = gradient(models[1], batch)
    for _ in range(20):
        for again, one in zip(gradient(models[1], batch), first, strict=True):
            assert_same_bits(again, one)
