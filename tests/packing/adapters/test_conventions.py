"""Trainers' own functions of credit and balance beside the options of docs/credit/systems.md."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trajpack import plan_micro_batches
from trajpack.kernels import (
    Correction,
    Rejection,
    discounted_returns,
    group_advantages,
    importance_weights,
)

NUM = 80


def rows_of(rng):
    """Log-probabilities of two policies in rows of some tokens each, and which of them count."""
    num, width = int(rng.integers(1, 6)), int(rng.integers(1, 12))
    rollout = -rng.exponential(1.0, (num, width))
    ours = rollout + rng.normal(0, rng.choice([0.1, 0.5, 3.0]), (num, width))
    mask = rng.random((num, width)) < 0.7
    mask[0, 0] = True
    return *(torch.from_numpy(each).float() for each in (ours, rollout)), torch.from_numpy(mask)


@pytest.mark.parametrize("threshold", ["0.5_2.0", "0.2_1.1", "0.9_8.0", "1.5"])
@pytest.mark.parametrize(
    ("option", "level"),
    [("token_k1", "token"), ("seq_sum_k1", "segment"), ("seq_mean_k1", "geometric")],
)
def test_verls_rejection_bounds_the_inverse_ratio(verl, option, level, threshold):
    reject = verl.load("verl.trainer.ppo.rollout_corr_helper").compute_rollout_rejection_mask
    high = float(threshold.split("_")[-1])
    low = float(threshold.split("_")[0]) if "_" in threshold else 1 / high
    rule = Correction(level="none", rejection=Rejection.of_inverse(low, high, level))
    dropped = 0
    for seed in range(NUM):
        ours, rollout, mask = rows_of(np.random.default_rng(seed))
        theirs, _ = reject(ours - rollout, mask.float(), option, threshold)
        ends = torch.arange(mask.shape[0] + 1, dtype=torch.int32) * mask.shape[1]
        flat = (each.flatten() for each in (ours, rollout, mask))
        weights, _ = importance_weights(*flat, rule, segments=ends)
        assert torch.equal(weights.view_as(theirs), theirs)
        dropped += int((mask & (theirs == 0)).sum())
    assert dropped > 30


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_areals_normalization_takes_its_deviation_about_the_baseline(peer, leave_one_out, ddof):
    normalization = peer("areal").load("areal.utils.data").Normalization
    for seed in range(NUM):
        rng = np.random.default_rng(seed)
        size, num_groups = int(rng.integers(2, 9)), int(rng.integers(1, 6))
        few = rng.integers(0, 2, size * num_groups)
        scores = torch.from_numpy(few if seed % 2 else rng.standard_normal(len(few))).float()
        settings = SimpleNamespace(
            mean_level="group", mean_leave1out=leave_one_out, std_level="group",
            std_unbiased=bool(ddof), group_size=size, eps=1e-5,
        )  # fmt: skip
        found = group_advantages(
            scores, torch.arange(num_groups).repeat_interleave(size), num_groups=num_groups,
            baseline="leave_one_out" if leave_one_out else "mean", scale="std_about_baseline",
            ddof=ddof, eps=1e-5,
        )  # fmt: skip
        theirs = normalization(settings)(scores.double())  # in float32 it rounds the mean
        torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-5)


@pytest.fixture
def skyrl_estimators(skyrl):
    """SkyRL's module of estimators."""
    return skyrl.load("skyrl.backends.skyrl_train.utils.ppo_utils")


def test_skyrls_maxrl_divides_by_a_mean_of_either_sign(skyrl_estimators):
    for seed in range(NUM):
        rng = np.random.default_rng(seed)
        index = rng.integers(0, 4, int(rng.integers(1, 15)))
        scores = torch.from_numpy(rng.standard_normal(len(index))).float()
        mask = torch.ones(len(index), 1)
        theirs, _ = skyrl_estimators.compute_maxrl_advantage(scores[:, None], mask, index)
        found = group_advantages(
            scores, torch.from_numpy(index), num_groups=4, scale="signed_mean", eps=1e-6
        )
        torch.testing.assert_close(found, theirs[:, 0], rtol=2e-3, atol=1e-4)


def test_skyrls_reinforce_plus_plus_ends_a_return_at_an_observation(skyrl_estimators):
    for seed in range(NUM):
        rng = np.random.default_rng(seed)
        num, width = int(rng.integers(2, 5)), int(rng.integers(2, 12))
        mask = torch.from_numpy(rng.random((num, width)) < 0.6)
        mask[:, :2] = True
        rewards = torch.from_numpy(rng.standard_normal((num, width))).float() * mask
        _, theirs = skyrl_estimators.compute_reinforce_plus_plus_outcome_advantage(
            rewards.clone(), mask.float(), 0.9
        )
        ends = torch.arange(num + 1, dtype=torch.int32) * width
        found = discounted_returns(
            rewards.flatten(), ends, 0.9, loss_mask=mask.flatten(), observation="reset"
        )
        torch.testing.assert_close(found.view_as(theirs), theirs * mask, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("equal_size", [False, True])
def test_balance_is_not_behind_verls_own(verl, equal_size):
    balance = verl.load("verl.utils.seqlen_balancing").karmarkar_karp
    ours, theirs = [], []
    for seed in range(NUM):
        rng = np.random.default_rng(seed)
        num_bins, each = (int(number) for number in rng.integers(2, 9, 2))
        lengths = rng.lognormal(6.5, 0.8, num_bins * each).astype(np.int64) + 1
        most = each if equal_size else None
        plan = plan_micro_batches(
            lengths, int(lengths.sum()), min_bins=num_bins, max_sequences=most,
            algorithm="karmarkar_karp",
        )  # fmt: skip
        assert len(plan) == num_bins
        ours.append(plan.loads.max() / plan.loads.mean())
        loads = [
            int(lengths[held].sum()) for held in balance(lengths.tolist(), num_bins, equal_size)
        ]
        theirs.append(max(loads) * num_bins / sum(loads))
    ours, theirs = np.array(ours), np.array(theirs)
    assert (ours > theirs + 1e-12).sum() <= 1
    assert ours.mean() < theirs.mean()
