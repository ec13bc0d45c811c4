"""Triton's interpreter, made faster and stricter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest

OVERFLOW = "binary_op_sanitize_overflow_impl"


def hasten() -> None:
    """Have a launch patch Triton's language once, and scan all rows of a tile side by side.

    The interpreter replaces functions of ``triton.language`` by its own for as long as a launch
    lasts, and looks through the whole of it again at every call, though nothing is left to
    replace: nearly half of the time of a kernel of many calls. A scan it makes value by value;
    rows do not meet, so each step may take all of them at once, in the same order. Whether
    integers overflow it works out by its own slow means and then asks nobody: here that is an
    error (see ``wrapping``). What runs, and on what, is the same. Where another version of
    Triton is made otherwise, it is left as it is.
    """
    from triton.runtime import interpreter

    if hasattr(getattr(interpreter, "ScanOps", None), "generic_scan"):
        interpreter.ScanOps.generic_scan = _scan_of_all_rows(interpreter.ScanOps.generic_scan)

    if hasattr(interpreter.TritonSemantic, OVERFLOW):
        setattr(interpreter.TritonSemantic, OVERFLOW, _check_overflow)
    for name, change in (("_patch_lang", _patch_once), ("_get_np_dtype", _keep_dtypes)):
        if hasattr(interpreter, name):
            setattr(interpreter, name, change(getattr(interpreter, name)))


@contextmanager
def wrapping() -> Iterator[None]:
    """Let integers wrap, as they do on a device, where a test gives what nobody may give."""
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.TritonSemantic, OVERFLOW, lambda *_: None, raising=False)
        yield


def _patch_once(patch: Any) -> Any:
    import triton.language as tl

    patched: set[str] = set()
    """Modules that the launch that runs now has patched."""

    @cache
    def seen_by(fn: Any) -> set[str]:
        languages = (tl, tl.core)
        return {one.__name__ for one in languages if any(one is v for v in _values(fn))}

    def patch_once(fn: Any) -> Any:
        if patched and seen_by(fn) <= patched:
            return None  # to a device function, which has no use for it
        is_launch = not patched
        scope = patch(fn)
        patched.update(seen_by(fn))
        return _Ended(scope, patched) if is_launch else scope

    return patch_once


def _values(fn: Any) -> list[Any]:
    return list(fn.__globals__.values())


class _Ended:
    """What a launch restores at its end: the language, and that nothing of it is patched."""

    def __init__(self, scope: Any, patched: set[str]) -> None:
        self._scope, self._patched = scope, patched

    def restore(self) -> None:
        self._patched.clear()
        self._scope.restore()


def _keep_dtypes(dtype_of: Any) -> Any:
    found: dict[str, Any] = {}

    def kept(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = dtype_of(dtype)
        return found[name]

    return kept


def _scan_of_all_rows(scan: Any) -> Any:
    def scan_of_all_rows(self: Any, tiles: Any) -> Any:
        data = [tile.handle.data for tile in tiles]
        if data[0].ndim == 1:
            return scan(self, tiles)

        def rows_at(place: int) -> list[Any]:
            parts = (np.take(each, place, self.axis) for each in data)
            return [
                self.to_tensor(part, tile.dtype) for part, tile in zip(parts, tiles, strict=True)
            ]

        steps = [rows_at(0)]
        for place in range(1, data[0].shape[self.axis]):
            made = self.combine_fn.fn(*steps[-1], *rows_at(place))
            steps.append(list(made) if isinstance(made, tuple) else [made])
        columns = zip(*steps, strict=True)
        stacked = (np.stack([step.handle.data for step in column], self.axis) for column in columns)
        return [self.to_tensor(each, tile.dtype) for each, tile in zip(stacked, tiles, strict=True)]

    return scan_of_all_rows


def _check_overflow(self: Any, one: Any, other: Any, operation: Any) -> None:
    kind = one.type.scalar
    if kind.int_bitwidth < 64:
        compute = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__]
        exact = compute(one.handle.data.astype(np.int64), other.handle.data.astype(np.int64))
        least, most = kind.get_int_min_value(), kind.get_int_max_value()
        if exact.min() < least or exact.max() > most:
            raise OverflowError(
                f"{operation.__name__} of {kind} gives {exact.min()} to {exact.max()}"
            )
