"""`gae` against loops that other systems would recognise, a dense matrix, and their own outputs."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
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
from trajpack.kernels.credit.gae import gae
from trajpack.testing import assert_same_bits, boundaries

ORACLE = Path(__file__).parents[4] / "shared" / "oracles" / "credit.json.gz"
OF_OTHERS = ("carry", "carry_drop", "compact", "multiply")
"""Choices in which no value of a token that was not generated counts."""

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


def estimated(batch: Batch, observation: Any, impl: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = batch.options() | {"observation": observation, "impl": impl}
    return gae(batch.rewards, batch.values, batch.cu_seqlens, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_it_is_what_the_loop_says(observation: Any, dtype: torch.dtype, impl: Any) -> None:
    batch = batch_of(MASKS, dtype=dtype)
    for actual, exact in zip(
        estimated(batch, observation, impl), gae_of(batch, observation), strict=True
    ):
        assert_rounds(actual, exact)


def test_observations_differ_where_they_should() -> None:
    """So that no two names of the loops, nor of the op, can have been mixed up."""
    batch = batch_of(MASKS)
    results = [torch.cat(estimated(batch, name, "torch")) for name in OBSERVATIONS]
    for index, one in enumerate(results):
        for other in results[:index]:
            assert not torch.allclose(one, other)


@pytest.mark.parametrize("observation", ["carry", "carry_drop", "compact"])
def test_they_agree_where_rewards_are_on_generated_tokens(observation: Any, impl: Any) -> None:
    batch = batch_of(MASKS)
    batch = batch._replace(rewards=batch.rewards * batch.loss_mask)
    for actual, expected in zip(
        estimated(batch, observation, impl), estimated(batch, "carry", impl), strict=True
    ):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_it_is_a_matrix_of_powers_where_all_was_generated(
    length: int, observation: Any, impl: Any
) -> None:
    batch = batch_of(["g" * length], seed=length)
    gamma, lam, last = (float(rows[0]) for rows in batch[4:7])
    values = batch.values.double()
    following = torch.cat([values[1:], torch.tensor([last], dtype=torch.float64)])
    delta = batch.rewards.double() + gamma * following - values
    away = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    matrix = torch.where(away >= 0, (gamma * lam) ** away.clamp(min=0).double(), 0.0)
    exact = (matrix @ delta).numpy()
    advantages, returns = estimated(batch, observation, impl)
    assert_rounds(advantages, exact)
    assert_rounds(returns, exact + values.numpy())
    unmasked = gae(
        batch.rewards, batch.values, batch.cu_seqlens, gamma=gamma, lam=lam,
        bootstrap=batch.bootstrap, observation=observation, impl=impl,
    )  # fmt: skip
    assert_same_bits(unmasked[0], advantages)


def oracle_batches() -> list[dict[str, Any]]:
    if not ORACLE.exists():
        pytest.skip(f"{ORACLE.name}, outputs of other systems, is not there")
    return json.loads(gzip.decompress(ORACLE.read_bytes()))["gae"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_it_gives_what_other_systems_give(observation: Any, impl: Any) -> None:
    """verl, miles, slime, OpenRLHF and open-instruct; they put anything out where 0 is ours."""
    checked = 0
    for case in oracle_batches():
        cu_seqlens = torch.tensor(case["cu_seqlens"], dtype=torch.int32)
        if impl == "triton" and cu_seqlens[-1] >= 100:
            continue
        rewards, values = (torch.tensor(case[name]) for name in ("rewards", "values"))
        mask = torch.tensor(case["loss_mask"]).bool()
        rates = {name: case[name] for name in ("gamma", "lam")}
        actual = gae(
            rewards, values, cu_seqlens, **rates, loss_mask=mask, observation=observation, impl=impl
        )
        expected = case["expected"][observation.removesuffix("_drop")]
        for rows, name in zip(actual, ("advantages", "returns"), strict=True):
            other = torch.where(mask, torch.tensor(expected[name]), 0.0)
            torch.testing.assert_close(rows, other, rtol=1e-5, atol=1e-5)
        checked += 1
    assert checked == (24 if impl == "torch" else 10)


@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_nothing_is_given_to_what_was_not_generated(observation: Any, impl: Any) -> None:
    batch = batch_of(MASKS)
    for rows in estimated(batch, observation, impl):
        assert_same_bits(rows[~batch.loss_mask], torch.zeros(int((~batch.loss_mask).sum())))
        assert rows[batch.loss_mask].all()


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1], [0, 1, 0]])
def test_short_sequences_work(lengths: list[int], observation: Any, impl: Any) -> None:
    batch = batch_of(["g" * length for length in lengths])
    advantages, returns = estimated(batch, observation, impl)
    following = batch.gammas * batch.bootstrap.double()
    exact = (batch.rewards + following[torch.tensor(lengths) == 1]).numpy()
    assert_rounds(returns, exact)
    assert_rounds(advantages, exact - batch.values.double().numpy())


@pytest.mark.parametrize(
    ("observation", "advantages", "returns"),
    [
        ("carry", [3.375, 0, 5.5, 0], [4.375, 0, 7.5, 0]),
        ("carry_drop", [1.875, 0, 1.5, 0], [2.875, 0, 3.5, 0]),
        ("compact", [2.875, 0, 5.5, 0], [3.875, 0, 7.5, 0]),
    ],
)
def test_a_reward_on_an_observation_goes_where_the_name_says(
    observation: Any, advantages: list[float], returns: list[float], impl: Any
) -> None:
    """γ = 1 and λ = 1/4, so that each number can be found by hand."""
    rewards, values = torch.tensor([0.5, 0.5, 1.5, 4.0]), torch.tensor([1.0, 9.0, 2.0, 9.0])
    result = gae(
        rewards, values, boundaries([4]), gamma=1.0, lam=0.25, bootstrap=torch.tensor([2.0]),
        loss_mask=torch.tensor([True, False, True, False]), observation=observation, impl=impl,
    )  # fmt: skip
    assert [rows.tolist() for rows in result] == [advantages, returns]


@pytest.mark.parametrize("observation", ["carry", "carry_drop", "compact"])
def test_a_reward_before_all_that_was_generated_belongs_to_nobody(
    observation: Any, impl: Any
) -> None:
    batch = batch_of(["..gg", "gg", "..."])
    without = batch.rewards.clone()
    without[torch.tensor([0, 1, 6, 7, 8])] = 0.0
    for actual, expected in zip(
        estimated(batch, observation, impl),
        estimated(batch._replace(rewards=without), observation, impl),
        strict=True,
    ):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_no_number_leaks_into_another_sequence(observation: Any, poison: float, impl: Any) -> None:
    batch = batch_of(["gg..g", "g.gg.", "..ggg."])
    expected = estimated(batch, observation, impl)
    for rows, name in ((batch.rewards, "rewards"), (batch.values, "values")):
        spoilt = rows.clone()
        spoilt[5:10] = poison
        for actual, clean in zip(
            estimated(batch._replace(**{name: spoilt}), observation, impl), expected, strict=True
        ):
            assert_same_bits(actual[:5], clean[:5])
            assert_same_bits(actual[10:], clean[10:])


@pytest.mark.parametrize("observation", OF_OTHERS)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_no_value_of_an_observation_counts(observation: Any, impl: Any) -> None:
    batch = batch_of(MASKS)
    spoilt = batch._replace(values=torch.where(batch.loss_mask, batch.values, math.nan))
    for actual, expected in zip(
        estimated(spoilt, observation, impl), estimated(batch, observation, impl), strict=True
    ):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("observation", ["carry_drop", "multiply"])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_no_reward_of_an_observation_counts_where_it_is_lost(observation: Any, impl: Any) -> None:
    batch = batch_of(MASKS)
    spoilt = batch._replace(rewards=torch.where(batch.loss_mask, batch.rewards, math.nan))
    for actual, expected in zip(
        estimated(spoilt, observation, impl), estimated(batch, observation, impl), strict=True
    ):
        assert_same_bits(actual, expected)


def test_one_rate_is_the_same_rate_for_each(impl: Any) -> None:
    batch = batch_of(MASKS)
    count = len(MASKS)
    tensors = {"gamma": torch.full((count,), 0.75), "lam": torch.full((count,), 0.5).double()}
    inputs = batch.rewards, batch.values, batch.cu_seqlens
    numbers = gae(*inputs, gamma=0.75, lam=0.5, loss_mask=batch.loss_mask, impl=impl)
    rows = gae(*inputs, **tensors, loss_mask=batch.loss_mask, impl=impl)
    for actual, expected in zip(rows, numbers, strict=True):
        assert_same_bits(actual, expected)


def exact_walk(batch: Batch, gamma: float, lam: float) -> np.ndarray:
    """Return the advantages of one sequence, all of it generated, in extended precision."""
    rewards, values = (rows.double().numpy().astype(np.longdouble) for rows in batch[1:3])
    advantages, running, following = np.zeros_like(values), np.longdouble(0), np.longdouble(0)
    for t in reversed(range(len(values))):
        delta = rewards[t] + np.longdouble(gamma) * following - values[t]
        running = delta + np.longdouble(gamma) * np.longdouble(lam) * running
        advantages[t], following = running, values[t]
    return advantages


@pytest.mark.parametrize("lam", [1.0, 0.95])
@pytest.mark.parametrize("length", [131_072, 300])
def test_a_long_sequence_loses_no_precision(length: int, lam: float, impl: Any) -> None:
    if impl == "triton" and length > 300:
        pytest.skip("the interpreter takes a minute; the same sums are made of 300 tokens")
    batch = batch_of(["g" * length])
    rows = gae(batch.rewards, batch.values, batch.cu_seqlens, gamma=0.9999, lam=lam, impl=impl)
    exact = exact_walk(batch, 0.9999, lam).astype(np.float64)
    error = np.abs(rows[0].double().numpy() - exact)
    assert (error / np.abs(exact)).max() < 1e-5
    assert (error <= np.spacing(np.abs(exact).astype(np.float32)) + 1e-10).all()
    assert_rounds(rows[1], exact + batch.values.double().numpy(), magnitude=1000.0)
