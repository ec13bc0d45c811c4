"""Every estimator as an operator: traced, without values, and refusing wrong input."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.credit.token_loops import OBSERVATIONS, batch_of, small_blocks
from trajpack import kernels
from trajpack.testing import assert_same_bits, boundaries

THREE = torch.ones(3)
LEAF = torch.ones(3, requires_grad=True)
TWO = torch.ones(2, requires_grad=True)
CU = boundaries([2, 1])
RIGHT: dict[str, dict[str, Any]] = {
    "discounted_returns": {"discount": 0.5},
    "gae": {"values": THREE},
    "turn_gae": {"values": THREE, "turn_ids": torch.arange(3)},
    "vtrace": {"values": THREE, "logprobs": THREE, "rollout_logprobs": THREE},
}
"""Estimators, with the arguments that each needs beside rewards and boundaries."""

SHARED = [
    (TypeError, "rewards must be a tensor, got list", {"rewards": [1.0]}),
    (TypeError, "rewards must be float32 or float64, got int64", {"rewards": torch.arange(3)}),
    (ValueError, r"rewards must have 1 dimension.*\[1, 3\]", {"rewards": THREE[None]}),
    (TypeError, "cu_seqlens must be a tensor, got list", {"cu_seqlens": [0, 3]}),
    (TypeError, "cu_seqlens must be int32, got int64", {"cu_seqlens": CU.long()}),
    (ValueError, r"cu_seqlens must have 1 dim.*\[1, 3\]", {"cu_seqlens": CU[None]}),
    (ValueError, r"cu_seqlens must have segments \+ 1 entries, got none", {"cu_seqlens": CU[:0]}),
    (ValueError, "cu_seqlens must bound 3 .*, got no segment", {"cu_seqlens": CU[:1]}),
    (ValueError, "cu_seqlens is on meta but .* on cpu", {"cu_seqlens": CU.to("meta")}),
    (TypeError, "loss_mask must be bool, got int64", {"loss_mask": torch.arange(3)}),
    (TypeError, "loss_mask must be a tensor, got list", {"loss_mask": [True]}),
    (
        ValueError,
        r"loss_mask must have one entry for each of 3 token\(s\), got shape \[2\]",
        {"loss_mask": torch.ones(2).bool()},
    ),
    (ValueError, "loss_mask is on meta but", {"loss_mask": THREE.bool().to("meta")}),
    (
        ValueError,
        "observation must be one of 'carry', 'carry_drop', .*, got 'hold'",
        {"observation": "hold"},
    ),
    (TypeError, "max_seqlen must be an int or None, got 3.0", {"max_seqlen": 3.0}),
    (TypeError, "max_seqlen must be an int or None, got True", {"max_seqlen": True}),
    (ValueError, "max_seqlen must not be negative, got -1", {"max_seqlen": -1}),
    (ValueError, "impl must be 'auto', .*, got 'numpy'", {"impl": "numpy"}),
    (TypeError, "bootstrap must be a tensor, got float", {"bootstrap": 1.0}),
    (ValueError, "no gradient flows to bootstrap", {"bootstrap": TWO}),
    (ValueError, r"bootstrap must have one entry for each of 2 segment", {"bootstrap": THREE}),
]
TOKENS = [
    (TypeError, "{} must be a tensor, got NoneType", None),
    (TypeError, "{} must be float32 or float64, got float16", THREE.half()),
    (ValueError, r"{} must have 1 dim.*\[1, 3\]", THREE[None]),
    (ValueError, r"{} must have one entry for each of 3 token\(s\), got shape \[2\]", THREE[1:]),
    (ValueError, "{} is on meta but the other inputs are on cpu", THREE.to("meta")),
    (ValueError, r"no gradient flows to {0}; pass {0}.detach\(\)", LEAF),
]
RATES = [
    (TypeError, "{} must be a number or a tensor, got '1'", "1"),
    (TypeError, "{} must be a number or a tensor, got None", None),
    (TypeError, "{} must be float32 or float64, got int64", torch.arange(2)),
    (ValueError, r"{} must have one entry for each of 2 segment\(s\), got shape \[3\]", THREE),
    (ValueError, r"{} must have 1 dimension\(s\), got shape \[\]", torch.tensor(1.0)),
    (ValueError, "{} is on meta but", torch.ones(2, device="meta")),
    (ValueError, "no gradient flows to {}", TWO),
]
OWN = [
    ("turn_gae", TypeError, "must be int32 or int64, got float32", {"turn_ids": THREE}),
    ("turn_gae", ValueError, r"turn_ids must have 1 dim.*", {"turn_ids": torch.arange(3)[None]}),
    ("turn_gae", ValueError, r"for each of 3 token.*\[2\]", {"turn_ids": torch.arange(2)}),
    ("turn_gae", ValueError, "is on meta but", {"turn_ids": torch.arange(3).to("meta")}),
    ("vtrace", ValueError, "no gradient flows to rewards; pass rewards.detach", {"rewards": LEAF}),
    ("vtrace", ValueError, "rho_clip must be above 0, got 0.0", {"rho_clip": 0.0}),
    ("vtrace", ValueError, "c_clip must be above 0, got -1", {"c_clip": -1}),
    ("vtrace", ValueError, "rho_clip must be above 0, got nan", {"advantage_rho_clip": math.nan}),
    ("vtrace", TypeError, "rho_clip must be a number, got True", {"rho_clip": True}),
    ("vtrace", TypeError, "c_clip must be a number, got None", {"c_clip": None}),
]


def wrong_inputs() -> Iterator[tuple[str, type[Exception], str, dict[str, Any]]]:
    for name in RIGHT:
        parameters = inspect.signature(getattr(kernels, name)).parameters
        for error, match, changed in SHARED:
            if {*changed} <= {*parameters}:
                yield name, error, match, changed
        for cases, arguments in (
            (TOKENS, ("values", "logprobs", "rollout_logprobs")),
            (RATES, ("gamma", "lam", "discount")),
        ):
            for argument in [each for each in arguments if each in parameters]:
                for error, match, wrong in cases:
                    yield name, error, match.format(argument), {argument: wrong}
    yield from OWN


@pytest.mark.parametrize(("name", "error", "match", "changed"), list(wrong_inputs()))
def test_wrong_input_is_named(
    name: str, error: type[Exception], match: str, changed: dict[str, Any]
) -> None:
    right = {"rewards": THREE, "cu_seqlens": CU, **RIGHT[name]}
    with pytest.raises(error, match=f"^{name}: .*{match}"):
        getattr(kernels, name)(**(right | changed))


def results_of(name: str, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    results = getattr(kernels, name)(**inputs)
    return results if isinstance(results, tuple) else (results,)


def inputs_of(name: str, masks: list[str]) -> dict[str, Any]:
    batch = batch_of(masks)
    inputs: dict[str, Any] = {"rewards": batch.rewards, "cu_seqlens": batch.cu_seqlens}
    if name == "discounted_returns":
        inputs["discount"] = batch.gammas
    else:
        inputs |= {"values": batch.values, "gamma": batch.gammas, "lam": batch.lams}
        inputs["bootstrap"] = batch.bootstrap
    if name == "turn_gae":
        return inputs | {"turn_ids": batch.loss_mask.int() - 1}
    if name == "vtrace":
        inputs |= {"logprobs": batch.logprobs, "rollout_logprobs": batch.rollout_logprobs}
    return inputs | {"loss_mask": batch.loss_mask}


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("name", RIGHT)
def test_inputs_may_be_strided_and_are_left_as_they_are(
    name: str, observation: Any, impl: Any
) -> None:
    inputs = inputs_of(name, ["gg..g", "g."])
    more = {"impl": impl}
    if name != "turn_gae":
        more["observation"] = observation
    copies = {
        key: value.repeat_interleave(2)[::2] if isinstance(value, torch.Tensor) else value
        for key, value in inputs.items()
    }
    with small_blocks():
        expected = results_of(name, inputs | more)
        found = results_of(name, copies | more)
    for rows, wanted in zip(found, expected, strict=True):
        assert_same_bits(rows, wanted)
    for key, value in inputs.items():
        if isinstance(value, torch.Tensor):
            assert_same_bits(value, copies[key].contiguous())


def test_constants_may_require_gradients_where_none_are_recorded() -> None:
    with torch.no_grad():
        advantages, _ = kernels.gae(LEAF, LEAF, boundaries([3]))
    assert not advantages.requires_grad
