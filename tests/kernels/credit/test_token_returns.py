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


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(dynamic: bool) -> None:
    def loss(rewards: torch.Tensor, cu_seqlens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        returns = discounted_returns(rewards * 2, cu_seqlens, 0.5, loss_mask=mask)
        return returns.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for masks in (["g.g", ".gg."], ["g", "", "gg..g.gg"]):
        batch = batch_of(masks)
        eager, traced = (batch.rewards.clone().requires_grad_() for _ in range(2))
        loss(eager, batch.cu_seqlens, batch.loss_mask).backward()
        compiled(traced, batch.cu_seqlens, batch.loss_mask).backward()
        assert eager.grad is not None
        assert_same_bits(traced.grad, eager.grad)


@pytest.mark.parametrize("impl", ["auto", "torch", "triton"])
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_shapes_alone_are_enough_on_the_meta_device(observation: Any, impl: Any) -> None:
    rewards, cu_seqlens = torch.empty(7, device="meta"), boundaries([3, 4]).to("meta")
    mask = torch.empty(7, dtype=torch.bool, device="meta")
    returns = discounted_returns(
        rewards, cu_seqlens, 0.5, impl, loss_mask=mask, observation=observation
    )
    assert (returns.shape, returns.dtype, returns.device.type) == ((7,), torch.float32, "meta")


@pytest.mark.parametrize(
    ("error", "match", "changed"),
    [
        (TypeError, "^discounted_returns: loss_mask must be bool, got int64",
         {"loss_mask": torch.arange(3)}),
        (TypeError, "loss_mask must be a tensor, got list", {"loss_mask": [True]}),
        (ValueError, r"loss_mask must have one entry for each of 3 token\(s\), got shape \[2\]",
         {"loss_mask": torch.ones(2).bool()}),
        (ValueError, "loss_mask is on meta but",
         {"loss_mask": torch.ones(3, device="meta").bool()}),
        (ValueError, "^discounted_returns: observation must be one of .*, got 'hold'",
         {"observation": "hold"}),
        (ValueError, r"discount must have one entry for each of 1 segment\(s\)",
         {"discount": torch.ones(2)}),
    ],
)  # fmt: skip
def test_wrong_input_is_named(error: type[Exception], match: str, changed: dict[str, Any]) -> None:
    right = {"rewards": torch.ones(3), "cu_seqlens": boundaries([3]), "discount": 0.5}
    with pytest.raises(error, match=match):
        discounted_returns(**{**right, "loss_mask": torch.ones(3).bool(), **changed})
