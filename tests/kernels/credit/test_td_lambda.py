"""`td_lambda` against its own recurrence, and against the loops of all observations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.credit.token_loops import (
    MASKS,
    OBSERVATIONS,
    assert_rounds,
    batch_of,
    gae_of,
    small_blocks,
)
from trajpack.kernels.credit.discounted_returns import discounted_returns
from trajpack.kernels.credit.gae import td_lambda
from trajpack.testing import boundaries

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


def test_it_is_its_own_recurrence(impl: Any) -> None:
    batch = batch_of(["g" * 20, "", "g", "ggg"])
    exact = []
    for walk in batch.walks():
        target = following = walk.bootstrap
        targets = []
        for reward, value in zip(walk.rewards[::-1], walk.values[::-1], strict=True):
            target = reward + walk.gamma * ((1 - walk.lam) * following + walk.lam * target)
            following = value
            targets.append(target)
        exact += targets[::-1]
    actual = td_lambda(batch.rewards, batch.values, batch.cu_seqlens, impl=impl, **batch.options())
    assert_rounds(actual, np.array(exact))


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_it_is_what_the_loop_says(observation: Any, impl: Any) -> None:
    batch = batch_of(MASKS)
    actual = td_lambda(
        batch.rewards, batch.values, batch.cu_seqlens, observation=observation, impl=impl,
        **batch.options(),
    )  # fmt: skip
    assert_rounds(actual, gae_of(batch, observation)[1])


def test_full_traces_leave_the_discounted_return() -> None:
    batch = batch_of(MASKS)
    named = {"loss_mask": batch.loss_mask, "observation": "ignore"}
    actual = td_lambda(batch.rewards, batch.values, batch.cu_seqlens, gamma=0.5, lam=1.0, **named)
    expected = discounted_returns(batch.rewards, batch.cu_seqlens, 0.5, **named)
    assert_rounds(actual, expected.double().numpy())


def test_no_traces_leave_one_step() -> None:
    batch = batch_of(["gggg"])
    actual = td_lambda(batch.rewards, batch.values, batch.cu_seqlens, gamma=0.5, lam=0.0)
    following = torch.cat([batch.values[1:], torch.zeros(1)]).double()
    assert_rounds(actual, (batch.rewards + 0.5 * following).numpy())


def test_the_gradient_is_that_of_the_returns() -> None:
    rewards = torch.zeros(3, requires_grad=True)
    values = torch.zeros(3)
    td_lambda(rewards, values, boundaries([2, 1]), gamma=0.5, lam=0.5).sum().backward()
    assert rewards.grad is not None
    assert rewards.grad.tolist() == [1.0, 1.25, 1.0]
