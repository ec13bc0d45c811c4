"""A call compiles what it needs once: no size of its inputs asks for another variant of a kernel.

So a step that ran once on tiny tensors, and once beyond the limits of docs/devices.md, compiles
nothing when sequences have other lengths. Nothing is compiled here: Triton asks a hook before it
compiles a variant, and the hook answers that nothing is to be done.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.ptx.calls import Drawn, every_call
from trajpack.kernels.reduce.whiten_triton import moments_forward, whiten_forward

TINY, LONG = (3, 1, 40), (20_000, 17_000)
SHORT = ((1,), (15, 16, 17), (4096,), (17,) * 100)
LONGER = ((8193,), (16_400, 48))


@triton.jit
def sized_kernel(source, out, num_tokens, BLOCK: tl.constexpr):
    """Planted: a variant for 1, one for multiples of 16 and one for all other sizes."""
    token = tl.arange(0, BLOCK)
    tl.store(out + token, tl.load(source + token, mask=token < num_tokens, other=0))


@pytest.fixture
def asked(executor: Any) -> Iterator[list[tuple[str, str]]]:
    """Variants that are asked for; none is compiled, and none that a test compiled is known."""
    found: list[tuple[str, str]] = []

    def note(*, key: Any, fn: Any, **_: Any) -> bool:
        found.append((fn.name, str(key)))
        return True

    executor.device = 7_000_000  # Triton keeps variants apart by device
    triton.knobs.runtime.jit_cache_hook = note
    yield found
    triton.knobs.runtime.jit_cache_hook = None


def asked_by(lengths: tuple[int, ...], asked: list[tuple[str, str]]) -> dict[str, set[Any]]:
    """Return the variants that each call asks for with sequences of these lengths."""
    found = {}
    for name, call in every_call(Drawn(np.array(lengths))):
        asked.clear()
        call("triton")
        found[name] = set(asked)
    return found


def test_no_size_asks_for_a_variant_of_its_own(asked: Any) -> None:
    known = asked_by(TINY, asked)
    assert all(known.values())
    for lengths in SHORT:
        for name, variants in asked_by(lengths, asked).items():
            assert variants <= known[name], (name, lengths)
    beyond = asked_by(LONG, asked)
    assert any(beyond[name] - known[name] for name in known), (
        "longer ones have kernels of their own"
    )
    for lengths in LONGER:
        for name, variants in asked_by(lengths, asked).items():
            assert variants <= known[name] | beyond[name], (name, lengths)


def test_sizes_beyond_32_bits_share_the_variants(asked: Any) -> None:
    for size in (9001, 3_000_000_000, 2**32 + 16):
        x, counts = (torch.empty(size, dtype=d, device="meta") for d in (torch.float, torch.bool))
        moments_forward(x, counts)
        whiten_forward(x, counts, None, ddof=1, eps=0.0, center=True)
        assert len(set(asked)) == 2


def test_variants_by_size_would_be_noticed(asked: Any) -> None:
    words = torch.zeros(99, dtype=torch.int32)
    for size in (1, 2, 16):
        sized_kernel[(1,)](words, words, size, BLOCK=64)
    assert len(set(asked)) == 3
