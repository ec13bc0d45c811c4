"""Instructions that compute a value from registers, made into functions on arrays."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx import arithmetic as pa
from tests.ptx.arithmetic import DTYPES, WIDER
from tests.ptx.parse import Instruction, inside

if TYPE_CHECKING:
    from tests.ptx.program import Program

Value = Callable[[Any, Any], Any]
"""Gives the values of the selected threads: ``value(machine, selection)``."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mov": lambda kind, a: a, "cvta": lambda kind, a: a,
    "add": lambda kind, a, b: a + b, "sub": lambda kind, a, b: a - b,
    "and": lambda kind, a, b: a & b, "or": lambda kind, a, b: a | b,
    "xor": lambda kind, a, b: a ^ b, "not": lambda kind, a: ~a, "neg": lambda kind, a: -a,
    "abs": lambda kind, a: np.abs(a), "copysign": lambda kind, a, b: np.copysign(b, a),
    "div": lambda kind, a, b: pa.divide(a, b, kind),
    "rem": lambda kind, a, b: pa.remainder(a, b, kind),
    "min": lambda kind, a, b: pa.minimum(a, b, kind),
    "max": lambda kind, a, b: pa.maximum(a, b, kind),
    "fma": lambda kind, a, b, c: pa.fused(a, b, c, kind),
    "prmt": lambda kind, a, b, c: pa.permute(a, b, c),
    "brev": lambda kind, a: pa.reversed_bits(a), "sqrt": lambda kind, a: np.sqrt(a),
}  # fmt: skip
"""Functions whose operands all have the instruction's type."""
MIXED: dict[str, tuple[tuple[str, ...], str, Callable[..., Any]]] = {
    "shl": (("", "u32"), "", lambda kind, a, b: pa.shift_left(a, b, kind)),
    "shr": (("", "u32"), "", lambda kind, a, b: pa.shift_right(a, b, kind)),
    "bfe": (("", "u32", "u32"), "", lambda kind, a, b, c: pa.bit_field(a, b, c, kind)),
    "bfi": (("", "", "u32", "u32"), "", lambda kind, a, b, c, d: pa.insert_field(a, b, c, d, kind)),
    "popc": (("",), "u32", lambda kind, a: pa.count_ones(a).astype(np.uint32)),
    "clz": (("",), "u32", lambda kind, a: pa.leading_zeros(a)),
    "selp": (("", "", "pred"), "", lambda kind, a, b, p: np.where(p, a, b)),
}
"""Functions with the types of their operands and of their result; ``""`` is the instruction's."""
ROUNDED = ("add", "sub", "mul", "div", "sqrt", "fma", "rcp")
NAMES = {*FUNCTIONS, *MIXED, *pa.APPROXIMATIONS, "mul", "mad", "cvt", "setp", "shf", "lop3"}


def compile_value(p: Program, one: Instruction) -> tuple[Value, str, str]:
    """Return a function for the instruction, the register that it sets, and the value's type."""
    words, name, kind = one.words, one.words[0], one.words[-1]
    is_odd = kind not in DTYPES or (name != "cvt" and kind in ("bf16", "bf16x2", "f16x2"))
    if is_odd or "sat" in words:
        raise NotImplementedError(str(one))
    special = {"setp": _compare, "cvt": _convert, "mul": _multiply, "mad": _multiply}
    special |= {"shf": _funnel, "lop3": _logic}
    if name in special:
        return special[name](p, one)
    if name in MIXED:
        kinds, result, function = MIXED[name]
        sources = [p.source(t, k or kind) for t, k in zip(one.operands[1:], kinds, strict=True)]
        value = lambda m, s: function(kind, *(get(m, s) for get in sources))  # noqa: E731
        return value, one.operands[0], result or kind
    return _plain(p, one)


def _funnel(p: Program, one: Instruction) -> tuple[Value, str, str]:
    low, high, amount = (p.source(text, "b32") for text in one.operands[1:4])
    words = one.words
    shift = lambda m, s: pa.funnel_shift(low(m, s), high(m, s), amount(m, s), words)  # noqa: E731
    return shift, one.operands[0], "b32"


def _logic(p: Program, one: Instruction) -> tuple[Value, str, str]:
    a, b, c = (p.source(text, "b32") for text in one.operands[1:4])
    table = int(one.operands[4], 0)
    return lambda m, s: pa.logic(a(m, s), b(m, s), c(m, s), table), one.operands[0], "b32"


def _plain(p: Program, one: Instruction) -> tuple[Value, str, str]:
    words, name, kind = one.words, one.words[0], one.words[-1]
    function = FUNCTIONS.get(name)
    if "approx" in words or "full" in words:
        exact = pa.APPROXIMATIONS.get(name, lambda a, b: a / b)
        function = lambda kind, *a: exact(*(x.astype(np.float64) for x in a)).astype(DTYPES[kind])  # noqa: E731
    elif name == "rcp":
        function = lambda kind, a: DTYPES[kind].type(1) / a  # noqa: E731
    elif function is None or {"rz", "rm", "rp", "cc"} & {*words}:
        raise NotImplementedError(str(one))
    if "NaN" in words:
        function = _with_nan(function)
    elif "relu" in words:
        function = _with_relu(function)
    sources = [p.source(text, kind) for text in one.operands[1:]]
    if "ftz" in words and kind == "f32":
        return _flushing(function, sources), one.operands[0], kind
    if len(sources) == 2:
        a, b = sources
        return lambda m, s: function(kind, a(m, s), b(m, s)), one.operands[0], kind
    return lambda m, s: function(kind, *[get(m, s) for get in sources]), one.operands[0], kind


