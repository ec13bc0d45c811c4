"""Wrong input to estimators and to `with_advantages`: what is said about it."""

import re

import pytest
import torch

from trajpack import (
    GAE,
    GRPO,
    GiGPO,
    KLPenalty,
    Trajectory,
    Turn,
    TurnGAE,
    TurnReturns,
    VTrace,
    pack,
)
from trajpack.packing.credit.estimators import GroupEstimator, ReinforcePlusPlus, TokenEstimator
from trajpack.testing import assert_same_bits

KL = KLPenalty(0.1)
TOKENS = torch.zeros(5)


def batch():
    turns = [Turn([1], [2], [-0.5], 1.0), Turn([1, 2, 3], [4, 5], [-0.5, -0.5], truncated=True)]
    return pack([Trajectory("a", turns)], device="cpu")


WRONG = {
    "GAE needs values, got None": (GAE(), {}),
    "TurnGAE needs values, got None": (TurnGAE(), {"values": None}),
    "VTrace needs values, got None": (VTrace(), {"logprobs": TOKENS}),
    "VTrace needs logprobs, got None": (VTrace(), {"values": TOKENS}),
    "GAE needs ref_logprobs, got None": (GAE(kl=KL), {"values": TOKENS}),
    "scores must be finite, got nan for 'a'": (GRPO(), {"scores": TOKENS[:1] / 0}),
    "GAE needs bootstrap, got None": (GAE(truncated="bootstrap"), {"values": TOKENS}),
    "GiGPO needs state_ids, got None": (GiGPO(), {}),
    "GAE takes no ref_logprobs: it has no kl": (
        GAE(), {"values": TOKENS, "ref_logprobs": TOKENS},
    ),
    "GRPO takes no ref_logprobs: it has no kl": (GRPO(), {"ref_logprobs": TOKENS}),
    "GAE takes no bootstrap: ": (GAE(), {"values": TOKENS, "bootstrap": torch.zeros(1)}),
    "TurnReturns takes no bootstrap: ": (TurnReturns(), {"bootstrap": torch.zeros(1)}),
    "GRPO takes no state_ids: it has no step groups": (
        GRPO(), {"state_ids": torch.zeros(2).int()},
    ),
    "GAE takes no scores: it does not compare trajectories": (
        GAE(), {"values": TOKENS, "scores": torch.zeros(1)},
    ),
    "values must have one entry for each of 5 token(s), got shape [4]": (
        GAE(), {"values": TOKENS[1:]},
    ),
    "ref_logprobs must have one entry for each of 5 token(s), got shape [6]": (
        GAE(kl=KL), {"values": TOKENS, "ref_logprobs": torch.zeros(6)},
    ),
    "bootstrap must have one entry for each of 1 trajectory(s), got shape [2]": (
        GAE(truncated="bootstrap"), {"values": TOKENS, "bootstrap": torch.zeros(2)},
    ),
    "scores must have one entry for each of 1 trajectory(s), got shape [5]": (
        GRPO(), {"scores": TOKENS},
    ),
    "state_ids must have one entry for each of 2 turn(s), got shape [1]": (
        GiGPO(), {"state_ids": torch.zeros(1).long()},
    ),
    "values must have 1 dimension(s), got shape [1, 5]": (GAE(), {"values": TOKENS[None]}),
    "values is on meta but the other inputs are on cpu": (GAE(), {"values": TOKENS.to("meta")}),
    "no gradient flows to values; pass values.detach()": (
        GAE(), {"values": torch.zeros(5, requires_grad=True)},
    ),
}  # fmt: skip


OF_WRONG_TYPE = {
    "values must be": (GAE(), {"values": TOKENS.long()}),
    "logprobs must be": (VTrace(), {"values": TOKENS, "logprobs": [0.0] * 5}),
    "bootstrap must be": (
        GAE(truncated="bootstrap"), {"values": TOKENS, "bootstrap": torch.zeros(1).half()},
    ),
    "state_ids must be": (GiGPO(), {"state_ids": torch.zeros(2)}),
    "scores must be": (GRPO(), {"scores": torch.zeros(1).bfloat16()}),
    "its name, a function or a tensor, got 3": (3, {}),
    "a function or a tensor, got TokenEstimator(": (TokenEstimator(), {}),
    "estimators.GRPO'>; make one: GRPO()": (GRPO, {}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        *((ValueError, *row) for row in WRONG.items()),
        *((TypeError, *row) for row in OF_WRONG_TYPE.items()),
        (ValueError, "impl must be 'auto', 'torch' or 'triton'", (GRPO(), {"impl": "cuda"})),
    ],
)
def test_errors_name_the_input(error, message, call):
    estimator, inputs = call
    with pytest.raises(error, match=f"^with_advantages: .*{re.escape(message)}"):
        batch().with_advantages(estimator, **inputs)


