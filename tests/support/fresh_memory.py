"""Memory that is allocated uninitialised, filled so that a value that nobody wrote shows."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.ptx.memory import SENTINEL


@contextmanager
def filled_fresh_memory(callers: str) -> Iterator[None]:
    """Fill what modules whose name begins with ``callers`` allocate: NaN, and odd integers."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch.Tensor, "new_empty"),
            (np, "empty"),
            (np, "empty_like"),
        ):
            patch.setattr(owner, name, _filling(getattr(owner, name), callers))
        yield


def _filling(allocate: Callable[..., Any], callers: str) -> Callable[..., Any]:
    def filled(*args: Any, **kwargs: Any) -> Any:
        fresh = allocate(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__", "").startswith(callers):
            if isinstance(fresh, np.ndarray):
                _fill(fresh.ctypes.data, fresh.nbytes)
            elif type(fresh) is torch.Tensor and fresh.device.type == "cpu":
                _fill(fresh.data_ptr(), fresh.numel() * fresh.element_size())
        return fresh

    return filled


def _fill(address: int, size: int) -> None:
    """Write the pattern without an operator of torch, which a test might count."""
    if not size:
        return
    octets = np.asarray((ctypes.c_uint8 * size).from_address(address))
    octets[: size // 4 * 4].view(np.uint32)[:] = SENTINEL
    octets[size // 4 * 4 :] = int(SENTINEL) & 0xFF
