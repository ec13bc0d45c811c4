"""Rejection by a divergence of the policies: what a loop, verl and OpenRLHF reject."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.packing.adapters.peers import ABSENT, find_peer, stand_ins
from trajpack.kernels import Correction, Rejection, importance_weights


def drawn(seed: int, num: int = 400) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(num, generator=generator) * 3
    columns = {
        "logprobs": (rollout + torch.randn(num, generator=generator) * 0.5).clamp(max=-1e-3),
        "rollout_logprobs": rollout,
        "loss_mask": torch.rand(num, generator=generator) < 0.8,
        "advantages": torch.randn(num, generator=generator),
    }
    columns["advantages"][::7] = 0
    return columns


def weights_of(columns: dict[str, torch.Tensor], rejection: Rejection, **options: Any) -> Any:
    rule = Correction(level="none", rejection=rejection)
    tokens = (columns[name] for name in ("logprobs", "rollout_logprobs", "loss_mask"))
    return importance_weights(*tokens, rule, advantages=columns["advantages"], **options)[0]


@pytest.mark.parametrize("measure", ["tv", "binary_kl"])
@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("level", ["token", "any"])
def test_tokens_beyond_the_bound_of_their_side_are_rejected(
    measure: Any, one_sided: bool, level: Any
) -> None:
    columns, low, high = drawn(0), 0.05, 0.1
    cu_seqlens = torch.tensor([0, 150, 153, 153, *range(154, 401, 2)], dtype=torch.int32)
    expected, rejected = [], set()
    for index in range(400):
        x, y = (float(columns[name][index]) for name in ("logprobs", "rollout_logprobs"))
        p, q = math.exp(x), math.exp(y)
        size = abs(p - q)
        if measure == "binary_kl":
            size = q * (y - x) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        side = size > high if p > q else size > low
        if one_sided:
            side = side and (p > q) == bool(columns["advantages"][index] > 0)
        expected.append(bool(columns["loss_mask"][index]) and not side)
        if columns["loss_mask"][index] and side:
            rejected.add(int((cu_seqlens <= index).sum()) - 1)
    if level == "any":
        owner = [int((cu_seqlens <= index).sum()) - 1 for index in range(400)]
        whole = zip(columns["loss_mask"].tolist(), owner, strict=True)
        expected = [is_generated and of not in rejected for is_generated, of in whole]
    rejection = Rejection(low, high, level, measure, one_sided)
    weights = weights_of(columns, rejection, segments=cu_seqlens)
    assert weights.bool().tolist() == expected
    assert 0 < sum(expected) < int(columns["loss_mask"].sum())


@pytest.mark.parametrize("measure", ["tv", "binary_kl"])
@pytest.mark.parametrize(("level", "one_sided"), [("token", True), ("token", False), ("any", True)])
def test_what_is_not_a_number_is_beyond_every_bound(
    measure: Any, level: Any, one_sided: bool
) -> None:
    columns = drawn(1)
    columns["loss_mask"][:] = True
    columns["logprobs"][:4], columns["advantages"][:4] = math.nan, torch.tensor([-1.0, 0, 1, 2])
    cu_seqlens = torch.tensor([0, 4, 400], dtype=torch.int32)
    rejection = Rejection(5, 5, level, measure, one_sided)
    weights = weights_of(columns, rejection, segments=cu_seqlens)
    assert weights.tolist() == [0] * 4 + [1] * 396


@pytest.fixture
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    with stand_ins(*ABSENT[request.param].split()):
        yield find_peer(request.param, monkeypatch).load


@pytest.mark.parametrize("load", ["verl"], indirect=True)
@pytest.mark.parametrize("measure", ["tv", "binary_kl"])
def test_verl_trains_the_same_tokens(load: Any, measure: Any) -> None:
    algos = load("verl.trainer.ppo.core_algos")
    loss = getattr(algos, f"compute_policy_loss_dppo_{measure.removeprefix('binary_')}")
    config = SimpleNamespace(clip_ratio=0.1, clip_ratio_low=0.05, clip_ratio_high=0.1)
    config.get = lambda name, default: default
    config.global_batch_info = {}
    for seed in range(20):
        columns = drawn(seed)
        logprobs = columns["logprobs"][None].requires_grad_()
        masked = columns["loss_mask"][None].float()
        old, advantages = columns["rollout_logprobs"][None], columns["advantages"][None]
        loss(old, logprobs, advantages, masked, config=config)[0].backward()
        kept = weights_of(columns, Rejection(0.05, 0.1, "token", measure, one_sided=True)) > 0
        trained = columns["advantages"] != 0
        assert (logprobs.grad[0] != 0).equal(kept & trained)


@pytest.mark.parametrize("measure", ["tv", "binary_kl"])
def test_the_mean_over_a_segment_is_compared(measure: Any) -> None:
    columns = drawn(3)  # OpenRLHF's is_correction_level="seq"
    cu_seqlens = torch.tensor([0, 100, 200, 300, 400], dtype=torch.int32)
    q, p = columns["rollout_logprobs"].double().exp(), columns["logprobs"].double().exp()
    sizes = (p - q).abs()
    if measure == "binary_kl":
        sizes = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    means = [
        float(part[mask].mean())
        for part, mask in zip(sizes.split(100), columns["loss_mask"].split(100), strict=True)
    ]
    bound = sorted(means)[1] * (1 + 1e-4)
    rejection = Rejection(high=bound, level="geometric", measure=measure)
    weights = weights_of(columns, rejection, segments=cu_seqlens)
    kept = torch.tensor(means).repeat_interleave(100) <= bound
    assert weights.bool().equal(kept & columns["loss_mask"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"measure": "kl"}, "measure must be .*, got 'kl'"),
        ({"level": "any"}, "level must be .*, got 'any'"),
        ({"level": "segment", "measure": "tv"}, "level must be .*, got 'segment'"),
        ({"one_sided": True, "level": "token"}, "one_sided needs a divergence of tokens"),
        ({"measure": "tv", "one_sided": True}, "got measure='tv' and level='geometric'"),
        ({"measure": "tv", "low": -0.1}, "low must be 0 or more, got -0.1"),
    ],
)
def test_rules_that_make_no_sense_are_refused(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rejection(**options)


def test_one_side_needs_advantages_and_no_kernel() -> None:
    rule = Rejection(high=0.1, level="token", measure="tv", one_sided=True)
    columns = drawn(0)
    with pytest.raises(ValueError, match="a one-sided rejection needs advantages, got none"):
        weights_of(columns | {"advantages": None}, rule)
    with pytest.raises(ValueError, match=r"impl must be .*, got 'triton'"):
        weights_of(columns, rule, impl="triton")
