"""Moments under a mask, and the operators of moments and whitening: registered, traced, strict."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from trajpack.kernels import masked_moments, moment_sums, whiten
from trajpack.kernels.reduce import whiten_triton
from trajpack.kernels.reduce.whiten import (
    masked_moments_reference,
    whiten_reference,
    whiten_with_moments,
)
from trajpack.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("poisoned_memory")

OPS = torch.ops.trajpack
CHUNK = whiten_triton.CHUNK
EMPTY = [0.0, 0.0, 0.0, math.inf, -math.inf]


def by_loop(values: list[float]) -> list[float]:
    """Return the moments of a list, summed without rounding."""
    if not values:
        return EMPTY
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return [len(values), mean, squares, min(values), max(values)]


def assert_close(actual: torch.Tensor, expected: list[float]) -> None:
    assert actual.dtype == torch.float64
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 2, 99, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
def test_they_equal_a_loop(impl: Any, size: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(size)
    x = torch.from_numpy(5 + rng.standard_normal(size)).to(dtype)
    mask = torch.from_numpy(rng.random(size) < 0.5)
    expected = by_loop(x[mask].double().tolist())
    x[~mask] = float("nan")
    assert_close(masked_moments(x, mask, impl=impl), expected)
    assert_close(masked_moments_reference(x, mask), expected)
    assert_close(whiten_with_moments(x, mask, ddof=1, impl=impl)[1], expected)
    for shift in (0.0, 4.5):
        count, mean, squares = expected[:3]
        away = mean - shift if count else 0.0
        sums = moment_sums(x, mask, shift=shift, impl=impl)
        assert_close(sums, [count, count * away, squares + count * away**2])


@given(
    values=st.lists(st.integers(-99, 99).map(float) | st.just(float("nan")), max_size=40),
    ones=st.integers(0, 2**40 - 1),
)
@settings(max_examples=30)
def test_they_equal_a_loop_for_any_mask(impl: Any, values: list[float], ones: int) -> None:
    mask = [bool(ones >> i & 1) and not math.isnan(v) for i, v in enumerate(values)]
    x, counts = torch.tensor(values), torch.tensor(mask, dtype=torch.bool)
    counted = [value for value, counts in zip(values, mask, strict=True) if counts]
    assert_close(masked_moments(x, counts, impl=impl), by_loop(counted))


@pytest.mark.parametrize("mean", [1e4, -1e9])
def test_a_large_mean_costs_little_precision(impl: Any, mean: float) -> None:
    x = mean + torch.from_numpy(np.random.default_rng(0).standard_normal(CHUNK + 700))
    mask = torch.ones(len(x), dtype=torch.bool)
    squares = masked_moments(x, mask, impl=impl)[2].item()
    assert squares == pytest.approx(by_loop(x.tolist())[2], rel=1e-16 * abs(mean) * 4)


def test_equal_entries_have_no_deviation_and_their_own_mean(impl: Any) -> None:
    x = torch.full((CHUNK + 333,), 0.1)
    mask = torch.ones(len(x), dtype=torch.bool)
    value = x[0].item()
    moments = masked_moments(x, mask, impl=impl)
    assert moments.tolist() == [len(x), value, 0.0, value, value]
    assert masked_moments_reference(x, mask).tolist() == moments.tolist()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_counted_nan_shows_everywhere_but_in_the_count(impl: Any) -> None:
    x, mask = torch.arange(9.0), torch.ones(9, dtype=torch.bool)
    x[4] = float("nan")
    for moments in (masked_moments(x, mask, impl=impl), masked_moments_reference(x, mask)):
        assert moments[0] == 9
        assert moments[1:].isnan().all()


def test_the_sums_of_parts_add_up_to_those_of_the_whole(impl: Any) -> None:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(1000))
    mask = x > -1
    whole = moment_sums(x, mask, shift=0.5, impl=impl)
    parts = zip(x.split([700, 0, 300]), mask.split([700, 0, 300]), strict=True)
    added = torch.stack([moment_sums(*part, shift=0.5, impl=impl) for part in parts]).sum(0)
    assert_close(added, whole.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_operators_are_registered_right(impl: Any, dtype: torch.dtype) -> None:
    x, mask = torch.arange(9, dtype=dtype), torch.arange(9) % 3 > 0
    sums = moment_sums(x, mask)
    torch.library.opcheck(OPS.masked_moments.default, (x, mask, 0.5, impl))
    torch.library.opcheck(OPS.whiten.default, (x, mask, None, 0.0, 1, 0.0, True, impl))
    torch.library.opcheck(OPS.whiten.default, (x, mask, sums, 0.5, 1, 0.0, False, impl))


@pytest.mark.parametrize("dynamic", [False, True])
def test_they_compile_into_one_graph(dynamic: bool) -> None:
    def both(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        sums = moment_sums(x * 2, mask, shift=0.5)
        return whiten(x * 2, mask, sums=sums, shift=0.5) + whiten(x, mask)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for size in (7, 12):
        x, mask = torch.arange(size + 0.0), torch.arange(size) % 3 > 0
        assert_same_bits(compiled(x, mask), both(x, mask))


@pytest.mark.parametrize("impl", ["auto", "torch", "triton"])
def test_shapes_alone_are_enough_on_the_meta_device(impl: Any) -> None:
    x = torch.empty(7, device="meta", dtype=torch.float64)
    mask = torch.empty(7, device="meta", dtype=torch.bool)
    sums = moment_sums(x, mask, shift=0.5, impl=impl)
    moments = masked_moments(x, mask, impl=impl)
    assert (sums.shape, moments.shape) == ((3,), (5,))
    for whitened in (whiten(x, mask, impl=impl), whiten(x, mask, sums=sums, impl=impl)):
        kind = whitened.shape, whitened.dtype, whitened.device.type
        assert kind == ((7,), torch.float32, "meta")


def test_the_references_read_no_value() -> None:
    x = torch.empty(7, device="meta")
    mask = torch.empty(7, device="meta", dtype=torch.bool)
    count, mean, squares, *_ = masked_moments_reference(x, mask)
    assert whiten_reference(
        x, mask, (count, mean, squares), ddof=1, eps=0.0, center=False
    ).shape == (7,)


X, MASK = torch.ones(3), torch.ones(3, dtype=torch.bool)
SUMS = torch.ones(3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, "x must be a tensor, got list", ([1.0], MASK)),
        (TypeError, "x must be float32 or float64, got int64", (torch.arange(3), MASK)),
        (ValueError, r"x must have 1 dim.*got shape \[1, 3\]", (X[None], MASK)),
        (TypeError, "mask must be bool, got float32", (X, X)),
        (ValueError, r"mask must have 1 dim.*got shape \[1, 3\]", (X, MASK[None])),
        (ValueError, r"mask must have one entry for each of 3 .* got shape \[2\]", (X, MASK[:2])),
        (ValueError, "mask is on meta but", (X, MASK.to("meta"))),
        (ValueError, "no gradient flows to x", (X.clone().requires_grad_(), MASK)),
    ],
)
@pytest.mark.parametrize("function", [masked_moments, moment_sums, whiten])
def test_wrong_input_is_named(
    function: Any, error: type[Exception], match: str, arguments: Any
) -> None:
    with pytest.raises(error, match=f"^{function.__name__}: {match}"):
        function(*arguments)


@pytest.mark.parametrize(
    ("function", "error", "match", "options"),
    [
        (masked_moments, ValueError, "impl must be .*, got 'fast'", {"impl": "fast"}),
        (moment_sums, ValueError, "impl must be .*, got 'fast'", {"impl": "fast"}),
        (moment_sums, TypeError, "shift must be a number, got '1'", {"shift": "1"}),
        (moment_sums, TypeError, r"shift must be a number, got tensor", {"shift": X[0]}),
        (moment_sums, ValueError, "shift must be finite, got nan", {"shift": math.nan}),
        (whiten, ValueError, "shift must be finite, got inf", {"shift": math.inf}),
        (whiten, ValueError, "impl must be .*, got 'fast'", {"impl": "fast"}),
        (whiten, ValueError, "impl must be .*, got 'fast'", {"impl": "fast", "sums": SUMS}),
        (whiten, TypeError, "sums must be float64, got float32", {"sums": X}),
        (whiten, TypeError, "sums must be a tensor, got list", {"sums": [3.0, 1.0, 1.0]}),
        (whiten, ValueError, r"sums must have 1 dim.*got shape \[\]", {"sums": SUMS[0]}),
        (whiten, ValueError, r"sums must have 3 entries, got shape \[2\]", {"sums": SUMS[:2]}),
        (whiten, ValueError, "sums is on meta but", {"sums": SUMS.to("meta")}),
        (whiten, TypeError, "ddof must be an int, got 1.0", {"ddof": 1.0}),
        (whiten, TypeError, "ddof must be an int, got True", {"ddof": True}),
        (whiten, ValueError, r"ddof must be in \[0, 1\], got 2", {"ddof": 2}),
        (whiten, TypeError, "eps must be a number, got None", {"eps": None}),
        (whiten, ValueError, "eps must be finite and not negative, got -0.5", {"eps": -0.5}),
        (whiten, ValueError, "eps must be finite .*, got nan", {"eps": math.nan}),
        (whiten, TypeError, "center must be a bool, got 1", {"center": 1}),
    ],
)
def test_a_wrong_option_is_named(
    function: Any, error: type[Exception], match: str, options: Any
) -> None:
    with pytest.raises(error, match=f"^{function.__name__}: {match}"):
        function(X, MASK, **options)
