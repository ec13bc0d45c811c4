"""`gae` against loops, a dense matrix, a Jacobian and other systems."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from functools import cache
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
from tests.support.slow import slow_after
from trajpack.kernels.credit.gae import gae
from trajpack.testing import assert_same_bits

ORACLE = Path(__file__).parents[4] / "shared" / "oracles" / "credit.json.gz"
DTYPES = pytest.mark.parametrize(
    ("observation", "dtype"),
    slow_after(
        3,
        [*((one, torch.float32) for one in OBSERVATIONS[::-1]), ("carry", torch.float64)],
    ),
)
"""Each choice, and each type: numbers are converted as they are loaded."""


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


def estimated(batch: Batch, observation: Any, impl: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = batch.options() | {"observation": observation, "impl": impl}
    return gae(batch.rewards, batch.values, batch.cu_seqlens, **options)


def oracle_batches() -> list[dict[str, Any]]:
    if not ORACLE.exists():
        pytest.skip(f"{ORACLE.name}, outputs of other systems, is not there")
    return json.loads(gzip.decompress(ORACLE.read_bytes()))["gae"]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_it_equals_other_systems(observation: Any, impl: Any) -> None:
    """verl, miles, slime, OpenRLHF and open-instruct; they put anything out where 0 is ours."""
    checked = 0
    for case in oracle_batches():
        cu_seqlens = torch.tensor(case["cu_seqlens"], dtype=torch.int32)
        if impl == "triton" and cu_seqlens[-1] >= 100:
            continue
        rewards, values = (torch.tensor(case[name]) for name in ("rewards", "values"))
        mask = torch.tensor(case["loss_mask"]).bool()
        count = len(cu_seqlens) - 1
        rates = {
            name: torch.full((count,), case[name], dtype=torch.float64) for name in ("gamma", "lam")
        }
        actual = gae(
            rewards, values, cu_seqlens, **rates, loss_mask=mask, bootstrap=torch.zeros(count),
            observation=observation, impl=impl,
        )  # fmt: skip
        expected = case["expected"][observation.removesuffix("_drop")]
        for rows, name in zip(actual, ("advantages", "returns"), strict=True):
            other = torch.where(mask, torch.tensor(expected[name]), 0.0)
            torch.testing.assert_close(rows, other, rtol=1e-5, atol=1e-5)
        checked += 1
    assert checked == (24 if impl == "torch" else 10)


@pytest.mark.parametrize(
    ("observation", "name"),
    [
        *((one, "values") for one in ("carry", "carry_drop", "compact", "multiply")),
        ("carry_drop", "rewards"),
        ("multiply", "rewards"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_an_observation_loses_does_not_count(observation: Any, name: str, impl: Any) -> None:
    batch = batch_of(MASKS)
    rows = torch.where(batch.loss_mask, getattr(batch, name), math.nan)
    spoilt = batch._replace(**{name: rows})
    for actual, expected in zip(
        estimated(spoilt, observation, impl), estimated(batch, observation, impl), strict=True
    ):
        assert_same_bits(actual, expected)


def test_rates_of_float32_are_multiplied_in_float64(impl: Any) -> None:
    """Two rewards cancel but for rounding."""
    batch = batch_of(["g" * 20, "ggg"])
    rates = {"gamma": torch.tensor([0.99, 0.9]), "lam": torch.tensor([0.95, 0.7])}
    gamma, lam = (float(rate[0]) for rate in rates.values())
    rewards = torch.zeros(23, dtype=torch.float64)
    rewards[0], rewards[19] = -1e6 * (gamma * lam) ** 19, 1e6
    found, _ = gae(rewards, torch.zeros_like(rewards), batch.cu_seqlens, impl=impl, **rates)
    assert abs(float(found[0])) < 1e-6


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
        pytest.skip("it takes a minute on the executor; the same sums are made of 300 tokens")
    batch = batch_of(["g" * length])
    rows = gae(batch.rewards, batch.values, batch.cu_seqlens, gamma=0.9999, lam=lam, impl=impl)
    exact = exact_walk(batch, 0.9999, lam).astype(np.float64)
    error = np.abs(rows[0].double().numpy() - exact)
    assert (error / np.abs(exact)).max() < 1e-5
    assert (error <= np.spacing(np.abs(exact).astype(np.float32)) + 1e-10).all()
    assert_rounds(rows[1], exact + batch.values.double().numpy(), magnitude=1000.0)


def test_td_lambda_is_its_own_recurrence(impl: Any) -> None:
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
    _, actual = gae(batch.rewards, batch.values, batch.cu_seqlens, impl=impl, **batch.options())
    assert_rounds(actual, np.array(exact))


"""The gradient of `gae` with respect to rewards, against the transpose of its Jacobian."""

GRADIENT_MASKS = ("..gg..g.", "g", "", "...", "gg.g", ".g", "gggggggggg")


@cache
def jacobians_of_masks(observation: str, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return what each unit of reward adds to advantages and returns; they are linear in it."""
    batch = batch_of(GRADIENT_MASKS, dtype=dtype)
    still = batch._replace(values=batch.values * 0, bootstrap=batch.bootstrap * 0)
    units = torch.eye(len(batch.rewards), dtype=torch.float64)
    columns = [gae_of(still._replace(rewards=unit), observation) for unit in units]
    advantages, returns = zip(*columns, strict=True)
    return np.array(advantages).T, np.array(returns).T


@DTYPES
def test_the_gradient_is_the_transpose(observation: Any, dtype: torch.dtype, impl: Any) -> None:
    batch = batch_of(GRADIENT_MASKS, dtype=dtype)
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
