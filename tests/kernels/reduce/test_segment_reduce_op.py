"""Segment reductions as an operator: gradients, registration, no values read, wrong input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from trajpack.kernels.reduce import segment_reduce_triton
from trajpack.kernels.reduce.segment_reduce import (
    segment_max,
    segment_mean,
    segment_reduce_reference,
    segment_sum,
)
from trajpack.kernels.reduce.segment_reduce_triton import (
    FEWEST_ENTRIES,
    chunk_fold,
    chunk_partials,
    segment_reduce_forward,
    segment_rows,
)
from trajpack.testing import assert_same_bits, boundaries

OP = torch.ops.trajpack.segment_reduce.default
REDUCTIONS: dict[str, Any] = {"sum": segment_sum, "mean": segment_mean, "max": segment_max}
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


def test_equal_maxima_share_the_gradient_as_amax_has_it(impl: Any) -> None:
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


def test_segments_that_are_not_there_have_a_gradient_of_zero(impl: Any) -> None:
    for name, reduction in REDUCTIONS.items():
        for segments in (CU[:1], SPANS[:0]):
            x = torch.ones(5, requires_grad=True)
            reduction(x, segments, impl=impl).sum().backward()
            assert_same_bits(x.grad, torch.zeros(5), name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_the_operator_is_registered_right(impl: str, name: str) -> None:
    x = random_entries(5)
    for leaf in (x, x.clone().requires_grad_(), x.long()):
        for segments, mask, bound in ((CU, None, ()), (SPANS, MASK, (5,))):
            torch.library.opcheck(OP, (leaf, segments, mask, name, impl, *bound))


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
@pytest.mark.usefixtures("interpreter")
def test_the_kernels_stay_inside_whatever_boundaries_say(
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
        inputs = x, cu_seqlens, None, out.fill_(math.nan), name
        if regime == "rows":
            segment_rows(*inputs)
        else:
            chunk_fold(*inputs, *chunk_partials(x, cu_seqlens, None, name))
        assert not out.isnan().any()
        if not decreases:
            assert_same_bits(out, segment_reduce_reference(x, cu_seqlens, None, name))


@pytest.mark.parametrize(
    ("entries", "max_seqlen", "is_spans", "launched"),
    [
        (FEWEST_ENTRIES, None, False, ["rows"]),
        (FEWEST_ENTRIES + 1, None, False, ["partials", "fold"]),
        (FEWEST_ENTRIES + 1, 4096, False, ["rows"]),
        (FEWEST_ENTRIES + 1, 4097, False, ["partials", "fold"]),
        (FEWEST_ENTRIES, 4097, False, ["rows"]),
        (FEWEST_ENTRIES + 1, None, True, ["rows"]),
    ],
)
def test_the_bound_decides_what_is_launched(
    monkeypatch: pytest.MonkeyPatch,
    entries: int,
    max_seqlen: int | None,
    is_spans: bool,
    launched: list[str],
) -> None:
    calls: list[str] = []

    def record(name: str) -> tuple[None, None]:
        calls.append(name.split("_")[1])
        return None, None

    for name in ("segment_rows", "chunk_partials", "chunk_fold"):
        monkeypatch.setattr(segment_reduce_triton, name, lambda *_, n=name: record(n))
    segments = torch.zeros((1, 2) if is_spans else 2, dtype=torch.int32)
    x = torch.zeros(entries)
    segment_reduce_forward(
        x, segments, None, torch.zeros(1), reduction="sum", max_seqlen=max_seqlen
    )
    assert calls == launched
