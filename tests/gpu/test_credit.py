"""Credit on real hardware: every estimator as on the host, asynchronous, in a captured graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.conftest import no_waiting
from tests.packing.credit.credit_cases import (
    EVERY,
    KL,
    LAYOUTS,
    given_beside,
    inputs_of,
    some_trajectories,
)
from trajpack import GAE, GRPO, Trajectory, TurnGAE, VTrace, pack
from trajpack.kernels import gae
from trajpack.testing import assert_same_bits, boundaries

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
MORE: dict[str, Any] = {
    "GAE, k3": GAE(0.99, 0.95, kl=KL["k3"]),
    "GAE, k1, ignore, mask": GAE(0.99, 0.95, "ignore", kl=KL["k1"], truncated="mask"),
    "VTrace, bootstrap": VTrace(0.99, truncated="bootstrap", reward_clip=0.75),
    "TurnGAE, bootstrap": TurnGAE(truncated="bootstrap"),
    "GRPO, mask": GRPO(truncated="mask", reward_clip=0.75),
}
ESTIMATORS = EVERY | MORE
SIZES = {"short": (40, 12), "of two launches": (300, 160)}
"""Trajectories, and tokens of a turn's parts: up to 4,096 generated tokens, and more."""


def on_host_and_device(
    trajectories: list[Trajectory], layout: Any, estimator: Any
) -> tuple[Any, Any]:
    """A batch and what stands beside it, on the host and on the device."""
    host = pack(trajectories, layout, device="cpu")
    inputs = inputs_of(host, estimator, given_beside(trajectories))
    moved = {name: tensor.to(DEVICE) for name, tensor in inputs.items()}
    return (host, inputs), (pack(trajectories, layout, device=DEVICE), moved)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_gives_what_it_gives_on_the_host(name: str, size: str, layout: Any) -> None:
    trajectories, estimator = some_trajectories(*SIZES[size]), ESTIMATORS[name]
    (host, inputs), (batch, moved) = on_host_and_device(trajectories, layout, estimator)
    expected = host.with_advantages(estimator, **inputs)
    credited = batch.with_advantages(estimator, **moved)
    again = batch.with_advantages(estimator, **moved)
    for field in ("advantages", "returns"):
        actual = getattr(credited, field)
        torch.testing.assert_close(actual.cpu(), getattr(expected, field), rtol=1e-5, atol=1e-5)
        assert_same_bits(getattr(again, field), actual)
    torch.testing.assert_close(credited.metrics.cpu(), expected.metrics, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nothing_waits_for_the_device(name: str) -> None:
    estimator = ESTIMATORS[name]
    _, (batch, moved) = on_host_and_device(some_trajectories(40, 12), "merged", estimator)
    expected = batch.with_advantages(estimator, **moved)  # compiles
    with no_waiting():
        credited = batch.with_advantages(estimator, **moved)
    assert_same_bits(credited.advantages, expected.advantages)


def gae_by_loop(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Advantages of one sequence, in float64."""
    advantages, running, following = np.zeros(len(rewards)), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        running = rewards[t] + gamma * following - values[t] + gamma * lam * running
        advantages[t], following = running, values[t]
    return advantages


@pytest.mark.parametrize("lam", [0.95, 1.0])
@pytest.mark.parametrize("lengths", [[131_072], [70_000, 1, 0, 61_071]])
def test_a_long_scan_equals_the_float64_loop(lengths: list[int], lam: float) -> None:
    rng = np.random.default_rng(0)
    rewards, values = (rng.standard_normal(sum(lengths)).astype(np.float32) for _ in range(2))
    advantages, returns = gae(
        torch.from_numpy(rewards).to(DEVICE), torch.from_numpy(values).to(DEVICE),
        boundaries(lengths).to(DEVICE), gamma=0.9999, lam=lam,
    )  # fmt: skip
    cuts = np.cumsum(lengths)[:-1]
    parts = zip(
        *(np.split(rows.astype(np.float64), cuts) for rows in (rewards, values)), strict=True
    )
    exact = np.concatenate([gae_by_loop(*own, 0.9999, lam) for own in parts])
    for actual, expected in ((advantages, exact), (returns, exact + values)):
        error = np.abs(actual.cpu().double().numpy() - expected)
        assert error.max() <= 1e-6 * np.abs(expected).max()
        assert (error <= 1e-5 * np.abs(expected) + 1e-9 * np.abs(expected).max()).all()


def test_ranks_add_up_on_the_device() -> None:
    batch = pack(some_trajectories(40, 12), device=DEVICE)
    estimator = EVERY["TurnReturns, whitened"]
    twice = batch.with_advantages(estimator, all_reduce=lambda sums: sums.mul_(2))
    alone = batch.with_advantages(estimator)
    num = batch.num_generated
    # the same mean; of the squares, twice as many less one
    shrunk = (2 * (num - 1) / (2 * num - 1)) ** 0.5
    torch.testing.assert_close(twice.advantages * shrunk, alone.advantages, rtol=1e-5, atol=1e-5)
