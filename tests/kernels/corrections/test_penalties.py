"""`kl_penalty` and `overlong_penalty` against their formulas, one number at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from trajpack.kernels.corrections.penalties import KL_ESTIMATORS, kl_penalty, overlong_penalty
from trajpack.kernels.corrections.staleness import staleness_mask
from trajpack.testing import assert_same_bits

INF = math.inf


def estimate(x: float, estimator: str, clamp: float | None) -> float:
    """Say what one token's estimate is, in Python's floats."""
    value = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[estimator]
    return value if clamp is None else min(max(value, -clamp), clamp)


def random_logprobs(seed: int, num: int = 64, scale: float = 3.0) -> torch.Tensor:
    draws = np.random.default_rng(seed).exponential(scale, num)
    return torch.from_numpy(-draws).float()


@pytest.mark.parametrize("clamp", [10.0, 1.5, None])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_each_token_has_the_formula_s_value(estimator: Any, clamp: float | None) -> None:
    logprobs, ref_logprobs = random_logprobs(0), random_logprobs(1)
    expected = [
        estimate(a - b, estimator, clamp)
        for a, b in zip(logprobs.tolist(), ref_logprobs.tolist(), strict=True)
    ]
    found = kl_penalty(logprobs, ref_logprobs, estimator=estimator, clamp=clamp)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_without_an_estimator_it_is_the_difference_within_ten() -> None:
    logprobs, ref_logprobs = torch.tensor([-1.0, -30.0, -2.0]), torch.tensor([-31.0, -1.0, -2.5])
    assert kl_penalty(logprobs, ref_logprobs).tolist() == [10.0, -10.0, 0.5]


def test_a_small_difference_is_not_lost_to_cancellation() -> None:
    x = 1e-4  # where float32 would find e⁻ˣ - 1 + x to be off by a tenth and more
    found = kl_penalty(
        torch.tensor([-1.0 + x, -1.0 - x], dtype=torch.float64),
        torch.tensor([-1.0, -1.0], dtype=torch.float64),
        estimator="k3",
    )
    expected = [x * x / 2 - x**3 / 6, x * x / 2 + x**3 / 6]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [10.0, -10.0]), ("k2", [10.0, 10.0]), ("k3", [10.0, 10.0])],
)
def test_one_infinite_logprob_gives_the_clamp(estimator: Any, expected: list[float]) -> None:
    logprobs, ref_logprobs = torch.tensor([-1.0, -INF]), torch.tensor([-INF, -1.0])
    assert kl_penalty(logprobs, ref_logprobs, estimator=estimator).tolist() == expected
    unbounded = kl_penalty(logprobs, ref_logprobs, estimator=estimator, clamp=None)
    assert unbounded.tolist() == [math.copysign(INF, value) for value in expected]


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_nan_stays_with_its_token(estimator: Any) -> None:
    logprobs = torch.tensor([-1.0, math.nan, -INF, -1.0])
    ref_logprobs = torch.tensor([-1.0, -1.0, -INF, -1.0])
    found = kl_penalty(logprobs, ref_logprobs, estimator=estimator)
    assert found.isnan().tolist() == [False, True, True, False]
    assert found[[0, 3]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_gradients_are_those_of_the_formulas(estimator: Any) -> None:
    logprobs, ref_logprobs = (random_logprobs(seed, 9).double() for seed in (2, 3))
    leaves = logprobs.requires_grad_(), ref_logprobs.requires_grad_()
    a, b = torch.autograd.grad(kl_penalty(*leaves, estimator=estimator, clamp=None).sum(), leaves)
    x = (logprobs - ref_logprobs).tolist()
    slope = {"k1": lambda _: 1.0, "k2": lambda x: x, "k3": lambda x: 1 - math.exp(-x)}[estimator]
    torch.testing.assert_close(a.tolist(), [slope(value) for value in x], rtol=1e-6, atol=1e-9)
    assert_same_bits(b, -a)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_no_gradient_where_the_bound_holds(estimator: Any) -> None:
    logprobs = torch.tensor([-1.0, -INF, -40.0, -1.0], requires_grad=True)
    ref_logprobs = torch.tensor([-INF, -1.0, -1.0, -1.5])
    kl_penalty(logprobs, ref_logprobs, estimator=estimator).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad[:3].tolist() == [0.0, 0.0, 0.0]
    assert logprobs.grad[3] > 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("num", [0, 1, 5])
def test_shapes_alone_are_enough(num: int, device: str) -> None:
    logprobs, lengths = (torch.zeros(num, device=device, dtype=t) for t in (None, torch.int32))
    every: Any = [
        kl_penalty(logprobs, logprobs.double(), estimator=estimator) for estimator in KL_ESTIMATORS
    ]
    for found in [*every, overlong_penalty(lengths, 8, 2)]:
        assert (found.shape, found.dtype, found.device.type) == ((num,), torch.float32, device)


"""`overlong_penalty` against DAPO's equation 13, one response at a time."""


def penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """Say the three cases as the paper does."""
    if length <= max_length - buffer:
        return 0.0
    if length <= max_length:
        return factor * ((max_length - buffer) - length) / buffer
    return -factor


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("factor", [1.0, 0.3, 0])
@pytest.mark.parametrize(("max_length", "buffer"), [(20, 5), (20, 1), (20, 20), (20_480, 4_096)])
def test_every_length_has_the_paper_s_value(
    max_length: int, buffer: int, factor: float, dtype: torch.dtype
) -> None:
    edges = (max_length - buffer, max_length)
    lengths = sorted({0, 1, *(edge + off for edge in edges for off in (-1, 0, 1, 2, 1000))} - {-1})
    found = overlong_penalty(torch.tensor(lengths, dtype=dtype), max_length, buffer, factor=factor)
    expected = [penalty(length, max_length, buffer, factor) for length in lengths]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=0)
    assert not found[found == 0].signbit().any() or not factor


def test_no_length_goes_below_the_largest_penalty() -> None:
    lengths = torch.tensor([2**31 - 1, 2**31 - 2, 10], dtype=torch.int32)
    assert overlong_penalty(lengths, 10, 4, factor=2.0).tolist() == [-2.0, -2.0, -2.0]


@pytest.mark.parametrize("current", [3, torch.tensor(3)])
def test_tokens_of_versions_that_are_too_old_are_left_out(current: Any) -> None:
    versions = [-1, 0, 1, 2, 3, 4]
    for most in range(5):
        found = staleness_mask(torch.tensor(versions, dtype=torch.int32), current, most)
        assert found.tolist() == [version >= 0 and 3 - version <= most for version in versions]


X, N = torch.zeros(3), torch.ones(3, dtype=torch.int64)
KL, LONG, OLD = kl_penalty, overlong_penalty, staleness_mask


@pytest.mark.parametrize(
    ("call", "error", "words", "arguments", "options"),
    [
        (KL, TypeError, "logprobs must be a tensor, got list", ([0.0], X), {}),
        (KL, TypeError, "logprobs must be float32 or float64, got int64", (X.long(), X), {}),
        (KL, TypeError, "ref_logprobs must be float32 or .*, got float16", (X, X.half()), {}),
        (KL, ValueError, r"ref_logprobs must have 1 dim.*\[1, 3\]", (X, X[None]), {}),
        (KL, ValueError, r".*each of 3 token\(s\), got shape \[2\]", (X, X[:2]), {}),
        (KL, ValueError, "ref_logprobs is on meta but", (X, X.to("meta")), {}),
        (KL, ValueError, "estimator must be .*'k3', got 'k4'", (X, X), {"estimator": "k4"}),
        (KL, TypeError, "clamp must be a number, got '1'", (X, X), {"clamp": "1"}),
        (KL, TypeError, "clamp must be a number, got True", (X, X), {"clamp": True}),
        (KL, ValueError, "clamp must be above 0, got 0", (X, X), {"clamp": 0}),
        (KL, ValueError, "clamp must be above 0, got nan", (X, X), {"clamp": math.nan}),
        (OLD, TypeError, "policy_versions must be int32, got int64", (N, 1, 1), {}),
        (OLD, ValueError, "max_age must not be negative, got -1", (N.int(), 1, -1), {}),
        (OLD, TypeError, "current_version must be int32 or .* float32", (N.int(), X[0], 1), {}),
        (OLD, ValueError, "current_version must not be negative, got -1", (N.int(), -1, 1), {}),
        (LONG, TypeError, "lengths must be a tensor, got list", ([1], 8, 2), {}),
        (LONG, TypeError, "lengths must be int32 or int64, got float32", (N.float(), 8, 2), {}),
        (LONG, ValueError, r"lengths must have 1 dim.*\[1, 3\]", (N[None], 8, 2), {}),
        (LONG, TypeError, "max_length must be an int, got 8.0", (N, 8.0, 2), {}),
        (LONG, ValueError, "max_length must be at least 1, got 0", (N, 0, 2), {}),
        (LONG, TypeError, "overlong_buffer must be an int, got True", (N, 8, True), {}),
        (LONG, ValueError, "overlong_buffer must be at least 1, got 0", (N, 8, 0), {}),
        (LONG, ValueError, r".*must be at most max_length \(8\), got 9", (N, 8, 9), {}),
        (LONG, TypeError, "factor must be a number, got '1'", (N, 8, 2), {"factor": "1"}),
        (LONG, ValueError, "factor must be finite .*, got -1", (N, 8, 2), {"factor": -1}),
        (LONG, ValueError, "factor must be finite .*, got nan", (N, 8, 2), {"factor": math.nan}),
    ],
)
def test_wrong_input_is_named(
    call: Any, error: type[Exception], words: str, arguments: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(error, match=f"^{call.__name__}: {words}"):
        call(*arguments, **options)
