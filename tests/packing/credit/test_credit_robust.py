"""Credit where a caller did something unusual."""

import dataclasses

import pytest
import torch

from tests.packing.credit.credit_cases import some_trajectories
from trajpack import GAE, GPG, KLPenalty, Trajectory, Turn, TurnGAE, pack
from trajpack.kernels import group_advantages, masked_moments


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_credit_goes_to_what_turns_generated_whatever_became_of_the_mask(impl):
    batch = pack(some_trajectories(6), device="cpu")
    narrowed = dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    values = torch.linspace(-1, 1, batch.num_tokens)
    whole, other = (b.with_advantages(GAE(), values, impl=impl) for b in (batch, narrowed))
    assert torch.equal(other.advantages, whole.advantages)
    assert torch.equal(other.returns, whole.returns)
    assert other.metrics[0] == 0
    assert whole.metrics[0] == batch.num_generated


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of infinite results
@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_penalty_without_bound_is_not_nan(kind, impl):
    batch = pack([Trajectory("a", [Turn([1], [2, 3], [-1.0, -1.0], 1.0)])], device="cpu")
    ref = torch.tensor([0.0, 2.0, 2000.0])
    gae = GAE(gamma=0.5, lam=0.0, kl=KLPenalty(0.1, kind, None))
    advantages = batch.with_advantages(gae, torch.zeros(3), ref, impl=impl).advantages
    assert not advantages.isnan().any()
    assert advantages[1].isfinite()


@pytest.mark.parametrize("size", [1e-6, 1e-4, 9e-4, 2e-3])
def test_a_small_penalty_is_precise_in_the_kernel_too(size):
    batch = pack([Trajectory("a", [Turn([1], [2], [-1.0])])], device="cpu")
    ref = batch.rollout_logprobs.double() - size
    gae = GAE(kl=KLPenalty(1e6, "k3"))
    expected, got = (
        batch.with_advantages(gae, torch.zeros(2), ref, impl=impl).advantages
        for impl in ("torch", "triton")
    )
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_what_a_critic_learns_stays_where_trajectories_are_masked():
    turn = Turn([1], [2, 3], [-1.0, -1.0], 1.0)
    cut_off = dataclasses.replace(turn, truncated=True)
    batch = pack([Trajectory("a", [turn]), Trajectory("b", [cut_off])], device="cpu")
    values = torch.full((6,), 0.8)
    for estimator in (GAE(truncated="mask"), TurnGAE(truncated="mask")):
        credited = batch.with_advantages(estimator, values)
        assert not credited.advantages[4:].any()
        assert torch.equal(credited.returns[4:], credited.returns[1:3])


def test_what_counts_one_rank_alone_takes_no_sum_over_ranks():
    batch = pack(some_trajectories(6), device="cpu")
    with pytest.raises(ValueError, match="GPG takes no all_reduce: its factor counts this batch"):
        batch.with_advantages(GPG(), all_reduce=lambda sums: None)


def test_what_has_a_gradient_is_fine_where_none_is_recorded():
    scores = torch.ones(3, requires_grad=True)
    ids = torch.zeros(3, dtype=torch.int32)
    with torch.no_grad():
        assert not group_advantages(scores, ids, num_groups=1).any()
        assert masked_moments(scores, scores > 0)[0] == 3