def _with_nan(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda kind, a, b: np.where(
        np.isnan(a) | np.isnan(b), np.nan, function(kind, a, b)
    ).astype(a.dtype)


def _with_relu(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda kind, *a: np.maximum(function(kind, *a), DTYPES[kind].type(0))


def _flushing(function: Callable[..., Any], sources: list[Value]) -> Value:
    return lambda m, s: pa.flushed(function("f32", *(pa.flushed(get(m, s)) for get in sources)))


def _compare(p: Program, one: Instruction) -> tuple[Value, str, str]:
    words, kind = one.words, one.words[-1]
    how = words[1]
    if {"and", "or", "xor"} & {*words} or "|" in one.operands[0]:
        raise NotImplementedError(str(one))
    a, b = p.source(one.operands[1], kind), p.source(one.operands[2], kind)
    flush = pa.flushed if "ftz" in words else lambda x: x
    value = lambda m, s: pa.compare(how, flush(a(m, s)), flush(b(m, s)), kind)  # noqa: E731
    return value, one.operands[0], "pred"


def _convert(p: Program, one: Instruction) -> tuple[Value, str, str]:
    words = one.words
    target, source = words[-2:]
    modifiers = words[1:-2]
    if {"rz", "rm", "rp", "rna", "relu", "satfinite"} & {*modifiers}:
        raise NotImplementedError(str(one))
    if target in ("f16x2", "bf16x2"):
        return _convert_two(p, one, target.removesuffix("x2"))
    a = p.source(one.operands[1], source)
    return lambda m, s: pa.convert(a(m, s), source, target, modifiers), one.operands[0], target


def _convert_two(p: Program, one: Instruction, half: str) -> tuple[Value, str, str]:
    high, low = (p.source(text, "f32") for text in one.operands[1:3])

    def both(m: Any, s: Any) -> Any:
        parts = (pa.convert(get(m, s), "f32", half, []) for get in (high, low))
        upper, lower = (pa.bits_of(part, np.uint16).astype(np.uint32) for part in parts)
        return upper << np.uint32(16) | lower

    return both, one.operands[0], "b32"


def _multiply(p: Program, one: Instruction) -> tuple[Value, str, str]:
    words, name, kind = one.words, one.words[0], one.words[-1]
    target, a, b = one.operands[0], p.source(one.operands[1], kind), p.source(one.operands[2], kind)
    if kind[0] == "f":
        if name == "mad" or {"rz", "rm", "rp"} & {*words}:
            raise NotImplementedError(str(one))
        if "ftz" in words:
            return _flushing(lambda _, x, y: x * y, [a, b]), target, kind
        return lambda m, s: a(m, s) * b(m, s), target, kind
    result = WIDER[kind] if "wide" in words else kind
    dtype = DTYPES[result]
    product: Value = lambda m, s: a(m, s) * b(m, s)  # noqa: E731
    if "wide" in words:
        product = lambda m, s: a(m, s).astype(dtype) * b(m, s).astype(dtype)  # noqa: E731
    elif "hi" in words:
        product = lambda m, s: pa.mul_hi(a(m, s), b(m, s), kind)  # noqa: E731
    if name == "mul":
        return product, target, result
    c = p.source(one.operands[3], result)
    return lambda m, s: product(m, s) + c(m, s), target, result


def compile_pack(p: Program, one: Instruction) -> Callable[[Any, Any], None]:
    """Return a ``mov`` between a register and several of a part of its size."""
    target, source = one.operands
    size, parts = int(one.words[1][1:]), inside(target if target[0] == "{" else source)
    part = size // len(parts)
    whole, each = DTYPES[f"b{size}"], DTYPES[f"b{part}"]
    if target[0] == "{":
        value, puts = p.source(source, f"b{size}"), [p.target(name, f"b{part}") for name in parts]

        def unpack(m: Any, s: Any) -> None:
            word = value(m, s)
            for place, put in enumerate(puts):
                put(m, s, (word >> whole.type(place * part)).astype(each))

        return unpack
    sources, put = [p.source(name, f"b{part}") for name in parts], p.target(target, f"b{size}")

    def pack(m: Any, s: Any) -> None:
        word = whole.type(0)
        for place, get in enumerate(sources):
            word = word | (np.asarray(get(m, s)).astype(whole) << whole.type(place * part))
        put(m, s, word)

    return pack


def constant(text: str, dtype: np.dtype) -> Any:
    """Return the value of a literal; floats are written as their bits."""
    if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", text):
        value = struct.unpack(">f", bytes.fromhex(text[2:]))[0]
        if dtype.kind == "f":
            return dtype.type(value)
        return np.frombuffer(struct.pack("<f", value), dtype)[0]
    if re.fullmatch(r"0[dD][0-9A-Fa-f]{16}", text):
        raw = bytes.fromhex(text[2:])[::-1]
        return np.frombuffer(raw, dtype if dtype.itemsize == 8 else np.float64)[0]
    if text in ("true", "false"):
        return np.bool_(text == "true")
    number = int(text.rstrip("U"), 0)
    if dtype == np.bool_:
        return np.bool_(number != 0)
    raw = (number % (1 << dtype.itemsize * 8)).to_bytes(dtype.itemsize, "little")
    return np.frombuffer(raw, dtype)[0]
