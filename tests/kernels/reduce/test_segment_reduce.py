"""Segment reductions: meaning, precision, company, both regimes, gradients, wrong input."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.ptx.executor import on_executor
from tests.support.slow import slow_after
from trajpack.kernels.reduce import segment_reduce_triton
from trajpack.kernels.reduce.segment_reduce import (
    segment_max,
    segment_mean,
    segment_reduce_reference,
    segment_sum,
)
from trajpack.kernels.reduce.segment_reduce_triton import FEWEST_ENTRIES, segment_reduce_forward
from trajpack.testing import assert_same_bits, boundaries

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
    """Return no mask and one; on the executor, which takes its time, one of them by turns."""
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


SPAN_CASES = {
    "backward, with gaps, ends and an empty one": [[90, 100], [40, 60], [50, 50], [60, 61], [3, 9]],
    "an empty one where another begins": [[5, 5], [5, 30], [5, 5], [30, 30], [100, 100]],
    "none": [],
}


@pytest.mark.parametrize("spans", SPAN_CASES.values(), ids=SPAN_CASES.keys())
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_only_counted_nan_and_infinity_propagate(impl: Any, dtype: torch.dtype) -> None:
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
def test_a_segment_has_the_same_bits_alone_and_packed(
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


def by_regime(
    regime: str, x: torch.Tensor, cu_seqlens: torch.Tensor, mask: Any, out: torch.Tensor, name: str
) -> torch.Tensor:
    """Reduce into ``out`` by one launch over ``"rows"`` or by two over ``"chunks"``."""
    with pytest.MonkeyPatch.context() as patch:
        few = len(x) if regime == "rows" else -1
        patch.setattr(segment_reduce_triton, "FEWEST_ENTRIES", few)
        segment_reduce_forward(x, cu_seqlens, mask, out, reduction=name, max_seqlen=None)
    return out


def assert_regimes_agree(x: torch.Tensor, cu_seqlens: torch.Tensor, mask: Any, name: str) -> None:
    """Assert that both are right, to the same bits."""
    expected = segment_reduce_reference(x, cu_seqlens, mask, name)
    rows, chunks = (
        by_regime(regime, x, cu_seqlens, mask, torch.full_like(expected, 7), name)
        for regime in ("rows", "chunks")
    )
    assert_same_bits(chunks, rows)
    torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-6)


def cut_small(patch: pytest.MonkeyPatch) -> None:
    """Let a chunk end after 8 entries, so that there are more chunks than a step takes."""
    for constant, size in {"ROWS": 2, "LANES": 2, "STEPS": 2, "CHUNK": 8}.items():
        patch.setattr(segment_reduce_triton, constant, size)


@pytest.mark.parametrize(("name", "dtype"), slow_after(4, CASES[::-1]), ids=str)
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
def test_both_regimes_give_the_same_bits_for_any_lengths(lengths: list[int], name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch)
        x = entries_of(sum(lengths), torch.float64)
        assert_regimes_agree(x, boundaries(lengths), mask_of(len(x)), name)


@pytest.mark.parametrize("name", slow_after(1, REDUCTIONS))
def test_both_regimes_give_the_same_bits_at_full_size(name: str) -> None:
    lengths = [2048 + 5, 100, 2048]
    x = entries_of(sum(lengths), torch.float64)
    assert_regimes_agree(x, boundaries(lengths), mask_of(len(x)), name)


"""Segment reductions as an operator: gradients, registration, no values read, wrong input."""

OP = torch.ops.trajpack.segment_reduce.default
CU = boundaries([3, 0, 2])
SPANS = torch.tensor([[3, 5], [4, 4], [0, 2]], dtype=torch.int32)
SEGMENTS = {"boundaries": CU, "spans": SPANS}
MASK = torch.tensor([True, False, True, True, True])


def random_entries(num: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(num)).to(dtype)


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
@pytest.mark.parametrize("name", REDUCTIONS)
def test_gradients_are_right(
    impl: Any, name: str, segments: torch.Tensor, mask: torch.Tensor | None
) -> None:
    held = torch.arange(5) >= 0 if segments is CU else torch.tensor([1, 1, 0, 1, 1]).bool()
    held = held if mask is None else held & mask
    x = random_entries(5, torch.float64).requires_grad_()

    def reduce(x: torch.Tensor) -> torch.Tensor:
        return REDUCTIONS[name](x, segments, mask=mask, impl=impl)[[0, 2]]  # not -inf of nothing

    assert torch.autograd.gradcheck(reduce, x, fast_mode=impl == "triton")  # it interprets slowly
    (gradient,) = torch.autograd.grad(reduce(x).sum(), x)
    assert (gradient[~held] == 0).all()
    assert gradient.sum() == pytest.approx({"sum": int(held.sum())}.get(name, 2.0))


@pytest.mark.parametrize("name", ["sum", "mean"])
def test_gradients_have_gradients(name: str) -> None:
    x = random_entries(5, torch.float64).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: REDUCTIONS[name](x, CU, mask=MASK).square(), x)


def test_equal_maxima_share_the_gradient_as_in_amax(impl: Any) -> None:
    for values in ([2.0, 5.0, 5.0], [-0.0, 0.0, -1.0], [math.inf, 1.0, math.inf], [-math.inf] * 3):
        ours, theirs = (torch.tensor(values, requires_grad=True) for _ in range(2))
        (segment_max(ours, boundaries([3]), impl=impl) * 3).sum().backward()
        (theirs.amax() * 3).backward()
        assert_same_bits(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_a_masked_maximum_takes_no_gradient_and_nan_keeps_its_own(impl: Any) -> None:
    x = torch.tensor([5.0, 5.0, 1.0, math.nan, 2.0], requires_grad=True)
    mask = torch.tensor([False, True, True, True, True])
    segment_max(x, CU, mask=mask, impl=impl)[[0, 2]].sum().backward()
    assert x.grad.tolist() == [0, 1, 0, 1, 0]  # type: ignore[union-attr]


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
def test_gradients_that_are_expanded_are_read_right(impl: Any, segments: torch.Tensor) -> None:
    thirds = [1 / 3, 1 / 3, 1 / 3, 0.5, 0.5] if segments is CU else [0.5, 0.5, 0, 0.5, 0.5]
    for name, expected in (("sum", [float(share > 0) for share in thirds]), ("mean", thirds)):
        x = torch.zeros(5, requires_grad=True)
        REDUCTIONS[name](x, segments, impl=impl).sum().backward()
        assert_same_bits(x.grad, torch.tensor(expected), name)  # type: ignore[arg-type]


def test_without_segments_the_gradient_is_zero(impl: Any) -> None:
    for name, reduction in REDUCTIONS.items():
        for segments in (CU[:1], SPANS[:0]):
            x = torch.ones(5, requires_grad=True)
            reduction(x, segments, impl=impl).sum().backward()
            assert_same_bits(x.grad, torch.zeros(5), name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", slow_after(1, REDUCTIONS))
def test_the_operator_is_registered_right(impl: str, name: str) -> None:
    x = random_entries(5)
    torch.library.opcheck(OP, (x.long(), CU, None, name, impl, None))
    torch.library.opcheck(OP, (x.requires_grad_(), SPANS, MASK, name, impl, 5))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_it_compiles_into_one_graph(name: str, dynamic: bool) -> None:
    def loss(x: torch.Tensor, segments: torch.Tensor, bound: int) -> torch.Tensor:
        return REDUCTIONS[name](x * 2, segments, max_seqlen=bound).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in ([3, 4], [1, 2, 8]):
        eager, traced = (random_entries(sum(lengths)).requires_grad_() for _ in range(2))
        loss(eager, boundaries(lengths), max(lengths)).backward()
        compiled(traced, boundaries(lengths), max(lengths)).backward()
        assert_same_bits(traced.grad, eager.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("impl", ["auto", "torch", "triton"])
@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS.keys())
@pytest.mark.parametrize("name", REDUCTIONS)
def test_shapes_alone_are_enough_on_the_meta_device(
    name: str, segments: torch.Tensor, impl: Any
) -> None:
    x = torch.empty(5, device="meta", dtype=torch.float64, requires_grad=True)
    reduced = REDUCTIONS[name](x, segments.to("meta"), mask=MASK.to("meta"), impl=impl)
    assert (reduced.shape, reduced.dtype, reduced.device.type) == ((3,), torch.float64, "meta")
    reduced.sum().backward()
    assert (x.grad.shape, x.grad.device.type) == ((5,), "meta")  # type: ignore[union-attr]
    reference = segment_reduce_reference(x, segments.to("meta"), MASK.to("meta"), name)
    assert (reference.shape, reference.dtype) == ((3,), torch.float64)


ONES = torch.ones(5)


@pytest.mark.parametrize(
    ("error", "match", "arguments", "keywords"),
    [
        (TypeError, r"^segment_max: x must be a tensor, got list", ([1.0], CU), {}),
        (TypeError, "x must be float32 or .*int64, got bool", (MASK, CU), {}),
        (TypeError, "x must be float32 or .*, got float16", (ONES.half(), CU), {}),
        (ValueError, r"x must have 1 dim.*got shape \[1, 5\]", (ONES[None], CU), {}),
        (TypeError, "segments must be int32, got int64", (ONES, CU.long()), {}),
        (TypeError, "segments must be a tensor, got list", (ONES, [0, 5]), {}),
        (ValueError, r"segments must have 1 dim.*\[1, 1, 4\]", (ONES, CU[None, None]), {}),
        (ValueError, r"or spans \[segments, 2\], got shape \[1, 4\]", (ONES, CU[None]), {}),
        (ValueError, r"must have segments \+ 1 boundaries", (ONES, CU[:0]), {}),
        (ValueError, "segments is on meta but .* on cpu", (ONES, CU.to("meta")), {}),
        (ValueError, "lie within 4 entries .*segment 2 goes from 3 to 5", (ONES[:4], CU), {}),
        (ValueError, "segment 0 goes from 5 to 3", (ONES, CU.flip(0)), {}),
        (ValueError, "segment 0 goes from -1 to 1", (ONES, SPANS - 4), {}),
        (TypeError, "mask must be bool, got float32", (ONES, CU), {"mask": ONES}),
        (ValueError, r"each of 5 entry.*got shape \[4\]", (ONES, CU), {"mask": MASK[1:]}),
        (ValueError, "mask is on meta", (ONES, CU), {"mask": MASK.to("meta")}),
        (TypeError, "max_seqlen must be an int or None, got 3.0", (ONES, CU), {"max_seqlen": 3.0}),
        (TypeError, "max_seqlen must be an int .*, got True", (ONES, CU), {"max_seqlen": True}),
        (ValueError, "max_seqlen must not be negative, got -1", (ONES, CU), {"max_seqlen": -1}),
        (ValueError, "impl must be .*, got 'nonsense'", (ONES, CU), {"impl": "nonsense"}),
    ],
)
def test_wrong_input_is_named(
    error: type[Exception], match: str, arguments: Any, keywords: dict[str, Any]
) -> None:
    with pytest.raises(error, match=match):
        segment_max(*arguments, **keywords)


def test_strides_are_followed(impl: Any) -> None:
    x, mask = random_entries(10), MASK.repeat_interleave(2)
    spans = torch.stack([SPANS, SPANS], 2)[..., 0]
    for segments in (CU.repeat_interleave(2)[::2], spans):
        strided = segment_sum(x[::2], segments, mask=mask[::2], impl=impl)
        copied = [t.clone(memory_format=torch.contiguous_format) for t in (x[::2], segments)]
        assert_same_bits(strided, segment_sum(*copied, mask=MASK, impl=impl))


BROKEN = {
    "beyond the entries": [0, 4, 900],
    "negative": [-5, -2, 3],
    "begins late": [700, 800, 900],
    "backward": [0, 9, 2, 11, -(2**31), 2**31 - 1],
}


@pytest.mark.parametrize("ends", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("name", REDUCTIONS)
def test_the_kernels_stay_in_bounds_with_bad_boundaries(
    monkeypatch: pytest.MonkeyPatch, name: str, ends: list[int]
) -> None:
    """As on a device, where nothing checks them; NaN from outside would show."""
    for constant, size in {"ROWS": 2, "LANES": 2, "STEPS": 2, "CHUNK": 8}.items():
        monkeypatch.setattr(segment_reduce_triton, constant, size)
    memory = torch.full((3000,), math.nan)
    memory[1000:1011] = 1
    x, cu_seqlens = memory[1000:1011], torch.tensor(ends, dtype=torch.int32)
    out = torch.full((len(ends) - 1,), math.nan)
    decreases = ends is BROKEN["backward"]  # then chunks are missed, so only rows are defined
    for regime in ("rows", "chunks")[: 1 if decreases else 2]:
        by_regime(regime, x, cu_seqlens, None, out.fill_(math.nan), name)
        assert not out.isnan().any()
        if not decreases:
            assert_same_bits(out, segment_reduce_reference(x, cu_seqlens, None, name))


ROWS, CHUNKS = ["segment_reduce_kernel"], ["chunk_partials_kernel", "segment_reduce_kernel"]


@pytest.mark.parametrize(
    ("entries", "max_seqlen", "is_spans", "launched"),
    [
        (FEWEST_ENTRIES, None, False, ROWS),
        (FEWEST_ENTRIES + 1, None, False, CHUNKS),
        (FEWEST_ENTRIES + 1, 4096, False, ROWS),
        (FEWEST_ENTRIES + 1, 4097, False, CHUNKS),
        (FEWEST_ENTRIES, 4097, False, ROWS),
        (FEWEST_ENTRIES + 1, None, True, ROWS),
    ],
)
def test_max_seqlen_decides_the_launches(
    entries: int, max_seqlen: int | None, is_spans: bool, launched: list[str]
) -> None:
    segments = torch.zeros((1, 2) if is_spans else 2, dtype=torch.int32)
    x = torch.zeros(entries)
    with on_executor() as executor:
        segment_reduce_forward(
            x, segments, None, torch.zeros(1), reduction="sum", max_seqlen=max_seqlen
        )
    assert executor.launched == launched
