"""Estimators of packed batches, against loops over the trajectories."""

import dataclasses

import pytest
import torch

from tests.packing.credit.credit_cases import (
    EVERY,
    KL,
    LAYOUTS,
    small_scans,
    some_trajectories,
)
from tests.packing.credit.credit_oracle import check
from tests.support.slow import slow, slow_after
from trajpack import (
    GAE,
    GRPO,
    GiGPO,
    GroupEstimator,
    KLPenalty,
    Trajectory,
    Turn,
    TurnGAE,
    TurnReturns,
    pack,
)

RARE = (", reset", ", ignore", "ReinforcePlusPlus, carry")
IN_KERNELS = [
    (slow if name.endswith(RARE) else pytest.param)(name, LAYOUTS[index % 2])
    for index, name in enumerate(EVERY)
    if not name.endswith(("carry_drop", "compact", "multiply"))  # the scans' own tests have them
]
TOKENS = {name: EVERY[name] for name in ("GAE", "GAE, ignore", "TurnGAE", "VTrace, carry")}
TOKENS |= {"ReinforcePlusPlus": EVERY["ReinforcePlusPlus"]}
OF_GROUPS = "GRPO", "opo", "gpg", "pass_at_k, std", "GiGPO", "reinforce_plus_plus_baseline"
GROUPS = {name: EVERY[name] for name in OF_GROUPS}
OF_ALL_KINDS = {*TOKENS, *GROUPS, "TurnReturns, whitened"}
MASK, BOOTSTRAP, CLIP = {"truncated": "mask"}, {"truncated": "bootstrap"}, {"reward_clip": 0.75}
IN_KERNELS_TOO = [
    ("GAE", MASK), ("GRPO", CLIP), ("TurnGAE", BOOTSTRAP), ("VTrace, carry", {"kl": KL["k3"]}),
    ("GAE", BOOTSTRAP), ("GAE", CLIP), ("GAE", {"kl": KL["k1"]}), ("TurnGAE", {"kl": KL["k2"]}),
    ("TurnGAE", MASK), ("VTrace, carry", BOOTSTRAP), ("GRPO", MASK), ("GiGPO", MASK),
]  # fmt: skip
"""Estimators, and an option that their kernels compute."""


def forms_of(name):
    """Return an estimator with each of its options, and whether scores replace the rewards."""
    options = [{}, {}, {}]
    options += [MASK] * (name in OF_ALL_KINDS)
    options += [CLIP] * (name in {*TOKENS, *GROUPS} - {"GiGPO"})
    options += [BOOTSTRAP, *({"kl": kl} for kl in KL.values())] * (name in TOKENS)
    forms = [(dataclasses.replace(EVERY[name], **each), False) for each in options]
    if name in GROUPS:
        clips = [{}] if name == "GiGPO" else [{}, CLIP]
        forms += [(dataclasses.replace(EVERY[name], **each), True) for each in clips]
    return forms


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EVERY)
def test_every_form_of_an_estimator_equals_a_loop(name, layout):
    for seed, (estimator, with_scores) in enumerate(forms_of(name)):
        check(some_trajectories(40, 12, seed), estimator, "torch", layout, with_scores)


@pytest.mark.parametrize(("name", "layout"), IN_KERNELS)
def test_the_kernels_equal_a_loop(name, layout):
    with small_scans():
        check(some_trajectories(9, 6), EVERY[name], "triton", layout)


@pytest.mark.parametrize(("name", "option"), slow_after(6, IN_KERNELS_TOO))
def test_the_kernels_of_an_option_equal_a_loop(name, option):
    with small_scans():
        check(some_trajectories(8, 6), dataclasses.replace(EVERY[name], **option), "triton")


@pytest.mark.parametrize("name", ["GAE", "TurnGAE", "VTrace, carry"])
def test_the_kernels_equal_a_loop_in_one_launch(name):
    with small_scans(longest=1000):
        check(some_trajectories(8, 6), EVERY[name], "triton")


def test_a_penalty_without_clamp_is_unbounded_and_without_logprobs_of_the_rollout():
    turn = Turn([1], [2, 3], [-1.0, -100.0])
    batch = pack([Trajectory("a", [turn])], device="cpu")
    ref = torch.tensor([float("nan"), -1.5, -50.0])
    for clamp, last in ((None, 50.0), (10.0, 10.0)):
        rule = dataclasses.replace(KL["k1"], coefficient=1.0, clamp=clamp)
        credited = batch.with_advantages(
            GAE(lam=1.0, kl=rule), values=torch.zeros(3), ref_logprobs=ref
        )
        assert credited.advantages.tolist() == [0.0, last - 0.5, last]


