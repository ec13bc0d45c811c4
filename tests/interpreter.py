"""Triton's interpreter, without what it does again for every call and every value."""

from __future__ import annotations

from functools import cache
from typing import Any


def hasten() -> None:
    """Have a launch patch Triton's language once, not at each call of a device function.

    The interpreter replaces functions of ``triton.language`` by its own for as long as a launch
    lasts, and looks through the whole of it again at every call, though nothing is left to
    replace: nearly half of the time of a kernel of many calls. What runs, and on what, is the
    same. Where another version of Triton is made otherwise, it is left as it is.
    """
    from triton.runtime import interpreter

    for name, change in (("_patch_lang", _patch_once), ("_get_np_dtype", _keep_dtypes)):
        if hasattr(interpreter, name):
            setattr(interpreter, name, change(getattr(interpreter, name)))


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
