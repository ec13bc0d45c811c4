"""What estimators make of packed batches, beside loops over the trajectories."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.packing.credit_cases import (
    EVERY,
    KL,
    LAYOUTS,
    generated,
    given_beside,
    inputs_of,
    is_whitened,
    over_tokens,
    small_scans,
    some_trajectories,
)
from tests.packing.credit_loops import of_tokens
from tests.packing.group_loops import of_groups, spread, turn_returns_of, valid_of
from trajpack import GAE, TurnGAE, TurnReturns, VTrace, pack
from trajpack.packing import estimators, group_estimators
from trajpack.packing.credit import METRICS


def expected_of(trajectories, estimator, given, with_scores=False):
    """Advantages before they are whitened, which tokens count, and returns."""
    of_turns = spread(trajectories, [turn_returns_of(t) for t in trajectories])
    valid = valid_of(trajectories, estimator)
    counts = spread(
        trajectories, [[own] * len(t.turns) for own, t in zip(valid, trajectories, strict=True)]
    )
    if over_tokens(estimator):
        advantages, returns = of_tokens(trajectories, estimator, given)
        returns = np.where(counts, returns, 0.0)
    elif isinstance(estimator, group_estimators.GroupEstimator):
        advantages, returns = of_groups(trajectories, estimator, given, with_scores), of_turns
    else:
        advantages, returns = of_turns, of_turns
    return np.where(counts, advantages, 0.0), np.array(counts, bool), np.array(returns)


def whitened(advantages, counts):
    own = advantages[counts]
    return np.where(counts, (advantages - own.mean()) / own.std(ddof=1), 0.0)


def check(trajectories, estimator, impl="torch", layout="merged", **more):
    given = given_beside(trajectories)
    advantages, counts, returns = expected_of(trajectories, estimator, given, "scores" in more)
    batch = pack(trajectories, layout, device="cpu")
    inputs = inputs_of(batch, estimator, given) | more
    credited = batch.with_advantages(estimator, impl=impl, **inputs)
    own = advantages[counts]
    measured = [len(own), own.mean(), own.size * own.var(), own.min(), own.max()]
    assert credited.metric_names == METRICS
    np.testing.assert_allclose(credited.metrics, measured, 1e-4, 1e-5)
    if is_whitened(estimator):
        advantages = whitened(advantages, counts)
    for name, numbers in (("advantages", advantages), ("returns", returns)):
        rows = getattr(credited, name)
        assert rows.dtype == torch.float32
        np.testing.assert_allclose(generated(batch, rows), numbers, 2e-5, 2e-5, err_msg=name)
    return credited


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EVERY)
def test_every_estimator_gives_what_a_loop_gives(name, layout):
    for seed in range(3):
        check(some_trajectories(40, 12, seed), EVERY[name], "torch", layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EVERY)
def test_the_kernels_give_what_a_loop_gives(name, layout):
    with small_scans():
        check(some_trajectories(11, 7), EVERY[name], "triton", layout)
