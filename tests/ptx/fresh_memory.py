"""Memory that nobody has written, filled so that it shows where it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.ptx.memory import SENTINEL

PATTERN = torch.tensor([int(SENTINEL)], dtype=torch.int32).view(torch.uint8)


@contextmanager
def filling_fresh_memory(*, enabled: bool = True) -> Iterator[None]:
    """Fill what ``torch.empty``, ``torch.empty_like`` and ``Tensor.new_empty`` give on the host."""
    with pytest.MonkeyPatch.context() as patch:
        if enabled:
            for owner, name in (
                (torch, "empty"),
                (torch, "empty_like"),
                (torch.Tensor, "new_empty"),
            ):
                patch.setattr(owner, name, _filling(getattr(owner, name)))
        yield


def _filling(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        fresh = allocate(*args, **kwargs)
        if (
            type(fresh) is torch.Tensor
            and fresh.device.type == "cpu"
            and fresh.layout == torch.strided
        ):
            raw = torch.tensor([], dtype=torch.uint8).set_(fresh.untyped_storage())
            words = raw.numel() // 4
            raw[: words * 4].view(torch.int32).fill_(int(SENTINEL))
            raw[words * 4 :] = PATTERN[: raw.numel() - words * 4]
        return fresh

    return filled
