"""Moments and whitening: meaning, little or no variance, laws, sums of several ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.ptx.executor import on_executor
from trajpack.kernels import whiten
from trajpack.kernels.reduce import whiten_triton
from trajpack.kernels.reduce.whiten import (
    masked_moments_reference,
    moments_of,
    moments_of_sums,
    sums_of_moments,
    whiten_by,
    whiten_reference,
)
from trajpack.kernels.reduce.whiten_triton import new_counter
from trajpack.testing import assert_same_bits

CHUNK = whiten_triton.CHUNK
SIZES = [0, 1, 2, 100, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77]


def sums_of(x: torch.Tensor, mask: torch.Tensor, impl: Any) -> torch.Tensor:
    """Return the sums that ranks add up."""
    return sums_of_moments(moments_of(x, mask, impl))


def whiten_by_sums(
    x: torch.Tensor, mask: torch.Tensor, sums: torch.Tensor, impl: Any, **options: Any
) -> torch.Tensor:
    """Whiten by sums of several ranks, as `PackedBatch.with_advantages` does."""
    options = {"ddof": 1} | options
    return whiten_by(x, mask, moments_of_sums(sums), impl=impl, **options)[0]


def batch(
    size: int,
    mean: float = 0.5,
    std: float = 3.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return entries and a mask; what is not counted is NaN or infinite."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(mean + std * rng.standard_normal(size)).to(dtype)
    counted = rng.random(size) < 0.6
    uncounted = rng.choice([np.nan, np.inf, -np.inf], size)
    return torch.where(torch.from_numpy(counted), x, torch.from_numpy(uncounted).to(dtype)), (
        torch.from_numpy(counted)
    )


def by_numpy(
    x: torch.Tensor, mask: torch.Tensor, ddof: int = 1, eps: float = 0.0, center: bool = True
) -> npt.NDArray[np.float64]:
    """Whiten in the words of the formula, over the list of counted entries."""
    counted = [float(value) for value, counts in zip(x, mask, strict=True) if counts]
    out = np.zeros(len(x))
    if not counted:
        return out
    mean = float(np.mean(counted))
    std = 0.0
    if len(counted) > ddof:
        std = float(np.sqrt(sum((v - mean) ** 2 for v in counted) / (len(counted) - ddof)))
    whitened = [(v - mean) / (std + eps) if std else 0.0 for v in counted]
    out[mask.numpy()] = np.array(whitened) + (0.0 if center else mean)
    return out


def assert_close(actual: torch.Tensor, expected: Any, tolerance: float = 1e-6) -> None:
    assert actual.dtype == torch.float32
    np.testing.assert_allclose(actual.numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_it_equals_the_formula(impl: Any, size: int, dtype: torch.dtype) -> None:
    x, mask = batch(size, dtype=dtype)
    for options in ({}, {"ddof": 0, "eps": 0.1}, {"center": False}):
        expected = by_numpy(x, mask, **options)
        assert_close(whiten(x, mask, impl=impl, **options), expected)
        sums = sums_of(x, mask, impl)
        assert_close(whiten_by_sums(x, mask, sums, impl, **options), expected)
        named: Any = {"ddof": 1, "eps": 0.0, "center": True} | options
        assert_close(
            whiten_reference(x, mask, masked_moments_reference(x, mask), **named), expected
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("parts", "chunk"), [(1, 16), (4, 16), (2, CHUNK)])
def test_a_part_has_several_chunks(
    parts: int, chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next chunk of float32 is loaded while one is summed."""
    monkeypatch.setattr(whiten_triton, "CHUNK", chunk)
    x, mask = batch(7 * chunk + 3, dtype=dtype)
    mask[2 * chunk : 3 * chunk] = False  # a chunk without an entry that counts
    once = moments_of(x, mask, "triton")
    monkeypatch.setattr(whiten_triton, "PARTS", parts)
    assert_close(whiten(x, mask, impl="triton"), by_numpy(x, mask))
    moments = moments_of(x, mask, "triton")
    torch.testing.assert_close(moments, once, rtol=1e-14, atol=0)
    sums = sums_of(x, mask, "triton")
    assert_close(whiten_by_sums(x, mask, sums, "triton"), by_numpy(x, mask))


LOW_VARIANCE = {
    "a millionth": (1.0, 1e-6),
    "a large mean": (1e4, 1e-2),
    "a large negative mean": (-3e6, 1.0),
    "tiny": (0.0, 1e-18),
    "tiny beyond float32": (0.0, 1e-40),
    "huge": (0.0, 1e30),
}


