"""Sums and means of segments: meaning, precision, company, gradients, wrong input."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from trajpack.kernels.scan.segment_sum import segment_mean, segment_sum, segment_sum_reference
from trajpack.testing import assert_same_bits, boundaries

REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {"sum": segment_sum, "mean": segment_mean}
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)
LENGTHS = {
    "no segments": [],
    "only empty segments": [0, 0, 0],
    "edges of a row and of a block": [31, 32, 33, 0, 255, 256, 257],
    "longer than a walk": [3, 4999],
    "many short ones, empty at both ends": [0, *[i * 7 % 5 for i in range(30)], 0],
}
SPANS = {
    "backward, with gaps, ends and an empty one": [[90, 100], [40, 60], [50, 50], [60, 61], [3, 9]],
    "an empty one where another begins": [[5, 5], [5, 30], [5, 5], [30, 30], [100, 100]],
}


def entries_of(num: int, dtype: torch.dtype) -> torch.Tensor:
    rng = np.random.default_rng(0)
    if dtype == torch.bool:
        return torch.from_numpy(rng.random(num) < 0.6)
    if dtype.is_floating_point:
        return torch.from_numpy(rng.standard_normal(num)).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.from_numpy(rng.integers(limits.min // 5000, limits.max // 5000, num)).to(dtype)


def mask_of(num: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).random(num) < 0.5)


def spans_of(lengths: list[int]) -> list[list[int]]:
    return [list(pair) for pair in pairwise(np.cumsum([0, *lengths]).tolist())]


def assert_reduces(
    x: torch.Tensor, segments: torch.Tensor, spans: list[list[int]], mask: Any, impl: Any
) -> None:
    """Assert the values of a loop: exact, or of floats within a rounding or two."""
    values, counts = x.tolist(), [True] * len(x) if mask is None else mask.tolist()
    floats = x.dtype.is_floating_point
    parts = [[values[i] for i in range(*span) if counts[i]] for span in spans]
    sums = [math.fsum(part) if floats else sum(part) for part in parts]
    means = [total / max(len(part), 1) for total, part in zip(sums, parts, strict=True)]
    scale = float(x.double().abs().sum()) if floats else 0.0
    for function, exact, dtype in (
        (segment_sum, sums, x.dtype if floats else torch.int64),
        (segment_mean, means, x.dtype if floats else torch.float32),
    ):
        found = function(x, segments, mask=mask, impl=impl)
        assert (found.dtype, list(found.shape)) == (dtype, [len(exact)])
        if dtype.is_floating_point:
            allowed = 1.5 * torch.finfo(dtype).eps * np.abs(exact) + 1e-15 * scale
            assert (np.abs(found.double().numpy() - np.array(exact)) <= allowed).all()
        else:
            assert found.tolist() == exact
    reference = segment_sum_reference(x, segments, mask)
    found = segment_sum(x, segments, mask=mask, impl=impl)
    torch.testing.assert_close(found, reference, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_boundaries_equal_a_loop(impl: Any, dtype: torch.dtype, lengths: list[int]) -> None:
    x, spans = entries_of(sum(lengths), dtype), spans_of(lengths)
    for mask in (None, mask_of(len(x))):
        assert_reduces(x, boundaries(lengths), spans, mask, impl)


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spans_may_be_in_any_order(impl: Any, dtype: torch.dtype, spans: list[list[int]]) -> None:
    x, table = entries_of(100, dtype), torch.tensor(spans, dtype=torch.int32)
    for mask in (None, mask_of(100)):
        assert_reduces(x, table, spans, mask, impl)


@pytest.mark.parametrize("shift", [0, 2])
def test_entries_outside_all_segments_count_nowhere(impl: Any, shift: int) -> None:
    x = torch.cat([torch.ones(5), torch.full((9000,), math.nan)])
    cu_seqlens = torch.tensor([shift, 3, 5], dtype=torch.int32)
    assert segment_sum(x, cu_seqlens, impl=impl).tolist() == [3.0 - shift, 2.0]
    assert segment_mean(x, cu_seqlens, impl=impl).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_counted_nan_and_infinity_propagate(impl: Any, dtype: torch.dtype) -> None:
    nan, inf = math.nan, math.inf
    x = torch.tensor([nan, 1, inf, 2, nan, 3, -inf, -inf, inf, 1, -nan, 4, inf, -inf], dtype=dtype)
    mask = torch.arange(14) % 13 != 0
    mask[2] = False
    cu_seqlens = boundaries([4, 2, 2, 2, 0, 2, 1, 1])
    expected = {
        "sum": [3, nan, -inf, inf, 0, nan, inf, 0],
        "mean": [1.5, nan, -inf, inf, 0, nan, inf, 0],
    }
    for name, values in expected.items():
        reduced = REDUCTIONS[name](x, cu_seqlens, mask=mask, impl=impl)
        assert_same_bits(reduced, torch.tensor(values, dtype=dtype))
    assert segment_sum(x[-2:], boundaries([2]), impl=impl).isnan().all()


def test_zero_is_never_negative(impl: Any) -> None:
    for function in REDUCTIONS.values():
        reduced = function(torch.tensor([-0.0, -0.0, 0.0]), boundaries([1, 2]), impl=impl)
        assert_same_bits(reduced, torch.zeros(2))


def test_integers_are_added_up_exactly(impl: Any) -> None:
    x = torch.tensor([2**53, 1, 1, 2**31, 2**62, -(2**62)])
    assert segment_sum(x, boundaries([3, 1, 2]), impl=impl).tolist() == [2**53 + 2, 2**31, 0]
    ones = torch.full((3,), 2**31 - 1, dtype=torch.int32)
    assert segment_sum(ones, boundaries([3]), impl=impl).tolist() == [3 * (2**31 - 1)]


def test_a_long_segment_loses_no_precision() -> None:
    x = entries_of(1_000_003, torch.float32) + 1000
    exact = math.fsum(x[7:].tolist())
    reduced = segment_sum(x, boundaries([7, 999_996]), impl="torch")
    assert abs(float(reduced[1]) - np.float32(exact)) <= np.spacing(np.float32(exact))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_segment_has_the_same_bits_alone_and_packed(
    impl: Any, name: str, dtype: torch.dtype
) -> None:
    lengths = [5, 0, 300, 1, 4097, 33, 64]
    x, function = entries_of(sum(lengths), dtype), REDUCTIONS[name]
    for mask in (None, mask_of(len(x))):
        together = function(x, boundaries(lengths), mask=mask, impl=impl)
        for index, (begin, end) in enumerate(spans_of(lengths)):
            part = None if mask is None else mask[begin:end]
            alone = function(x[begin:end], boundaries([end - begin]), mask=part, impl=impl)
            assert_same_bits(alone, together[index : index + 1])


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4))
@settings(max_examples=8)
def test_a_bound_of_the_lengths_changes_no_bit(impl: Any, lengths: list[int]) -> None:
    x, ends = entries_of(sum(lengths) + 5000, torch.float32), boundaries([5000, *lengths])[1:]
    bounded = segment_sum(x, ends, max_seqlen=max(lengths), impl=impl)
    assert_same_bits(bounded, segment_sum(x, ends, impl=impl))


OP = torch.ops.trajpack.segment_sum.default
CU = boundaries([3, 0, 2])
TURNS = torch.tensor([[3, 5], [4, 4], [0, 2]], dtype=torch.int32)
MASK = torch.tensor([True, False, True, True, True])
ONES = torch.ones(5)


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
@pytest.mark.parametrize("segments", [CU, TURNS], ids=["boundaries", "spans"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_gradients_are_right(
    impl: Any, name: str, segments: torch.Tensor, mask: torch.Tensor | None
) -> None:
    x = entries_of(5, torch.float64).requires_grad_()

    def reduce(x: torch.Tensor) -> torch.Tensor:
        return REDUCTIONS[name](x, segments, mask=mask, impl=impl)

    assert torch.autograd.gradcheck(reduce, x)
    assert torch.autograd.gradgradcheck(lambda x: reduce(x).square(), x)
    for empty in (CU[:1], TURNS[:0]):
        (gradient,) = torch.autograd.grad(segment_sum(x, empty, impl=impl).sum(), x)
        assert_same_bits(gradient, torch.zeros_like(x))


def test_the_operator_is_registered_right(impl: str) -> None:
    torch.library.opcheck(OP, (torch.arange(5), CU, None, "segment_sum", impl, None))
    x = entries_of(5, torch.float32).requires_grad_()
    torch.library.opcheck(OP, (x, CU, MASK, "segment_sum", impl, 5))


@pytest.mark.parametrize(
    ("error", "match", "arguments", "keywords"),
    [
        (TypeError, r"^segment_mean: x must be a tensor, got list", ([1.0], CU), {}),
        (TypeError, "x must be float32 or .*, got float16", (ONES.half(), CU), {}),
        (ValueError, r"x must have 1 dim.*got shape \[1, 5\]", (ONES[None], CU), {}),
        (TypeError, "segments must be int32, got int64", (ONES, CU.long()), {}),
        (TypeError, "segments must be a tensor, got list", (ONES, [0, 5]), {}),
        (ValueError, r"segments must have 1 dim.*\[1, 1, 4\]", (ONES, CU[None, None]), {}),
        (ValueError, r"or spans \[segments, 2\], got shape \[1, 4\]", (ONES, CU[None]), {}),
        (ValueError, r"must have segments \+ 1 boundaries", (ONES, CU[:0]), {}),
        (ValueError, "segments is on meta but .* on cpu", (ONES, CU.to("meta")), {}),
        (ValueError, "^segment_mean: .* lie within 4 entries .*from 3 to 5", (ONES[:4], CU), {}),
        (ValueError, "segment 0 goes from 5 to 3", (ONES, CU.flip(0)), {}),
        (ValueError, "segment 0 goes from -1 to 1", (ONES, TURNS - 4), {}),
        (TypeError, "mask must be bool, got float32", (ONES, CU), {"mask": ONES}),
        (ValueError, r"each of 5 entry.*got shape \[4\]", (ONES, CU), {"mask": MASK[1:]}),
        (ValueError, "mask is on meta", (ONES, CU), {"mask": MASK.to("meta")}),
        (TypeError, "max_seqlen must be an int or None, got 3.0", (ONES, CU), {"max_seqlen": 3.0}),
        (ValueError, "max_seqlen must not be negative, got -1", (ONES, CU), {"max_seqlen": -1}),
        (ValueError, "impl must be .*, got 'nonsense'", (ONES, CU), {"impl": "nonsense"}),
    ],
)
def test_wrong_input_is_named(
    error: type[Exception], match: str, arguments: Any, keywords: dict[str, Any]
) -> None:
    with pytest.raises(error, match=match):
        segment_mean(*arguments, **keywords)


def test_strides_are_followed(impl: Any) -> None:
    x, mask = entries_of(10, torch.float32), MASK.repeat_interleave(2)
    spans = torch.stack([TURNS, TURNS], 2)[..., 0]
    for segments in (CU.repeat_interleave(2)[::2], spans):
        strided = segment_sum(x[::2], segments, mask=mask[::2], impl=impl)
        copied = [t.clone(memory_format=torch.contiguous_format) for t in (x[::2], segments)]
        assert_same_bits(strided, segment_sum(*copied, mask=MASK, impl=impl))


@pytest.mark.parametrize("ends", [[0, 4, 900], [-5, -2, 3], [700, 800, 900]])
def test_bad_boundaries_of_a_device_stay_in_bounds(
    executor: Any, monkeypatch: pytest.MonkeyPatch, ends: list[int]
) -> None:
    """As on a device, where nothing checks them; NaN from outside would show."""
    monkeypatch.setattr("trajpack.kernels.validation.HOSTS", ())
    memory = torch.full((3000,), math.nan)
    memory[1000:1011] = 1
    x, cu_seqlens = memory[1000:1011], torch.tensor(ends, dtype=torch.int32)
    found = segment_sum(x, cu_seqlens, impl="triton")
    assert_same_bits(found, segment_sum_reference(x, cu_seqlens))
