"""Instructions compute as the PTX manual says: against exact arithmetic of Python."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from tests.ptx.arithmetic import (
    DTYPES,
    bit_field,
    compare,
    convert,
    divide,
    fused,
    insert_field,
    leading_zeros,
    maximum,
    minimum,
    mul_hi,
    permute,
    remainder,
    shift_left,
    shift_right,
)

EDGES = [0.0, -0.0, 1.0, -1.0, 1e-30, 3e38, 5e-324, 1.7e308, math.inf, -math.inf, math.nan]


def integers(kind: str, num: int = 200, seed: int = 0) -> np.ndarray:
    dtype = DTYPES[kind]
    drawn = np.random.default_rng(seed).integers(0, 256, num * dtype.itemsize, np.uint8).view(dtype)
    info = np.iinfo(dtype)
    return np.r_[drawn, np.array([0, 1, info.max, info.min, info.max - 1], dtype)]


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_a_fused_product_is_rounded_once(kind: str) -> None:
    draw = np.random.default_rng(1)
    dtype = DTYPES[kind]
    a, b = (draw.standard_normal(500).astype(dtype) for _ in range(2))
    c = (-a * b * draw.choice([1.0, 1e-9, 1e9], 500)).astype(dtype)  # most digits cancel
    found = fused(a, b, c, kind)
    for place in range(500):
        exact = Fraction(float(a[place])) * Fraction(float(b[place])) + Fraction(float(c[place]))
        near = [found[place], np.nextafter(found[place], dtype.type(math.inf))]
        near.append(np.nextafter(found[place], dtype.type(-math.inf)))
        errors = [abs(Fraction(float(one)) - exact) for one in near]
        assert errors[0] == min(errors), place


def test_a_fused_product_of_edges_is_infinite_or_nan_as_it_must() -> None:
    a, b, c = (grid.ravel() for grid in np.meshgrid(EDGES, EDGES, EDGES))
    with np.errstate(all="ignore"):
        found = fused(a, b, c, "f64")
        product = np.where(np.isfinite(a) & np.isfinite(b), 0.0, a * b)  # finite, however large
        expected = product + c
    special = ~np.isfinite(expected)
    np.testing.assert_array_equal(found[special], expected[special])
    assert not np.isnan(found[~special]).any()


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64", "s16", "u16"])
def test_integers_are_multiplied_and_divided_exactly(kind: str) -> None:
    a, b = integers(kind), integers(kind, seed=1)
    bits = DTYPES[kind].itemsize * 8
    high, quotient, rest = mul_hi(a, b, kind), divide(a, b, kind), remainder(a, b, kind)
    for x, y, h, q, r in zip(*(v.tolist() for v in (a, b, high, quotient, rest)), strict=True):
        assert h == x * y >> bits
        if y and not (kind[0] == "s" and y == -1):
            assert q == math.trunc(Fraction(x, y))
            assert r == x - y * q


@pytest.mark.parametrize("kind", ["b32", "s32", "b64", "s64"])
def test_shifts_beyond_the_width_leave_zero_or_the_sign(kind: str) -> None:
    a, bits = integers(kind), DTYPES[kind].itemsize * 8
    for amount in (0, 1, bits - 1, bits, bits + 1, 255):
        amounts = np.full(a.shape, amount, np.uint32)
        left, right = shift_left(a, amounts, kind), shift_right(a, amounts, kind)
        for x, found_left, found_right in zip(
            *map(np.ndarray.tolist, (a, left, right)), strict=True
        ):
            assert (found_left - (x << amount)) % (1 << bits) == 0
            assert found_right == x >> amount


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_fields_of_bits_are_taken_and_put(kind: str) -> None:
    a, field = integers(kind), integers(kind, seed=1)
    bits = DTYPES[kind].itemsize * 8
    word = DTYPES[f"b{bits}"]
    draw = np.random.default_rng(2)
    begin, length = (draw.integers(0, bits + 3, a.size).astype(np.uint32) for _ in range(2))
    taken = bit_field(a, begin, length, kind)
    put = insert_field(field.view(word), a.view(word), begin, length, f"b{bits}")
    for place, (x, b, n) in enumerate(
        zip(a.tolist(), begin.tolist(), length.tolist(), strict=True)
    ):
        known = format(x % (1 << bits), f"0{bits}b")[::-1]
        sign = known[min(b + n - 1, bits - 1)] if kind[0] == "s" and n else "0"
        digits = (known[b : b + n] + sign * bits)[: max(n, 0)] + sign * bits
        expected = int(digits[:bits][::-1], 2)
        assert int(taken[place]) % (1 << bits) == expected, (x, b, n)
        source = format(int(field[place]) % (1 << bits), f"0{bits}b")[::-1]
        kept = [source[i - b] if b <= i < b + n else known[i] for i in range(bits)]
        assert int(put[place]) == int("".join(kept)[::-1], 2), (x, b, n)


def test_bytes_are_permuted_and_zeros_counted() -> None:
    a, b, selector = (integers("b32", seed=seed) for seed in range(3))
    found = permute(a, b, selector)
    for x, y, chosen, one in zip(*(v.tolist() for v in (a, b, selector, found)), strict=True):
        octets, result = x.to_bytes(4, "little") + y.to_bytes(4, "little"), b""
        for place in range(4):
            nibble = chosen >> 4 * place & 15
            octet = octets[nibble & 7]
            result += bytes([octet if nibble < 8 else 255 * (octet >> 7)])
        assert one == int.from_bytes(result, "little")
    assert leading_zeros(a).tolist() == [32 - x.bit_length() for x in a.tolist()]


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_the_extremes_prefer_numbers_and_know_the_sign_of_zero(kind: str) -> None:
    dtype = DTYPES[kind]
    a, b = (grid.ravel().astype(dtype) for grid in np.meshgrid([*EDGES[:4], math.nan], EDGES[:4]))
    least, most = minimum(a, b, kind), maximum(a, b, kind)
    for x, y, low, high in zip(*(v.tolist() for v in (a, b, least, most)), strict=True):
        if math.isnan(x):
            assert low == high == y
        elif x == y == 0:
            signs = {math.copysign(1, x), math.copysign(1, y)}
            assert (math.copysign(1, low), math.copysign(1, high)) == (min(signs), max(signs))
        else:
            assert (low, high) == (min(x, y), max(x, y))


def test_comparisons_are_ordered_or_not() -> None:
    a, b = np.array([1.0, math.nan, 2.0]), np.array([1.0, 1.0, math.nan])
    expected = {"eq": "100", "equ": "111", "ne": "000", "neu": "011", "lt": "000", "geu": "111"}
    expected |= {"num": "100", "nan": "011"}
    for how, answers in expected.items():
        assert "".join(str(int(one)) for one in compare(how, a, b, "f64")) == answers, how


def test_conversions_saturate_and_round() -> None:
    values = np.array([1.5, -1.5, 2.5, 3e9, -3e9, 1e30, math.inf, -math.inf, math.nan])
    as_s32 = convert(values, "f64", "s32", ["rni"]).tolist()
    assert as_s32 == [2, -2, 2, 2**31 - 1, -(2**31), 2**31 - 1, 2**31 - 1, -(2**31), 0]
    assert convert(values[:3], "f64", "u32", ["rzi"]).tolist() == [1, 0, 2]
    assert convert(np.array([1e30, -1.0]), "f64", "u64", ["rzi"]).tolist() == [2**64 - 1, 0]
    assert convert(np.array([-1, 300], np.int32), "s32", "u8", []).tolist() == [255, 44]
    assert convert(np.array([-1], np.int32), "s32", "s64", []).tolist() == [-1]
    bits = convert(np.array([1.0, 1.00390625, 1.01171875], np.float32), "f32", "bf16", ["rn"])
    assert bits.tolist() == [0x3F80, 0x3F80, 0x3F82], "to even from the middle"
