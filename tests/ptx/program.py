"""A kernel made into Python functions, one for each instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx import accesses, lanes, values
from tests.ptx.arithmetic import DTYPES
from tests.ptx.memory import PtxError
from tests.ptx.origins import origins_of
from tests.ptx.parse import Instruction, Kernel

DONE = 1 << 30
"""The block of threads that have returned."""
Step = Callable[[Any, Any], Any]
"""Runs an instruction for the selected threads; returns the block where they go, or None."""


class Program:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.numbers = {name: number for number, name in enumerate(kernel.registers)}
        self.dtypes = [_register_dtype(kind) for kind in kernel.registers.values()]
        self.origins = origins_of(kernel)
        self.symbols = dict.fromkeys(kernel.shared, 0)
        self.local_size = 0
        for name, size in kernel.local.items():
            self.symbols[name] = self.local_size
            self.local_size += -(-size // 16) * 16
        self.code = [
            [self._step(one, number) for one in block] for number, block in enumerate(kernel.blocks)
        ]

    def source(self, text: str, kind: str) -> Step:
        """Return a function that reads an operand as a type."""
        dtype = DTYPES[kind]
        if text not in self.numbers:
            return self._fixed(text, dtype)
        number = self.numbers[text]
        register = self.dtypes[number]
        if register == dtype:
            return lambda m, s: m.registers[number][s.at]
        if register.itemsize == dtype.itemsize:
            return lambda m, s: m.registers[number][s.at].view(dtype)
        if register.itemsize < dtype.itemsize or register == np.bool_:
            raise NotImplementedError(f"{text} as {kind}")
        low = np.dtype(f"u{dtype.itemsize}")
        return lambda m, s: m.registers[number][s.at].astype(low).view(dtype)

    def _fixed(self, text: str, dtype: np.dtype) -> Step:
        if text.startswith("%"):
            return lambda m, s: m.special(text)[s.at].view(dtype)
        if text == "WARP_SZ":
            value = np.uint32(32)
        elif text in self.symbols:
            value = dtype.type(self.symbols[text])
        else:
            value = values.constant(text, dtype)
        return lambda m, s: value

    def target(self, text: str, kind: str) -> Callable[[Any, Any, Any], None]:
        """Return a function that sets a register, extended where it is wider than the value."""
        if text == "_":
            return lambda m, s, value: None
        number, dtype = self.numbers[text], DTYPES[kind]
        register = self.dtypes[number]
        if register == np.bool_:
            return lambda m, s, value: m.put(number, s, value)
        wider = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{register.itemsize}")

        def put(m: Any, s: Any, value: Any) -> None:
            value = np.asarray(value)
            if value.dtype.itemsize != dtype.itemsize:
                value = value.astype(dtype)
            if dtype.itemsize != register.itemsize:
                value = value.view(dtype).astype(wider)
            m.put(number, s, value.view(register))

        return put

    def guard(self, one: Instruction) -> Step | None:
        if one.guard is None:
            return None
        holds = self.source(one.guard.removeprefix("!"), "pred")
        return (lambda m, s: ~holds(m, s)) if one.guard.startswith("!") else holds

    def _step(self, one: Instruction, block: int) -> Step:
        name, guard = one.words[0], self.guard(one)
        if name in ("bra", "brx", "ret", "exit"):
            return self._jump(one, guard, block)
        if name == "trap":
            return _trap(one, guard)
        if name in accesses.NAMES:
            return accesses.compile_access(self, one, guard)
        is_pack = name == "mov" and "{" in one.operands[0][0] + one.operands[1][0]
        if not (is_pack or name in lanes.NAMES):
            return self._value(one, guard)
        if guard is not None:
            raise NotImplementedError(str(one))
        return values.compile_pack(self, one) if is_pack else lanes.compile_lanes(self, one)

    def _value(self, one: Instruction, guard: Step | None) -> Step:
        if one.words[0] not in values.NAMES:
            raise NotImplementedError(str(one))
        value, register, kind = values.compile_value(self, one)
        put = self.target(register, kind)
        if guard is None:
            return lambda m, s: put(m, s, value(m, s))
        number = self.numbers[register]

        def guarded(m: Any, s: Any) -> None:
            before = m.registers[number][s.at]
            put(m, s, value(m, s))
            m.put(number, s, np.where(guard(m, s), m.registers[number][s.at], before))

        return guarded

    def _jump(self, one: Instruction, guard: Step | None, block: int) -> Step:
        labels = self.kernel.labels
        if one.words[0] == "brx":
            index = self.source(one.operands[0], "u32")
            table = np.array([labels[label] for label in self.kernel.tables[one.operands[1]]])
            return lambda m, s: _one_or_all(np.broadcast_to(table[index(m, s)], (s.count,)))
        there = DONE if one.words[0] in ("ret", "exit") else labels[one.operands[0]]
        if guard is None:
            return lambda m, s: there
        return lambda m, s: _one_or_all(
            np.broadcast_to(np.where(guard(m, s), there, block + 1), (s.count,))
        )


def _one_or_all(blocks: Any) -> Any:
    return int(blocks[0]) if (blocks == blocks[0]).all() else blocks


def _register_dtype(kind: str) -> np.dtype:
    return DTYPES["pred" if kind == "pred" else f"b{max(DTYPES[kind].itemsize, 2) * 8}"]


def _trap(one: Instruction, guard: Step | None) -> Step:
    def trap(m: Any, s: Any) -> None:
        if guard is None or guard(m, s).any():
            raise PtxError(f"trap in line {one.loc[1]}")

    return trap
