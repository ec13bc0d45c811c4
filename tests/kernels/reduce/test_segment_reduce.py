"""Segment reductions: meaning, precision, company, the bits of both regimes."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from trajpack.kernels.reduce import segment_reduce_triton
from trajpack.kernels.reduce.segment_reduce import (
    segment_max,
    segment_mean,
    segment_reduce_reference,
    segment_sum,
)
from trajpack.kernels.reduce.segment_reduce_triton import (
    chunk_fold,
    chunk_partials,
    segment_rows,
)
from trajpack.testing import assert_same_bits, boundaries

pytestmark = pytest.mark.usefixtures("poisoned_memory")

REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": segment_sum,
    "mean": segment_mean,
    "max": segment_max,
}
DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)
CASES = [
    (name, dtype) for name in REDUCTIONS for dtype in DTYPES if (name, dtype) != ("max", torch.bool)
]
LENGTHS = {
    "no segments": [],
    "only empty segments": [0, 0, 0],
    "one entry": [1],
    "edges of a row of lanes and of a step": [31, 32, 33, 0, 255, 256, 257],
    "more than a chunk": [3, 2049],
    "many short ones": [i * 7 % 5 for i in range(30)],
    "empty at both ends": [0, 0, 9, 0, 2, 0],
}


def entries_of(num: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    if dtype == torch.bool:
        return torch.from_numpy(rng.random(num) < 0.6)
    if dtype.is_floating_point:
        return torch.from_numpy(rng.standard_normal(num)).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.from_numpy(rng.integers(limits.min // 5000, limits.max // 5000, num)).to(dtype)


def mask_of(num: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).random(num) < 0.5)


def masks_for(impl: Any, num: int, case: int) -> list[torch.Tensor | None]:
    """Return no mask and one; in the interpreter, which takes its time, one of them by turns."""
    masks = [None, mask_of(num)]
    return masks[case % 2 :][:1] if impl == "triton" else masks


def by_loop(
    name: str, x: torch.Tensor, spans: list[list[int]], mask: torch.Tensor | None
) -> list[float]:
    """Reduce one segment after the other, exactly."""
    values, counts = x.tolist(), [True] * len(x) if mask is None else mask.tolist()
    floats = x.dtype.is_floating_point
    least = -math.inf if floats or x.dtype == torch.bool else torch.iinfo(x.dtype).min
    results = []
    for begin, end in spans:
        kept = [values[i] for i in range(begin, end) if counts[i]]
        total = math.fsum(kept) if floats else sum(kept)
        mean = total / max(len(kept), 1)
        results.append({"sum": total, "mean": mean, "max": max(kept, default=least)}[name])
    return results


def spans_of(lengths: list[int]) -> list[list[int]]:
    ends = np.cumsum([0, *lengths]).tolist()
    return [list(pair) for pair in pairwise(ends)]


def assert_reduces(actual: torch.Tensor, name: str, x: torch.Tensor, exact: list[float]) -> None:
    """Assert the dtype and that values are exact, or of floats within a rounding or two."""
    if name == "max" or x.dtype.is_floating_point:
        dtype = x.dtype
    else:
        dtype = torch.float32 if name == "mean" else torch.int64
    assert (actual.dtype, list(actual.shape)) == (dtype, [len(exact)])
    if name != "max" and dtype.is_floating_point:
        scale = float(x.double().abs().sum()) if x.dtype.is_floating_point else 0.0
        allowed = torch.finfo(dtype).eps * np.abs(exact) + 1e-15 * scale
        assert (np.abs(actual.double().numpy() - np.array(exact)) <= allowed).all()
    else:
        assert actual.tolist() == exact


def test_a_small_batch_is_reduced_as_by_hand(impl: Any) -> None:
    x, cu_seqlens = torch.tensor([1.0, 2.0, 6.0, -4.0]), boundaries([3, 0, 1])
    mask = torch.tensor([True, False, True, True])
    results = [f(x, cu_seqlens, impl=impl).tolist() for f in REDUCTIONS.values()]
    assert results == [[9.0, 0.0, -4.0], [3.0, 0.0, -4.0], [6.0, -math.inf, -4.0]]
    results = [f(x, cu_seqlens, mask=mask, impl=impl).tolist() for f in REDUCTIONS.values()]
    assert results == [[7.0, 0.0, -4.0], [3.5, 0.0, -4.0], [6.0, -math.inf, -4.0]]
    assert segment_sum(mask, cu_seqlens, impl=impl).tolist() == [2, 0, 1]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_they_equal_a_loop_over_segments(
    impl: Any, name: str, dtype: torch.dtype, lengths: list[int]
) -> None:
    x = entries_of(sum(lengths), dtype)
    for mask in masks_for(impl, len(x), CASES.index((name, dtype)) + len(lengths)):
        exact = by_loop(name, x, spans_of(lengths), mask)
        reduced = REDUCTIONS[name](x, boundaries(lengths), mask=mask, impl=impl)
        assert_reduces(reduced, name, x, exact)
        reference = segment_reduce_reference(x, boundaries(lengths), mask, name)
        assert_reduces(reference, name, x, exact)


SPANS = {
    "backward, with gaps, ends and an empty one": [[90, 100], [40, 60], [50, 50], [60, 61], [3, 9]],
    "an empty one where another begins": [[5, 5], [5, 30], [5, 5], [30, 30], [100, 100]],
    "none": [],
}


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS.keys())
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_spans_may_be_in_any_order(
    impl: Any, name: str, dtype: torch.dtype, spans: list[list[int]]
) -> None:
    x, table = entries_of(100, dtype), torch.tensor(spans, dtype=torch.int32).view(-1, 2)
    for mask in (None, mask_of(100)):
        exact = by_loop(name, x, spans, mask)
        assert_reduces(REDUCTIONS[name](x, table, mask=mask, impl=impl), name, x, exact)
        reference = segment_reduce_reference(x, table, mask, name)
        assert_reduces(reference, name, x, exact)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_entries_past_the_last_boundary_count_nowhere(impl: Any, name: str) -> None:
    x = torch.cat([torch.ones(5), torch.full((9000,), math.nan)])
    for shift in (0, 2):
        cu_seqlens = torch.tensor([shift, 3, 5], dtype=torch.int32)
        reduced = REDUCTIONS[name](x, cu_seqlens, impl=impl)
        assert reduced.tolist() == ([3.0 - shift, 2.0] if name == "sum" else [1.0, 1.0])


@pytest.mark.parametrize("name", REDUCTIONS)
def test_torch_reduces_segments_to_the_same(impl: Any, name: str) -> None:
    lengths = [5, 1, 300, 77]
    x = entries_of(sum(lengths), torch.float64)
    expected = torch.segment_reduce(x, name, lengths=torch.tensor(lengths))
    reduced = REDUCTIONS[name](x, boundaries(lengths), impl=impl)
    torch.testing.assert_close(reduced, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_masked_out_does_not_leak_and_what_counts_propagates(
    impl: Any, dtype: torch.dtype
) -> None:
    nan, inf = math.nan, math.inf
    x = torch.tensor([nan, 1, inf, 2, nan, 3, -inf, -inf, inf, 1, -nan, 4], dtype=dtype)
    mask = torch.tensor([0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], dtype=torch.bool)
    cu_seqlens = boundaries([4, 2, 2, 2, 0, 2])
    expected = {
        "sum": [3, nan, -inf, inf, 0, nan],
        "mean": [1.5, nan, -inf, inf, 0, nan],
        "max": [2, nan, -inf, inf, -inf, nan],
    }
    for name, values in expected.items():
        reduced = REDUCTIONS[name](x, cu_seqlens, mask=mask, impl=impl)
        assert_same_bits(reduced, torch.tensor(values, dtype=dtype))
        reference = segment_reduce_reference(x, cu_seqlens, mask, name)
        assert_same_bits(reference, torch.tensor(values, dtype=dtype))
    both = torch.tensor([inf, -inf], dtype=dtype)
    assert_same_bits(
        segment_sum(both, boundaries([2]), impl=impl), torch.tensor([nan], dtype=dtype)
    )


def test_zero_is_never_negative(impl: Any) -> None:
    for function in REDUCTIONS.values():
        reduced = function(torch.tensor([-0.0, -0.0, 0.0]), boundaries([1, 2]), impl=impl)
        assert_same_bits(reduced, torch.zeros(2))


def test_integers_are_added_up_exactly(impl: Any) -> None:
    x = torch.tensor([2**53, 1, 1, 2**31, 2**62, -(2**62)])
    assert segment_sum(x, boundaries([3, 1, 2]), impl=impl).tolist() == [2**53 + 2, 2**31, 0]
    ones = torch.full((3,), 2**31 - 1, dtype=torch.int32)
    assert segment_sum(ones, boundaries([3]), impl=impl).tolist() == [3 * (2**31 - 1)]


def test_the_host_loses_no_precision_over_a_long_segment() -> None:
    x = entries_of(1_000_003, torch.float32) + 1000
    exact = math.fsum(x.tolist())
    reduced = segment_sum(x, boundaries([7, 1_000_000 - 4]), impl="torch")
    expected = np.float32(exact - math.fsum(x[:7].tolist()))
    assert abs(float(reduced[1]) - expected) <= np.spacing(expected)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_segment_has_the_same_bits_in_any_company(
    monkeypatch: pytest.MonkeyPatch, impl: Any, name: str, dtype: torch.dtype
) -> None:
    lengths = [5, 0, 300, 1, 4097, 33, 2048, 64, 3000]
    if impl == "triton":
        cut_small(monkeypatch)
        monkeypatch.setattr(segment_reduce_triton, "FEWEST_ENTRIES", 40)
        lengths = [5, 0, 33, 1, 7, 9, 16, 4, 2]
    x, function = entries_of(sum(lengths), dtype), REDUCTIONS[name]
    mask = mask_of(len(x))
    for chosen in (None, mask):
        together = function(x, boundaries(lengths), mask=chosen, impl=impl)
        order = np.random.default_rng(2).permutation(len(lengths))
        spans = torch.tensor(spans_of(lengths), dtype=torch.int32)[torch.from_numpy(order)]
        assert_same_bits(function(x, spans, mask=chosen, impl=impl), together[order])
        for index, (begin, end) in enumerate(spans_of(lengths)):
            part = None if chosen is None else chosen[begin:end]
            alone = function(x[begin:end], boundaries([end - begin]), mask=part, impl=impl)
            assert_same_bits(alone, together[index : index + 1])


def by_chunks(
    x: torch.Tensor, cu_seqlens: torch.Tensor, mask: torch.Tensor | None, out: Any, name: str
) -> None:
    partials, counts = chunk_partials(x, cu_seqlens, mask, name)
    chunk_fold(x, cu_seqlens, mask, out, name, partials, counts)


def assert_regimes_agree(x: torch.Tensor, cu_seqlens: torch.Tensor, mask: Any, name: str) -> None:
    """Assert that both are right, to the same bits."""
    outs = [segment_reduce_reference(x, cu_seqlens, mask, name) for _ in range(3)]
    segment_rows(x, cu_seqlens, mask, outs[1].fill_(7), name)
    by_chunks(x, cu_seqlens, mask, outs[2].fill_(7), name)
    assert_same_bits(outs[2], outs[1])
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-6, atol=1e-6)


def cut_small(patch: pytest.MonkeyPatch) -> None:
    """Let a chunk end after 8 entries, so that there are more chunks than a step takes."""
    for constant, size in {"ROWS": 2, "LANES": 2, "STEPS": 2, "CHUNK": 8}.items():
        patch.setattr(segment_reduce_triton, constant, size)


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
@pytest.mark.usefixtures("interpreter")
def test_both_regimes_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    cut_small(monkeypatch)
    lengths = [7, 8, 9, 0, 16, 17, 1, 0, 49, 2, 0]
    x = entries_of(sum(lengths) + 10, dtype)
    for mask in (None, mask_of(len(x))):
        assert_regimes_agree(x, boundaries(lengths), mask, name)
        assert_regimes_agree(x, boundaries([3, *lengths])[1:], mask, name)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.sampled_from(list(REDUCTIONS)))
@settings(max_examples=8)
@pytest.mark.usefixtures("interpreter")
def test_both_regimes_give_the_same_bits_for_any_lengths(lengths: list[int], name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch)
        x = entries_of(sum(lengths), torch.float64)
        assert_regimes_agree(x, boundaries(lengths), mask_of(len(x)), name)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.usefixtures("interpreter")
def test_both_regimes_give_the_same_bits_at_full_size(name: str) -> None:
    lengths = [2048 + 5, 100, 2048]
    x = entries_of(sum(lengths), torch.float64)
    assert_regimes_agree(x, boundaries(lengths), mask_of(len(x)), name)
