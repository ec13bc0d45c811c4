"""`discounted_returns` of turns and of tokens, against loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.kernels.credit.token_loops import (
    MASKS,
    OBSERVATIONS,
    Batch,
    assert_rounds,
    batch_of,
    gae_of,
    small_blocks,
)
from tests.support.slow import slow, slow_after
from trajpack.kernels.credit.discounted_returns import discounted_returns
from trajpack.kernels.scan import credit_scan_triton
from trajpack.testing import assert_same_bits, boundaries, returns_by_loop

LENGTHS = [3, 0, 1, 63, 64, 65, 0, 128, 129, 2, 1, 1, 1, 1, 1, 1, 1, 40]  # more than one program


@pytest.fixture(scope="module", params=["torch", slow("triton"), "triton, rows"])
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of an implementation; the last one cuts segments into rows, the one before walks."""
    name, *rows = request.param.split(", ")
    with small_blocks(), pytest.MonkeyPatch.context() as patch:
        if not rows:
            patch.setattr(credit_scan_triton, "LONGEST_WALK", 1000)
        yield name


ONE_CUT = pytest.mark.parametrize("impl", ["torch", "triton, rows"], indirect=True)
"""Of what is computed for each token: segments are cut in the same way for all of it."""


def random_rewards(num: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(num)).to(dtype)


@given(
    lengths=st.lists(st.integers(0, 70), max_size=20),
    discounts=st.lists(st.floats(-1.2, 1.2), min_size=20, max_size=20),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15)
def test_any_lengths_and_discounts_equal_the_loop(
    impl: str, lengths: list[int], discounts: list[float], seed: int
) -> None:
    rewards = random_rewards(sum(lengths), seed)
    discounts = discounts[: len(lengths)]
    exact = returns_by_loop(rewards.numpy(), lengths, discounts)
    per_segment = torch.tensor(discounts, dtype=torch.float64)
    actual = discounted_returns(rewards, boundaries(lengths), per_segment, impl)
    assert_rounds(actual, exact, float(np.abs(exact).max(initial=0)))


@pytest.mark.parametrize("max_seqlen", [0, 3, 10**12])
def test_max_seqlen_changes_no_bit(impl: str, max_seqlen: int | None) -> None:
    rewards = random_rewards(sum(LENGTHS))
    expected = discounted_returns(rewards, boundaries(LENGTHS), 0.9, impl)
    actual = discounted_returns(rewards, boundaries(LENGTHS), 0.9, impl, max_seqlen=max_seqlen)
    assert_same_bits(actual, expected)


def test_a_gradient_that_is_expanded_is_read_right(impl: str) -> None:
    rewards = torch.zeros(3, requires_grad=True)
    discounted_returns(rewards, boundaries([3]), 0.5, impl).sum().backward()
    # entry t counts in the returns of entries 0 to t: 1, 1 + 1/2, 1 + 1/2 + 1/4
    assert rewards.grad is not None
    assert_same_bits(rewards.grad, torch.tensor([1.0, 1.5, 1.75]))


@pytest.mark.parametrize("discount", [0.9, 0.99999, 1.0, -0.9999])
def test_a_long_segment_loses_no_precision(impl: str, discount: float) -> None:
    lengths = [300_000, 5, 70_000] if impl == "torch" else [1000]  # the executor is slow
    rewards = random_rewards(sum(lengths))
    exact = returns_by_loop(rewards.numpy(), lengths, [discount] * len(lengths))
    actual = discounted_returns(rewards, boundaries(lengths), discount, impl)
    assert_rounds(actual, exact, np.abs(exact).max())


"""`discounted_returns` of tokens, with a mask: against loops, and as an operator."""


def discounted(batch: Batch, observation: Any, impl: Any) -> torch.Tensor:
    return discounted_returns(
        batch.rewards, batch.cu_seqlens, batch.gammas, impl,
        loss_mask=batch.loss_mask, observation=observation,
    )  # fmt: skip


def without_values(batch: Batch) -> Batch:
    """Return what makes the returns of GAE those of rewards alone."""
    zeros, ones = torch.zeros_like(batch.bootstrap), torch.ones_like(batch.lams)
    return batch._replace(values=batch.values * 0, bootstrap=zeros, lams=ones)


@ONE_CUT
@pytest.mark.parametrize("observation", slow_after(2, OBSERVATIONS[::-1]))
def test_returns_of_tokens_equal_the_loop(observation: Any, impl: Any) -> None:
    batch = batch_of(MASKS)
    exact = gae_of(without_values(batch), observation)[1]
    assert_rounds(discounted(batch, observation, impl), exact)


@ONE_CUT
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
    mask, discount = torch.tensor([True, False, True, False]), torch.tensor([0.5]).double()
    returns = discounted_returns(
        rewards, boundaries([4]), discount, impl, loss_mask=mask, observation=observation
    )
    assert returns.tolist() == expected


@ONE_CUT
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_the_gradient_of_tokens_is_the_transpose(observation: Any, impl: Any) -> None:
    masks = ["..gg..g.", "g", "", "...", "gg.g"]
    batch = without_values(batch_of(masks))
    num = len(batch.rewards)
    columns = [
        gae_of(batch._replace(rewards=torch.eye(num, dtype=torch.float64)[at]), observation)[1]
        for at in range(num)
    ]
    given = torch.from_numpy(np.random.default_rng(1).standard_normal(num)).float()
    rewards = batch.rewards.requires_grad_()
    returns = discounted(batch._replace(rewards=rewards), observation, impl)
    (gradient,) = torch.autograd.grad(returns, rewards, given)
    assert_rounds(gradient, np.array(columns) @ given.double().numpy())
