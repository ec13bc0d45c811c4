"""Tensors of arbitrary bits, and their comparison bit for bit."""

from __future__ import annotations

import torch

from trajpack.kernels.rearrange.pad import BITS
from trajpack.testing import assert_same_bits


def assert_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert the same dtype, shape and bits, of any dtype."""
    assert actual.dtype == expected.dtype
    pair = (t.detach().contiguous().view(BITS[t.element_size()]) for t in (actual, expected))
    assert_same_bits(*pair)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of arbitrary bits, every kind of NaN among them; bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 256
    shape = (*shape, dtype.itemsize)
    raw = torch.randint(0, top, shape, dtype=torch.uint8, generator=generator)
    return raw.view(dtype).squeeze(-1)
