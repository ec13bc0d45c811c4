# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""A copy that reads once and writes several times: the limit of kernels that mostly write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def repeated_copy_kernel(source, target, count, WRITES: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    entries = tl.load(source + place)
    for row in tl.static_range(WRITES):
        tl.store(target + row * count.to(tl.int64) + place, entries)


def copy_to_all(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Copy ``source``, int64 in whole blocks, to each row of ``target``."""
    count = source.shape[0]
    grid = (count // BLOCK,)
    repeated_copy_kernel[grid](source, target, count, WRITES=target.shape[0], BLOCK=BLOCK)
    return target
