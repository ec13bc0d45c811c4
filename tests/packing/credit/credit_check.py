"""A batch with advantages beside loops over its trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.packing.credit.credit_cases import (
    EVERY,
    KL,
    generated,
    given_beside,
    inputs_of,
    is_whitened,
    over_tokens,
)
from tests.packing.credit.credit_loops import Given, of_tokens
from tests.packing.credit.group_loops import of_groups, spread, turn_returns_of, valid_of
from trajpack import GAE, GRPO, PackedBatch, Trajectory, TurnGAE, pack
from trajpack.packing.credit import estimators
from trajpack.packing.credit.advantages import METRICS
from trajpack.testing import assert_same_bits

MORE = {
    "GAE, k3": GAE(0.9, 0.8, kl=KL["k3"]),
    "GAE, ignore, mask": GAE(0.9, 0.8, "ignore", truncated="mask"),
    "TurnGAE, bootstrap": TurnGAE(0.9, 0.8, truncated="bootstrap", reward_clip=0.5),
    "GRPO, mask": GRPO(truncated="mask"),
}
"""More forms, by what is asked for beside."""


def expected_of(
    trajectories: Sequence[Trajectory], estimator: Any, given: Given, with_scores: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return advantages before they are whitened, which tokens count, and returns."""
    of_turns = spread(trajectories, [turn_returns_of(t) for t in trajectories])
    valid = valid_of(trajectories, estimator)
    counts = spread(
        trajectories, [[own] * len(t.turns) for own, t in zip(valid, trajectories, strict=True)]
    )
    if over_tokens(estimator):
        advantages, returns = of_tokens(trajectories, estimator, given)
    elif isinstance(estimator, estimators.GroupEstimator):
        advantages, returns = of_groups(trajectories, estimator, given, with_scores), of_turns
    else:
        advantages, returns = of_turns, of_turns
    return np.where(counts, advantages, 0.0), np.array(counts, bool), np.array(returns)


def whitened(advantages: np.ndarray, counts: np.ndarray, ddof: int) -> np.ndarray:
    """Return the same with mean 0 and standard deviation 1 over what counts."""
    own = advantages[counts]
    return np.where(counts, (advantages - own.mean()) / own.std(ddof=ddof), 0.0)


def check(
    trajectories: Sequence[Trajectory],
    estimator: Any,
    impl: Any = "torch",
    layout: Any = "merged",
    with_scores: bool = False,
) -> PackedBatch:
    """Raise unless a batch's advantages, returns and metrics are those of the loops."""
    given = given_beside(trajectories)
    advantages, counts, returns = expected_of(trajectories, estimator, given, with_scores)
    batch = pack(trajectories, layout, device="cpu")
    inputs = inputs_of(batch, estimator, given)
    if with_scores:
        inputs["scores"] = torch.tensor(given.scores)
    credited = batch.with_advantages(estimator, impl=impl, **inputs)
    own = advantages[counts]
    measured = [len(own), own.mean(), own.size * own.var(), own.min(), own.max()]
    assert credited.metric_names == METRICS
    assert credited.metrics is not None
    np.testing.assert_allclose(credited.metrics, measured, 1e-4, 1e-5)
    if is_whitened(estimator):
        advantages = whitened(advantages, counts, estimator.ddof)
    for name, numbers in (("advantages", advantages), ("returns", returns)):
        rows = getattr(credited, name)
        assert rows.dtype == torch.float32
        np.testing.assert_allclose(generated(batch, rows), numbers, 2e-5, 2e-5, err_msg=name)
    return credited


def named(name: str) -> Any:
    """Return an estimator by its name in `EVERY` or `MORE`."""
    return (EVERY | MORE)[name]


def credited(
    trajectories: Sequence[Trajectory],
    estimator: Any,
    layout: Any = "merged",
    beside: Given | None = None,
    impl: Any = "auto",
) -> PackedBatch:
    """Return trajectories packed, with advantages."""
    batch = pack(trajectories, layout, device="cpu")
    beside = given_beside(trajectories) if beside is None else beside
    return batch.with_advantages(estimator, impl=impl, **inputs_of(batch, estimator, beside))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, estimator: Any) -> None:
    """Assert the same bits, but for rounding where a batch's moments were made in two orders."""
    if is_whitened(estimator):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    else:
        assert_same_bits(actual, expected)
