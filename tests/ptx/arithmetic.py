"""Results of PTX instructions on arrays: one entry for each thread.

All are bit-exact, except the approximations (``approx``, ``full``): these are computed in float64
and rounded once, which is closer to the true value than what a GPU promises.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

TYPES = {
    "pred": "bool", "b8": "u1", "u8": "u1", "s8": "i1", "b16": "u2", "u16": "u2", "s16": "i2",
    "f16": "f2", "bf16": "u2", "b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4",
    "f16x2": "u4", "bf16x2": "u4", "b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8",
}  # fmt: skip
DTYPES = {name: np.dtype(code) for name, code in TYPES.items()}
"""The numpy type of a PTX type; a bfloat16 is its bits."""
WIDER = {"s8": "s16", "u8": "u16", "s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
ROUNDINGS = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
_libm = ctypes.CDLL("libm.so.6")
_libm.fma.restype = ctypes.c_double
_libm.fma.argtypes = [ctypes.c_double] * 3
_of_python = np.frompyfunc(int.bit_count, 1, 1)
count_ones = getattr(np, "bitwise_count", lambda bits: _of_python(bits.astype(object)))
"""Number of bits that are set; numpy 1 has no function of its own."""


def unsigned(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"u{dtype.itemsize}")


def bits_of(values: Any, dtype: Any) -> Any:
    """Return the same bits as another type of the same size."""
    return np.ascontiguousarray(values).view(dtype)


def mul_hi(a: Any, b: Any, kind: str) -> Any:
    """Return the upper half of a product."""
    if kind in WIDER:
        wide, bits = DTYPES[WIDER[kind]], DTYPES[kind].itemsize * 8
        return ((a.astype(wide) * b.astype(wide)) >> wide.type(bits)).astype(DTYPES[kind])
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.astype(np.uint64), b.astype(np.uint64)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + ((x0 * y0) >> half)
    other = (middle & low) + x0 * y1
    high = x1 * y1 + (middle >> half) + (other >> half)
    if kind == "s64":
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.astype(DTYPES[kind])


def divide(a: Any, b: Any, kind: str) -> Any:
    if kind[0] == "f":
        return a / b
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe if kind[0] == "u" else (a - np.fmod(a, safe)) // safe
    return np.where(b == 0, b.dtype.type(-1 if kind[0] == "s" else np.iinfo(b.dtype).max), quotient)


def remainder(a: Any, b: Any, kind: str) -> Any:
    a, b = np.broadcast_arrays(a, b)
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, b.dtype.type(1), b)))


def minimum(a: Any, b: Any, kind: str) -> Any:
    return _extreme(a, b, kind, is_least=True)


def maximum(a: Any, b: Any, kind: str) -> Any:
    return _extreme(a, b, kind, is_least=False)


def _extreme(a: Any, b: Any, kind: str, *, is_least: bool) -> Any:
    if kind[0] != "f":
        return np.minimum(a, b) if is_least else np.maximum(a, b)
    a, b = np.broadcast_arrays(a, b)
    found = np.fmin(a, b) if is_least else np.fmax(a, b)  # the other one where one is NaN
    word = unsigned(DTYPES[kind])
    x, y = bits_of(a, word), bits_of(b, word)
    zeros = (x | y if is_least else x & y).view(DTYPES[kind])  # -0 is less than 0
    return np.where((a == 0) & (b == 0), zeros, found)


def shift_left(a: Any, amount: Any, kind: str) -> Any:
    bits = a.dtype.itemsize * 8
    clipped = np.minimum(amount, bits - 1).astype(a.dtype)
    return np.where(amount >= bits, a.dtype.type(0), a << clipped)


def shift_right(a: Any, amount: Any, kind: str) -> Any:
    bits = a.dtype.itemsize * 8
    shifted = a >> np.minimum(amount, bits - 1).astype(a.dtype)
    return shifted if kind[0] == "s" else np.where(amount >= bits, a.dtype.type(0), shifted)


def funnel_shift(low: Any, high: Any, amount: Any, words: list[str]) -> Any:
    """``shf``: shift 64 bits, and keep the upper half (left) or the lower half (right)."""
    both = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
    limited = (amount & np.uint32(31)) if "wrap" in words else np.minimum(amount, np.uint32(32))
    if "l" in words:
        return ((both << limited.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
    return (both >> limited.astype(np.uint64)).astype(np.uint32)


def bit_field(a: Any, begin: Any, length: Any, kind: str) -> Any:
    """``bfe``: extend with a zero, or with the sign of the field."""
    bits, word = DTYPES[kind].itemsize * 8, unsigned(DTYPES[kind])
    begin, length = ((part & 0xFF).astype(np.int64) for part in (begin, length))
    value = np.atleast_1d(a).view(word)
    last = np.minimum(begin + length - 1, bits - 1)
    is_negative = (value >> np.maximum(last, 0).astype(word) & word.type(1)).astype(bool)
    is_negative &= (length > 0) & (kind[0] == "s")
    shifted = value >> np.minimum(begin, bits - 1).astype(word)
    shifted = np.where(begin >= bits, word.type(0), shifted)
    kept = np.clip(np.minimum(length, bits - begin), 0, bits)
    mask = _low_bits(kept, word)
    return np.where(is_negative, (shifted & mask) | ~mask, shifted & mask).view(DTYPES[kind])


def insert_field(field: Any, a: Any, begin: Any, length: Any, kind: str) -> Any:
    """``bfi``: put the lowest bits of ``field`` into ``a``."""
    bits, word = DTYPES[kind].itemsize * 8, unsigned(DTYPES[kind])
    begin, length = ((part & 0xFF).astype(np.int64) for part in (begin, length))
    place = np.minimum(begin, bits - 1).astype(word)
    mask = _low_bits(np.minimum(length, bits), word) << place
    return np.where(begin >= bits, a, (a & ~mask) | ((field << place) & mask))


def _low_bits(count: Any, word: np.dtype) -> Any:
    bits = word.itemsize * 8
    low = (word.type(1) << np.minimum(count, bits - 1).astype(word)) - word.type(1)
    return np.where(count >= bits, word.type(np.iinfo(word).max), low)


def permute(a: Any, b: Any, selector: Any) -> Any:
    """``prmt.b32`` without a mode."""
    both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
    result = np.zeros(np.broadcast(both, selector).shape, np.uint32)
    for place in range(4):
        nibble = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = (both >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint8)
        spread = np.where(byte & 0x80, np.uint8(0xFF), np.uint8(0))
        byte = np.where(nibble & np.uint32(8), spread, byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * place)
    return result


def logic(a: Any, b: Any, c: Any, table: int) -> Any:
    """``lop3``: a function of three bits, given by its table."""
    result = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for row in range(8):
        if table >> row & 1:
            terms = (v if row >> place & 1 else ~v for v, place in ((a, 2), (b, 1), (c, 0)))
            first, second, third = terms
            result |= first & second & third
    return result


def leading_zeros(a: Any) -> Any:
    bits = a.dtype.itemsize * 8
    filled = a.copy()
    for shift in (1, 2, 4, 8, 16, 32):
        if shift < bits:
            filled |= filled >> a.dtype.type(shift)
    return (bits - count_ones(filled)).astype(np.uint32)


def reversed_bits(a: Any) -> Any:
    octets = np.ascontiguousarray(a).view(np.uint8).reshape(-1, a.dtype.itemsize)
    bits = np.unpackbits(octets, axis=1, bitorder="little")[:, ::-1]
    return np.packbits(bits, axis=1, bitorder="little").view(a.dtype).reshape(np.shape(a))


def _two_sum(a: Any, b: Any) -> Any:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _two_product(a: Any, b: Any) -> Any:
    def split(x: Any) -> Any:
        scaled = x * 134217729.0
        high = scaled - (scaled - x)
        return high, x - high

    product = a * b
    (a1, a0), (b1, b0) = split(a), split(b)
    return product, ((a1 * b1 - product) + a1 * b0 + a0 * b1) + a0 * b0


def _to_odd(total: Any, error: Any) -> Any:
    """Return the sum; where it is not exact, that neighbour of it whose last bit is 1."""
    bits = total.view(np.int64)
    off = (error != 0) & ((bits & 1) == 0)
    toward = np.where((error > 0) == (total >= 0), 1, -1)
    return np.where(off & (total != 0), bits + toward, bits).view(np.float64)


def fused(a: Any, b: Any, c: Any, kind: str) -> Any:
    """``fma``: a·b + c, rounded once."""
    if kind == "f32":
        total, error = _two_sum(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
        plain = np.isfinite(total)
        odd = _to_odd(np.atleast_1d(total), np.where(plain, error, 0))
        return np.where(plain, odd, total).astype(np.float32)
    if kind != "f64":
        raise NotImplementedError(f"fma.{kind}")
    a, b, c = (np.ascontiguousarray(x) for x in np.broadcast_arrays(a, b, c))
    # Boldo and Melquiond, Emulation of a FMA and correctly rounded sums, algorithm 5
    high, low = _two_product(a, b)
    upper, lower = _two_sum(c, low)
    total, error = _two_sum(high, upper)
    result = total + _to_odd(*_two_sum(lower, error))
    product = np.abs(high)
    is_safe = (product > 1e-250) & (product < 1e250)
    for part in (a, b, c):
        is_safe &= np.abs(part) < 1e250
    is_zero = (high == 0) & ((a == 0) | (b == 0))
    result = np.where(is_zero, a * b + c, result)
    for place in np.flatnonzero(~is_safe & ~is_zero):
        result.flat[place] = _libm.fma(a.flat[place], b.flat[place], c.flat[place])
    return result


APPROXIMATIONS = {
    "ex2": np.exp2, "lg2": np.log2, "sin": np.sin, "cos": np.cos, "tanh": np.tanh, "sqrt": np.sqrt,
    "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x),
}  # fmt: skip


def flushed(x: Any) -> Any:
    """Denormals of float32 as zero of their sign."""
    return np.where(np.abs(x) < np.float32(1.1754944e-38), np.copysign(np.float32(0), x), x)


COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def compare(how: str, a: Any, b: Any, kind: str) -> Any:
    if kind[0] != "f":
        return COMPARISONS[how](a, b)
    unordered = np.isnan(a) | np.isnan(b)
    if how in ("num", "nan"):
        return unordered if how == "nan" else ~unordered
    if how in COMPARISONS:
        return COMPARISONS[how](a, b) & ~unordered
    return COMPARISONS[how.removesuffix("u")](a, b) | unordered


def from_bfloat16(bits: Any) -> Any:
    return bits_of(bits.astype(np.uint32) << np.uint32(16), np.float32)


def to_bfloat16(value: Any) -> Any:
    """Round to the nearest, to even from the middle."""
    bits = bits_of(value, np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), rounded).astype(np.uint16)


def convert(a: Any, source: str, target: str, modifiers: list[str]) -> Any:
    """``cvt``: integers are cut or extended, a float becomes the nearest integer there is."""
    if source == "bf16":
        a, source = from_bfloat16(a), "f32"
    if "ftz" in modifiers and source == "f32":
        a = flushed(a)
    if target == "bf16":
        return to_bfloat16(a)
    dtype, roundings = DTYPES[target], [m for m in modifiers if m in ROUNDINGS]
    if a.dtype.kind != "f":
        return a.astype(dtype)
    if dtype.kind == "f":
        rounded = ROUNDINGS[roundings[0]](a) if roundings else a
        return rounded.astype(dtype)
    return _to_integer(ROUNDINGS[roundings[0]](a.astype(np.float64)), dtype)


def _to_integer(whole: Any, dtype: np.dtype) -> Any:
    info = np.iinfo(dtype)
    too_large = whole >= float(info.max) + (info.bits < 53)
    too_small = whole <= float(info.min)
    result = np.where(too_large | too_small | np.isnan(whole), 0, whole).astype(dtype)
    result = np.where(too_large, dtype.type(info.max), result)
    result = np.where(too_small, dtype.type(info.min), result)
    nan = 0 if dtype.itemsize < 8 else (1 << 63 if dtype.kind == "u" else info.min)
    return np.where(np.isnan(whole), dtype.type(nan), result)