def credit_by_hand(turns, estimator, layout="merged", **inputs):
    batch = pack([Trajectory("a", turns)], layout, device="cpu")
    return batch.with_advantages(estimator, values=torch.zeros(batch.num_tokens), **inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reward_of_a_turn_without_tokens_goes_to_the_token_before(layout):
    turns = [Turn([1], [2, 3], [0, 0], 1.0), Turn([9], [], [], 4.0), Turn([8], [], [], 16.0)]
    none_yet = [Turn([7], [], [], 64.0), *turns]
    for given_turns, skipped in ((turns, 0), (none_yet, 1)):
        for estimator in (GAE(1.0, 0.0), GAE(1.0, 0.0, "ignore")):
            credited = credit_by_hand(given_turns, estimator, layout)
            assert credited.advantages[skipped:].tolist()[:3] == [0.0, 0.0, 21.0]
            assert not credited.advantages[skipped + 3 :].any()
        credited = credit_by_hand(given_turns, TurnGAE(1.0, 0.0), layout)
        assert credited.advantages[skipped:].tolist()[:3] == [0.0, 21.0, 21.0]


def test_step_groups_need_the_same_task_and_a_state():
    one = Trajectory("1", [Turn([1], [2], [0], 1.0), Turn([1], [3], [0], 2.0)], "x")
    two = Trajectory("2", [Turn([1], [2], [0], 3.0)], "x")
    other = Trajectory("3", [Turn([1], [2], [0], 9.0)])
    batch = pack([one, two, other], "turns", device="cpu")
    steps = (
        batch.with_advantages(
            GiGPO(1.0, scale="none"), state_ids=torch.tensor([7, -1, 7, 7])
        ).advantages
        - batch.with_advantages(GiGPO(0.0, scale="none"), state_ids=torch.zeros(4).int()).advantages
    )
    assert steps[batch.turn_spans[:, 0].long()].tolist() == [0.0, 0.0, 0.0, 0.0]
    apart = batch.with_advantages(GiGPO(1.0, scale="none"), state_ids=torch.tensor([-1, 7, 7, 7]))
    assert apart.advantages[batch.turn_spans[:, 0].long()].tolist() == [0.0, -0.5, 0.5, 0.0]


def test_turn_returns_are_those_that_were_packed():
    batch = pack(some_trajectories(20), device="cpu")
    credited = batch.with_advantages(TurnReturns())
    assert torch.equal(credited.advantages, batch.returns)
    assert credited.advantages.data_ptr() != batch.returns.data_ptr()
    assert batch.advantages is None
    assert batch.with_advantages(GRPO()).returns is batch.returns


"""Credit given to a batch that was given credit before."""


@pytest.mark.parametrize("estimator", [TurnReturns(), TurnReturns(whiten=True), GRPO()])
@pytest.mark.parametrize("before", [GAE(0.5, 0.5), TurnReturns(), GRPO()])
def test_earlier_advantages_do_not_count(estimator, before):
    batch = pack(some_trajectories(20), device="cpu")
    values = torch.linspace(-1, 1, batch.num_tokens)
    fresh = batch.with_advantages(estimator)
    again = batch.with_advantages(before, values).with_advantages(estimator)
    for name in ("advantages", "returns", "metrics"):
        assert torch.equal(getattr(again, name), getattr(fresh, name)), name


"""Credit where a caller did something unusual."""


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_advantages_do_not_depend_on_the_loss_mask(impl):
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
@pytest.mark.parametrize("kind", slow_after(1, ["k2", "k1", "k3"]))
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


def test_masked_trajectories_keep_their_returns():
    turn = Turn([1], [2, 3], [-1.0, -1.0], 1.0)
    cut_off = dataclasses.replace(turn, truncated=True)
    batch = pack([Trajectory("a", [turn]), Trajectory("b", [cut_off])], device="cpu")
    values = torch.full((6,), 0.8)
    for estimator in (GAE(truncated="mask"), TurnGAE(truncated="mask")):
        credited = batch.with_advantages(estimator, values)
        assert not credited.advantages[4:].any()
        assert torch.equal(credited.returns[4:], credited.returns[1:3])


def test_gpg_refuses_all_reduce():
    batch = pack(some_trajectories(6), device="cpu")
    with pytest.raises(
        ValueError,
        match=r"GroupEstimator\('gpg'\) takes no all_reduce: its factor counts this batch",
    ):
        batch.with_advantages(GroupEstimator("gpg"), all_reduce=lambda sums: None)
