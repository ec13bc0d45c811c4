"""`discounted_returns` of tokens, with a mask: against loops, and as an operator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.credit.token_loops import (
    MASKS,
    OBSERVATIONS,
    Batch,
    assert_rounds,
    batch_of,
    gae_of,
    small_blocks,
)
from trajpack.kernels.credit.discounted_returns import discounted_returns
from trajpack.testing import assert_same_bits, boundaries, returns_by_loop

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


def discounted(batch: Batch, observation: Any, impl: Any) -> torch.Tensor:
    return discounted_returns(
        batch.rewards, batch.cu_seqlens, batch.gammas, impl,
        loss_mask=batch.loss_mask, observation=observation,
    )  # fmt: skip


def without_values(batch: Batch) -> Batch:
    """Return what makes the returns of GAE those of rewards alone."""
    zeros, ones = torch.zeros_like(batch.bootstrap), torch.ones_like(batch.lams)
    return batch._replace(values=batch.values * 0, bootstrap=zeros, lams=ones)


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_it_is_what_the_loop_says(observation: Any, impl: Any) -> None:
    batch = batch_of(MASKS, dtype=torch.float64)
    exact = gae_of(without_values(batch), observation)[1]
    assert_rounds(discounted(batch, observation, impl), exact)


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        ("carry", [1 + 1 + 11 / 2, 0, 11, 0]),
        ("carry_drop", [1 + 4 / 2, 0, 4, 0]),
        ("compact", [1 + 11 / 2, 0, 11, 0]),
        ("ignore", [1 + 1 / 2 + 7.5 / 4, 0, 7.5, 0]),
        ("multiply", [1 + 4 / 4, 0, 4, 0]),
        ("reset", [1 + 1 / 2, 0, 7.5, 0]),
    ],
)
def test_the_numbers_can_be_found_by_hand(
    observation: Any, expected: list[float], impl: Any
) -> None:
    """Half of what comes later counts; the second and the last reward are on observations."""
    rewards = torch.tensor([1.0, 1.0, 4.0, 7.0])
    mask = torch.tensor([True, False, True, False])
    returns = discounted_returns(
        rewards, boundaries([4]), 0.5, impl, loss_mask=mask, observation=observation
    )
    assert returns.tolist() == expected


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_a_mask_of_all_tokens_is_no_mask(observation: Any, impl: Any) -> None:
    batch = batch_of(["g" * 20, "", "g", "ggg"])
    exact = returns_by_loop(batch.rewards.tolist(), batch.lengths, batch.gammas.tolist())
    assert_rounds(discounted(batch, observation, impl), exact)
    without = discounted_returns(
        batch.rewards, batch.cu_seqlens, batch.gammas, impl, observation=observation
    )
    assert_rounds(without, exact)


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_a_sequence_has_the_same_bits_in_any_company(observation: Any, impl: Any) -> None:
    batch = batch_of(MASKS)
    order = np.random.default_rng(0).permutation(len(MASKS)).tolist()
    together = discounted(batch, observation, impl).split(batch.lengths)
    shuffled = discounted(batch.taken(order), observation, impl)
    assert_same_bits(shuffled, torch.cat([together[at] for at in order]))


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_no_number_leaks_into_another_sequence(observation: Any, impl: Any) -> None:
    batch = batch_of(["gg..g", "g.gg.", "..ggg."])
    spoilt = batch.rewards.clone()
    spoilt[5:10] = math.nan
    clean, actual = (
        discounted(each, observation, impl) for each in (batch, batch._replace(rewards=spoilt))
    )
    assert_same_bits(actual[:5], clean[:5])
    assert_same_bits(actual[10:], clean[10:])


@pytest.mark.parametrize("lengths", [[], [0], [0, 1, 0]])
def test_short_sequences_work(lengths: list[int], impl: Any) -> None:
    batch = batch_of(["g" * length for length in lengths])
    assert_same_bits(discounted(batch, "carry", impl), batch.rewards)


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_the_gradient_is_the_transpose(observation: Any, impl: Any) -> None:
    masks = ["..gg..g.", "g", "", "...", "gg.g"]
    batch = without_values(batch_of(masks, dtype=torch.float64))
    num = len(batch.rewards)
    columns = [
        gae_of(batch._replace(rewards=torch.eye(num, dtype=torch.float64)[at]), observation)[1]
        for at in range(num)
    ]
    given = torch.from_numpy(np.random.default_rng(1).standard_normal(num)).float()
    rewards = batch.rewards.requires_grad_()
    returns = discounted(batch._replace(rewards=rewards), observation, impl)
    (gradient,) = torch.autograd.grad(returns, rewards, given)
    assert gradient.dtype == torch.float64
    assert_rounds(gradient.float(), np.array(columns) @ given.double().numpy())
