"""Kernels with a fault that the assertions on compiled code must notice."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def masked_kernel(source, out, num_tokens, BLOCK: tl.constexpr):
    """Planted: stores behind a mask of unknown alignment."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    tl.store(out + token, tl.load(source + token, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["begin"])
def hinted_kernel(source, out, begin, BLOCK: tl.constexpr):
    """Planted: promises an alignment that only some runs have."""
    token = tl.arange(0, BLOCK)
    tl.store(out + token, tl.load(tl.multiple_of(source + begin + token, 16)))


@triton.jit(do_not_specialize=["begin"])
def shuffled_kernel(source, out, begin, BLOCK: tl.constexpr):
    """Planted: a copy that hands its tokens from lane to lane, and waits for all of them."""
    token = tl.arange(0, BLOCK)
    tl.store(out + token, tl.cumsum(tl.load(source + begin + token), 0))


@triton.jit(do_not_specialize=["begin"])
def crowded_kernel(source, out, begin, BLOCK: tl.constexpr):
    """Planted: more values alive at once than the launch allows registers."""
    token = tl.arange(0, BLOCK)
    word = tl.load(source + begin + token)
    for _ in range(begin):
        word = tl.load(source + word)
    tl.store(out + token, word)


@triton.jit
def sized_kernel(source, out, num_tokens: tl.int64, BLOCK: tl.constexpr):
    """Planted: a variant for 1, one for multiples of 16 and one for all other sizes."""
    token = tl.arange(0, BLOCK)
    tl.store(out + token, tl.load(source + token, mask=token < num_tokens, other=0))


PLANTED = (masked_kernel, hinted_kernel, shuffled_kernel, crowded_kernel, sized_kernel)