@pytest.mark.parametrize(("mean", "std"), LOW_VARIANCE.values(), ids=LOW_VARIANCE.keys())
def test_a_batch_of_little_variance_is_not_shrunk(impl: Any, mean: float, std: float) -> None:
    x, mask = batch(5000, mean, std)
    for whitened in (
        whiten(x, mask, impl=impl), whiten_by_sums(x, mask, sums_of(x, mask, impl), impl)
    ):  # fmt: skip
        counted = whitened[mask].double()
        assert counted.std().item() == pytest.approx(1, abs=1e-3)
        assert counted.mean().item() == pytest.approx(0, abs=1e-3)


def test_the_least_variance_that_float32_has(impl: Any) -> None:
    x = torch.tensor([1.0, 1.0 + 2**-23]).repeat(500)
    mask = torch.ones(1000, dtype=torch.bool)
    assert_close(whiten(x, mask, impl=impl), by_numpy(x, mask))
    sums = sums_of(x, mask, impl)  # cannot tell them apart
    assert_same_bits(whiten_by_sums(x, mask, sums, impl), torch.zeros(1000))


@pytest.mark.parametrize("value", [0.1, -0.0, 1e-30, -3e38, 16777217.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_without_variance_is_exactly_zero(
    impl: Any, value: float, dtype: torch.dtype
) -> None:
    x, mask = batch(CHUNK + 5, dtype=dtype)
    x = torch.where(mask, torch.full_like(x, value), x)
    assert not whiten(x, mask, impl=impl).any()
    kept = whiten(x, mask, center=False, impl=impl)
    assert_close(kept, np.where(mask, x.float().numpy(), np.float32(0.0)))
    parts = zip(x.split(1201), mask.split(1201), strict=True)
    sums = torch.stack([sums_of(*part, impl) for part in parts]).sum(0)
    assert not whiten_by_sums(x, mask, sums, impl).any()


def test_rounding_of_the_sums_of_equal_entries_is_no_variance(impl: Any) -> None:
    """Of so many sums, some come out above those of entries without a spread."""
    rng = np.random.default_rng(0)
    mask = torch.ones(17, dtype=torch.bool)
    for value in rng.standard_normal(20):
        x = torch.full((17,), value, dtype=torch.float64)
        ranks = [sums_of(x[:count], mask[:count], impl) for count in (17, 11, 3)]
        sums = torch.stack(ranks).sum(0)
        assert not whiten_by_sums(x, mask, sums, impl).any()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_counted_nan_or_infinity_is_not_hidden(impl: Any) -> None:
    for wrong in (float("nan"), float("inf")):
        x, mask = batch(CHUNK + 9)
        x[7], mask[7] = wrong, True
        sums = sums_of(x, mask, impl)
        for whitened in (whiten(x, mask, impl=impl), whiten_by_sums(x, mask, sums, impl)):
            assert whitened[mask].isnan().all()
            assert not whitened[~mask].any()


@pytest.mark.parametrize("padding", [1, 3, CHUNK, 3 * CHUNK + 5])
@pytest.mark.parametrize("size", [9, CHUNK, CHUNK + 3001])
def test_entries_appended_that_do_not_count_change_no_bit(
    impl: Any, size: int, padding: int
) -> None:
    x, mask = batch(size)
    longer = torch.cat([x, torch.full((padding,), float("nan"))])
    counts = torch.cat([mask, torch.zeros(padding, dtype=torch.bool)])
    for center in (True, False):
        padded = whiten(longer, counts, center=center, impl=impl)
        assert_same_bits(padded[: len(x)], whiten(x, mask, center=center, impl=impl))
        assert not padded[len(x) :].any()
    moments = moments_of(x, mask, impl)
    assert_same_bits(moments_of(longer, counts, impl), moments)


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_inputs_at_any_address_and_of_any_stride_give_the_same_bits(impl: Any, shift: int) -> None:
    x, mask = batch(700)
    expected = whiten(x, mask, impl=impl)
    wide, bits = (torch.stack([t, t], 1).repeat(2, 1)[:-shift] for t in (x, mask))
    views = wide[len(x) - shift :, 0], bits[len(x) - shift :, 1]
    moved = [torch.cat([t[:shift], t])[shift:] for t in (x, mask)]
    assert_same_bits(whiten(*moved, impl=impl), expected)
    contiguous = [view.clone(memory_format=torch.contiguous_format) for view in views]
    assert_same_bits(whiten(*views, impl=impl), whiten(*contiguous, impl=impl))


def test_sums_that_are_mostly_rounding_are_no_variance() -> None:
    for share, kept in ((2.0**-45, True), (2.0**-47, False)):
        count, mean = 1000.0, 3.0
        entries = [count, count * mean, count * mean**2 * (1 + share)]
        sums = torch.tensor(entries, dtype=torch.float64)
        _, found, squares, *_ = moments_of_sums(sums)
        assert found.item() == mean
        assert (squares.item() > 0) == kept


def test_twenty_orders_of_programs_give_the_same_bits() -> None:
    x, mask = batch(3 * CHUNK + 5, mean=3.0)
    found = []
    for order in range(20):
        with on_executor(order=order):
            moments = moments_of(x, mask, "triton").float()
            found.append(torch.cat([moments, whiten(x, mask, impl="triton")]))
    for again in found[1:]:
        assert_same_bits(again, found[0])


def test_whitening_takes_two_launches_and_with_sums_one(executor: Any) -> None:
    x, mask = batch(3 * CHUNK)
    sums = sums_of(x, mask, "triton")
    whiten(x, mask, impl="triton")
    assert executor.launched == ["moments_kernel"] * 2 + ["whiten_kernel"]
    whiten_by_sums(x, mask, sums, "triton")
    whiten(x[:CHUNK], mask[:CHUNK], impl="triton")
    assert executor.launched[3:] == ["whiten_kernel"] * 2


def test_a_launch_that_ended_early_leaves_no_counter_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next launch has another counter, here as on a device."""
    x, mask = batch(3 * CHUNK)
    expected = moments_of(x, mask, "triton")
    given = []

    def note(device: torch.device) -> torch.Tensor:
        given.append(new_counter(device))
        return given[-1]

    monkeypatch.setattr(whiten_triton, "new_counter", note)
    monkeypatch.setattr(whiten_triton, "_unused", defaultdict(list))
    for _ in range(3):
        assert_same_bits(moments_of(x, mask, "triton"), expected)
        given[-1].fill_(1)  # as if one of two programs had not ended
    assert len({counter.data_ptr() for counter in given}) == 3


def test_a_stream_has_its_own_counters_and_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        cuda_stream = 1

    class Memory:
        """A tensor on a device that this machine does not have."""

        def split(self, size: int) -> list[object]:
            return [object() for _ in range(whiten_triton.COUNTERS // size)]

    made = []
    monkeypatch.setattr(torch, "zeros", lambda size, **_: made.append(size) or Memory())
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(whiten_triton, "_unused", defaultdict(list))
    device, capturing = torch.device("cuda"), False
    several = whiten_triton.COUNTERS
    assert len({id(one) for one in [new_counter(device) for _ in range(several + 1)]}) > several
    assert made == [several] * 2
    monkeypatch.setattr(Stream, "cuda_stream", 2)
    new_counter(device)
    assert made == [several] * 3
    capturing = True  # the graph sets its counter to 0 with every replay
    new_counter(device)
    assert made[3:] == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_counts_an_entry_as_often_as_a_mask_would(impl: Any, dtype: torch.dtype) -> None:
    x, _ = batch(CHUNK + 50, dtype=dtype)
    counts = torch.arange(len(x), dtype=torch.int32) % 4
    x = torch.where(counts > 0, x.nan_to_num(1.0, 2.0, 3.0), torch.nan)
    often = x.repeat_interleave(counts.long())
    expected = by_loop(often.double().tolist())
    assert_moments(moments_of(x, counts, impl), expected, tolerance=1e-12)
    found, moments = whiten_by(x, counts, None, ddof=1, impl=impl)
    every = torch.ones_like(often, dtype=torch.bool)
    assert_close(found.repeat_interleave(counts.long()), by_numpy(often, every))
    assert not found[counts == 0].any()
    assert_moments(moments, expected, tolerance=1e-12)


"""Moments under a mask, and the operators of moments and whitening: registered, traced, strict."""

OPS = torch.ops.trajpack
EMPTY = [0.0] * 5


def by_loop(values: list[float]) -> list[float]:
    """Return the moments of a list, summed without rounding."""
    if not values:
        return EMPTY
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return [len(values), mean, squares, min(values), max(values)]


def assert_moments(actual: torch.Tensor, expected: list[float], tolerance: float = 1e-13) -> None:
    assert actual.dtype == torch.float64
    np.testing.assert_allclose(actual.numpy(), expected, rtol=tolerance, atol=tolerance)


@given(
    values=st.lists(st.integers(-99, 99).map(float) | st.just(float("nan")), max_size=40),
    ones=st.integers(0, 2**40 - 1),
)
@settings(max_examples=30)
def test_they_equal_loops_for_any_mask(impl: Any, values: list[float], ones: int) -> None:
    mask = [bool(ones >> i & 1) and not math.isnan(v) for i, v in enumerate(values)]
    x, counts = torch.tensor(values), torch.tensor(mask, dtype=torch.bool)
    counted = [value for value, counts in zip(values, mask, strict=True) if counts]
    assert_moments(moments_of(x, counts, impl), by_loop(counted))
    sums = sums_of(x, counts, impl)
    for ddof, center in product((0, 1), (True, False)):
        expected = by_numpy(x, counts, ddof, center=center)
        options: Any = {"ddof": ddof, "center": center, "impl": impl}
        assert_close(whiten(x, counts, **options), expected)
        assert_close(whiten_by_sums(x, counts, sums, **options), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_operators_are_registered_right(impl: Any, dtype: torch.dtype) -> None:
    x, mask = torch.arange(9, dtype=dtype), torch.arange(9) % 3 > 0
    for counts in (mask, mask.int()):
        moments = moments_of(x, counts, impl)
        torch.library.opcheck(OPS.masked_moments.default, (x, counts, impl))
        for known in (None, moments):
            torch.library.opcheck(OPS.whiten.default, (x, counts, known, 1, 0.0, True, impl))


X, MASK = torch.ones(3), torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("error", "match", "changed"),
    [
        (TypeError, "x must be a tensor, got list", {"x": [1.0]}),
        (TypeError, "x must be float32 or float64, got int64", {"x": torch.arange(3)}),
        (ValueError, r"x must have 1 dim.*got shape \[1, 3\]", {"x": X[None]}),
        (TypeError, "mask must be bool, got float32", {"mask": X}),
        (ValueError, r"mask must have 1 dim.*got shape \[1, 3\]", {"mask": MASK[None]}),
        (ValueError, r"mask must have one .* each of 3 .* shape \[2\]", {"mask": MASK[:2]}),
        (ValueError, "mask is on meta but", {"mask": MASK.to("meta")}),
        (ValueError, "no gradient flows to x", {"x": X.clone().requires_grad_()}),
        (ValueError, "impl must be .*, got 'fast'", {"impl": "fast"}),
        (TypeError, "ddof must be an int, got 1.0", {"ddof": 1.0}),
        (TypeError, "ddof must be an int, got True", {"ddof": True}),
        (ValueError, r"ddof must be in \[0, 1\], got 2", {"ddof": 2}),
        (TypeError, "eps must be a number, got None", {"eps": None}),
        (ValueError, "eps must be finite and not negative, got -0.5", {"eps": -0.5}),
        (ValueError, "eps must be finite .*, got nan", {"eps": math.nan}),
        (TypeError, "center must be a bool, got 1", {"center": 1}),
    ],
)
def test_wrong_input_is_named(error: type[Exception], match: str, changed: Any) -> None:
    with pytest.raises(error, match=f"^whiten: {match}"):
        whiten(**({"x": X, "mask": MASK} | changed))


def shards() -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Return entries, a mask, and how many entries the first rank has."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(3 + rng.standard_normal(1000)).float()
    some, none = torch.from_numpy(rng.random(1000) < 0.7), torch.zeros(1000, dtype=torch.bool)
    low, alike = 50 + 1e-2 * (x - 3).double(), torch.full((1000,), 0.1)
    first_only = some & (torch.arange(1000) < 300)
    cases = [(x, some), (x, none), (x, first_only), (low, some), (alike, some)]
    return [(*case, cut) for case in cases for cut in (300, 1000)]


def test_two_ranks_whiten_as_one_would(impl: Any) -> None:
    """The shards are uneven, or the second rank has none."""
    for x, mask, cut in shards():
        parts = [(x[:cut], mask[:cut]), (x[cut:], mask[cut:])]
        sums = sum(sums_of(*part, impl) for part in parts)
        together = torch.cat([whiten_by_sums(*part, sums, impl) for part in parts])
        torch.testing.assert_close(together, whiten(x, mask, impl=impl), rtol=1e-6, atol=1e-6)
        if len(x[mask].unique()) > 1:
            assert together[mask].double().std().item() == pytest.approx(1, rel=1e-6)
        else:
            assert not together.any()


@pytest.mark.parametrize("part", [0, 2])
def test_an_infinity_in_any_part_has_the_moments_of_the_reference(part: int) -> None:
    x, mask = torch.arange(3.0 * CHUNK), torch.ones(3 * CHUNK, dtype=torch.bool)
    x[part * CHUNK + 1] = math.inf
    found, exact = (moments_of(x, mask, impl) for impl in ("triton", "torch"))
    torch.testing.assert_close(found, exact, equal_nan=True)
