"""Memory that is allocated uninitialised, filled so that a value that nobody wrote shows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.ptx.memory import SENTINEL


@contextmanager
def filled_fresh_memory(callers: str = "trajpack.") -> Iterator[None]:
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
            _fill(torch.from_numpy(fresh) if isinstance(fresh, np.ndarray) else fresh)
        return fresh

    return filled


def _fill(fresh: torch.Tensor) -> None:
    if fresh.device.type == "meta" or not fresh.numel():
        return
    octets = fresh.as_strided((fresh.numel(),), (1,)).view(torch.uint8)
    words = len(octets) // 4
    octets[: words * 4].view(torch.int32).fill_(int(SENTINEL))
    octets[words * 4 :].fill_(int(SENTINEL) & 0xFF)