WRONG_ESTIMATORS = {
    "GAE: observation must be one of 'carry', ": lambda: GAE(observation="skip"),
    "VTrace: observation must be one of 'carry', ": lambda: VTrace(observation="skip"),
    "ReinforcePlusPlus: observation must be one of": lambda: ReinforcePlusPlus(1.0, "skip"),
    "VTrace: rho_clip must be above 0, got 0": lambda: VTrace(rho_clip=0),
    "VTrace: advantage_rho_clip must be above 0, got -1": lambda: VTrace(advantage_rho_clip=-1),
    "truncated must be one of 'keep', 'mask', 'bootstrap', got 'drop'": (
        lambda: GRPO(truncated="drop")
    ),
    "GRPO: truncated='bootstrap' needs an estimator over tokens": (
        lambda: GRPO(truncated="bootstrap")
    ),
    "TurnReturns: truncated='bootstrap' needs": lambda: TurnReturns(truncated="bootstrap"),
    "GRPO: reward_clip must be above 0, got -1.0": lambda: GRPO(reward_clip=-1.0),
    "KLPenalty: estimator must be one of 'k1', 'k2', 'k3', got 'k4'": (
        lambda: KLPenalty(0.1, "k4")
    ),
    "KLPenalty: clamp must be above 0, got 0.0": lambda: KLPenalty(0.1, clamp=0.0),
    "KLPenalty: coefficient must be finite and not negative, got -1": lambda: KLPenalty(-1),
    "TurnReturns: reward_clip cannot change returns": lambda: TurnReturns(reward_clip=1.0),
    "GiGPO: reward_clip cannot change the turns' returns": lambda: GiGPO(reward_clip=1.0),
    "GAE: gamma must be finite and not negative, got -0.1": lambda: GAE(-0.1),
    "TurnGAE: lam must be finite and not negative, got inf": lambda: TurnGAE(lam=float("inf")),
    "GRPO: eps must be finite and not negative, got -5": lambda: GRPO(eps=-5),
    "GRPO: singleton must be one of 'raw', 'zero', got 'one'": lambda: GRPO(singleton="one"),
    "GiGPO: scale must be one of 'std', 'none', got 'mean'": lambda: GiGPO(scale="mean"),
    "GRPO: baseline must be one of 'mean', 'leave_one_out', ": lambda: GRPO(baseline="median"),
    "GroupEstimator('opo'): scale must be one of 'std', ": lambda: GroupEstimator("opo", scale="x"),
    "GroupEstimator('dapo'): recipe must be one of 'grpo', ": lambda: GroupEstimator("dapo"),
    "GRPO: scale='leave_one_out_std' needs baseline='leave_one_out', got 'mean'": (
        lambda: GRPO(scale="leave_one_out_std")
    ),
    "GRPO: ddof must be in [0, 1], got 2": lambda: GRPO(ddof=2),
    "GAE: ddof must be in [0, 1], got -1": lambda: GAE(ddof=-1),
}


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        *((ValueError, *row) for row in WRONG_ESTIMATORS.items()),
        (TypeError, "must be a number", lambda: GRPO(reward_clip="1")),
        (TypeError, "must be a number", lambda: KLPenalty(0.1, clamp=True)),
    ],
)
def test_an_estimator_that_makes_no_sense_is_not_made(error, message, make):
    with pytest.raises(error, match=re.escape(message)):
        make()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_column_of_a_table_is_an_input(impl, executor):
    given = [Trajectory(n, [Turn([1], [2, 3, 4], [-0.5] * 3, 1.0)], group="g") for n in "ab"]
    batch = pack(given, device="cpu")
    values, scores = torch.arange(16.0).view(8, 2), torch.arange(4.0).view(2, 2)
    for estimator, name, x in ((GAE(lam=0.9), "values", values), (GRPO(), "scores", scores)):
        columns = x[:, 1], x[:, 1].clone()
        one, other = (batch.with_advantages(estimator, **{name: c}, impl=impl) for c in columns)
        assert_same_bits(one.advantages, other.advantages)
