"""`gae` as an operator: its gradient, registered, traced, without values, refusing wrong input."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.credit.token_loops import (
    OBSERVATIONS,
    Batch,
    assert_rounds,
    batch_of,
    gae_of,
    small_blocks,
)
from trajpack.kernels.credit.gae import gae
from trajpack.testing import assert_same_bits, boundaries

MASKS = ("..gg..g.", "g", "", "...", "gg.g", ".g", "gggggggggg")


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


def jacobians(batch: Batch, observation: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what each unit of reward adds to advantages and returns; they are linear in it."""
    num = len(batch.rewards)
    still = batch._replace(values=batch.values * 0, bootstrap=batch.bootstrap * 0)
    columns = [
        gae_of(still._replace(rewards=unit), observation)
        for unit in torch.eye(num, dtype=torch.float64)
    ]
    advantages, returns = zip(*columns, strict=True)
    return np.array(advantages).T, np.array(returns).T


@cache
def jacobians_of_masks(observation: str, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    return jacobians(batch_of(MASKS, dtype=dtype), observation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_the_gradient_is_the_transpose(observation: Any, dtype: torch.dtype, impl: Any) -> None:
    batch = batch_of(MASKS, dtype=dtype)
    inputs = batch.values, batch.cu_seqlens
    given = torch.from_numpy(np.random.default_rng(1).standard_normal((2, len(batch.rewards))))
    given = given.float()
    options = batch.options() | {"observation": observation, "impl": impl}
    of_each = [
        rows.T @ weights.double().numpy()
        for rows, weights in zip(jacobians_of_masks(observation, dtype), given, strict=True)
    ]
    rewards = batch.rewards.requires_grad_()
    rows = gae(rewards, *inputs, **options)
    for outputs, exact in (([0], of_each[0]), ([1], of_each[1]), ([0, 1], sum(of_each))):
        (gradient,) = torch.autograd.grad(
            [rows[at] for at in outputs], rewards, [given[at] for at in outputs], retain_graph=True
        )
        assert gradient.dtype == dtype
        assert_rounds(gradient.float(), np.asarray(exact))


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_the_output_is_linear_in_rewards(observation: Any) -> None:
    """So the transpose is all there is to the gradient, whatever the rewards."""
    batch = batch_of(MASKS, dtype=torch.float64)
    advantages, _ = jacobians(batch, observation)
    zero = gae_of(batch._replace(rewards=batch.rewards * 0), observation)[0]
    exact = zero + advantages @ batch.rewards.numpy()
    np.testing.assert_allclose(gae_of(batch, observation)[0], exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_the_gradient_has_the_same_bits_in_any_company(observation: Any, impl: Any) -> None:
    batch = batch_of(MASKS)

    def gradient_of(part: Batch) -> torch.Tensor:
        rewards = part.rewards.clone().requires_grad_()
        options = part.options() | {"observation": observation, "impl": impl}
        advantages, _ = gae(rewards, part.values, part.cu_seqlens, **options)
        return torch.autograd.grad(advantages, rewards, part.values)[0]

    order = [6, 2, 4, 3, 1, 5, 0]
    parts = gradient_of(batch).split(batch.lengths)
    assert_same_bits(gradient_of(batch.taken(order)), torch.cat([parts[at] for at in order]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(dynamic: bool) -> None:
    def loss(
        rewards: torch.Tensor, values: torch.Tensor, cu_seqlens: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        advantages, returns = gae(rewards * 2, values, cu_seqlens, loss_mask=mask)
        return (advantages * returns.detach()).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for masks in (["g.g", ".gg."], ["g", "", "gg..g.gg"]):
        batch = batch_of(masks)
        rest = batch.values, batch.cu_seqlens, batch.loss_mask
        eager, traced = (batch.rewards.clone().requires_grad_() for _ in range(2))
        loss(eager, *rest).backward()
        compiled(traced, *rest).backward()
        assert eager.grad is not None
        assert traced.grad is not None
        assert_same_bits(traced.grad, eager.grad)


@pytest.mark.parametrize("impl", ["auto", "torch", "triton"])
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_shapes_alone_are_enough_on_the_meta_device(observation: Any, impl: Any) -> None:
    batch = batch_of(MASKS)
    moved = batch._replace(
        **{n: r.to("meta") for n, r in batch._asdict().items() if n != "lengths"}
    )
    rewards = moved.rewards.double().requires_grad_()
    options = moved.options() | {"observation": observation, "impl": impl}
    rows = gae(rewards, moved.values, batch.cu_seqlens.to("meta"), **options)
    for result in rows:
        assert (result.shape, result.dtype) == (batch.rewards.shape, torch.float32)
        assert result.device.type == "meta"
    (gradient,) = torch.autograd.grad(rows[0].sum(), rewards)
    assert (gradient.shape, gradient.dtype) == (rewards.shape, torch.float64)


def test_inputs_that_are_not_contiguous_are_taken_as_they_are(impl: Any) -> None:
    batch = batch_of(["gg..g", "g."])
    spread = {n: r.repeat_interleave(2)[::2] for n, r in batch._asdict().items() if n != "lengths"}
    for rows, expected in zip(
        gae(spread["rewards"], spread["values"], batch.cu_seqlens.repeat_interleave(2)[::2],
            gamma=spread["gammas"], lam=spread["lams"], loss_mask=spread["loss_mask"],
            bootstrap=spread["bootstrap"], impl=impl),
        gae(batch.rewards, batch.values, batch.cu_seqlens, impl=impl, **batch.options()),
        strict=True,
    ):  # fmt: skip
        assert_same_bits(rows, expected)


def test_inputs_are_left_as_they_are(impl: Any) -> None:
    batch = batch_of(MASKS)
    copies = [rows.clone() for rows in batch[1:]]
    gae(batch.rewards, batch.values, batch.cu_seqlens, impl=impl, **batch.options())
    for rows, copy in zip(batch[1:], copies, strict=True):
        assert_same_bits(rows, copy)


THREE = torch.ones(3)
LEAF = torch.ones(3, requires_grad=True)
TWO = torch.ones(2, requires_grad=True)


@pytest.mark.parametrize(
    ("error", "match", "changed"),
    [
        (TypeError, "^gae: rewards must be a tensor, got list", {"rewards": [1.0]}),
        (TypeError, "rewards must be float32 or float64, got int64", {"rewards": torch.arange(3)}),
        (ValueError, r"rewards must have 1 dimension.*\[1, 3\]", {"rewards": THREE[None]}),
        (TypeError, "values must be a tensor, got NoneType", {"values": None}),
        (TypeError, "values must be float32 or float64, got float16", {"values": THREE.half()}),
        (ValueError, r"^gae: values must have one entry for each of 3 token\(s\), got shape \[2\]",
         {"values": THREE[1:]}),
        (ValueError, "values is on meta but the other inputs are on cpu",
         {"values": THREE.to("meta")}),
        (ValueError, r"^gae: no gradient flows to values; pass values.det", {"values": LEAF}),
        (TypeError, "cu_seqlens must be int32, got int64", {"cu_seqlens": boundaries([3]).long()}),
        (ValueError, r"cu_seqlens must have segments \+ 1 entries, got none",
         {"cu_seqlens": boundaries([])[:0]}),
        (ValueError, r"cu_seqlens must bound 3 .*, got no segment",
         {"cu_seqlens": boundaries([])}),
        (TypeError, "gamma must be a number or a tensor, got '1'", {"gamma": "1"}),
        (TypeError, "gamma must be float32 or float64, got int64", {"gamma": torch.arange(2)}),
        (ValueError, r"lam must have one entry for each of 2 segment\(s\), got shape \[3\]",
         {"lam": THREE}),
        (ValueError, r"lam must have 1 dimension\(s\), got shape \[\]", {"lam": torch.tensor(1.0)}),
        (ValueError, "no gradient flows to lam", {"lam": TWO}),
        (TypeError, "loss_mask must be bool, got int64", {"loss_mask": torch.arange(3)}),
        (ValueError, r"loss_mask must have one entry for each of 3 token\(s\)",
         {"loss_mask": torch.ones(2).bool()}),
        (ValueError, "^gae: observation must be one of 'carry', 'carry_drop', .*, got 'hold'",
         {"observation": "hold"}),
        (TypeError, "bootstrap must be a tensor, got float", {"bootstrap": 1.0}),
        (ValueError, "no gradient flows to bootstrap", {"bootstrap": TWO}),
        (ValueError, r"bootstrap must have one entry for each of 2 seg", {"bootstrap": THREE}),
        (TypeError, "^gae: max_seqlen must be an int or None, got True", {"max_seqlen": True}),
        (ValueError, "max_seqlen must not be negative, got -1", {"max_seqlen": -1}),
        (ValueError, "impl must be 'auto', .*, got 'numpy'", {"impl": "numpy"}),
    ],
)  # fmt: skip
def test_wrong_input_is_named(error: type[Exception], match: str, changed: dict[str, Any]) -> None:
    right = {"rewards": THREE, "values": THREE, "cu_seqlens": boundaries([2, 1])}
    with pytest.raises(error, match=match):
        gae(**(right | changed))


def test_constants_may_require_gradients_where_none_are_recorded() -> None:
    with torch.no_grad():
        advantages, _ = gae(LEAF, LEAF, boundaries([3]))
    assert not advantages.requires_grad
