"""The gradient of `gae` with respect to rewards, against the transpose of its Jacobian."""

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
from trajpack.testing import assert_same_bits

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
