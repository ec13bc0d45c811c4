# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""A copy that reads some rows and writes their sum to some others: the limit of other kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def repeated_copy_kernel(
    source, target, count, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    entries = tl.load(source + place)
    for row in tl.static_range(1, READS):
        entries += tl.load(source + row * count.to(tl.int64) + place)
    for row in tl.static_range(WRITES):
        tl.store(target + row * count.to(tl.int64) + place, entries)


def copy_to_all(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Write the sum of the rows of ``source``, int64 in whole blocks, to each row of ``target``."""
    count = source.shape[1]
    reads, writes = source.shape[0], target.shape[0]
    repeated_copy_kernel[(count // BLOCK,)](source, target, count, reads, writes, BLOCK=BLOCK)
    return target


@triton.jit
def empty_kernel(given):
    pass
