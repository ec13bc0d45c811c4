# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Padding and its inverse, one launch each: a program owns one tile of the result.

Bytes are moved in units, the widest that row, strides and addresses allow. A unit of 16 bytes is
two 8-byte elements. Every offset is a multiple of a unit, so loads are as wide as units. Results
are contiguous and allocated in whole tiles, so stores are full width and unmasked.
"""

from __future__ import annotations

from math import gcd, prod

import torch
import triton
import triton.language as tl

from trajpack.kernels.fields.units import UNITS
from trajpack.kernels.launches import cdiv, launch_on
from trajpack.kernels.search_triton import find_segment, find_segments

MAX_WIDTH = 2**31 - 4096
"""Units of a row at most: they are counted in int32, a tile further on."""


@triton.jit
def _begin_tile(width, PER_UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Return a tile's first row, and its elements' units from the beginning of that row."""
    first = tl.program_id(0).to(tl.int64) * (BLOCK // PER_UNIT)
    row = first // width
    column = (first - row * width).to(tl.int32)
    return row, column, column + tl.arange(0, BLOCK) // PER_UNIT


@triton.jit
def _padding_before(length, max_seqlen, left):
    return left * tl.maximum(max_seqlen - length, 0)


@triton.jit(
    do_not_specialize=["num_tokens", "batch", "max_seqlen", "left", "stride", "low", "high"],
    do_not_specialize_on_alignment=["width"],
)
def pad_kernel(
    packed, cu_seqlens, out, num_tokens, batch, max_seqlen, left, width, stride: tl.int64,
    low: tl.int64, high: tl.int64, PER_UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    element = tl.arange(0, BLOCK)
    row, skipped, unit = _begin_tile(width, PER_UNIT, BLOCK)
    sequence = (row // max_seqlen).to(tl.int32)
    place = (row - sequence.to(tl.int64) * max_seqlen).to(tl.int32)
    last = place + (skipped + (BLOCK // PER_UNIT - 1)) // width
    place += unit // width
    begin = tl.load(cu_seqlens + sequence) + tl.zeros((BLOCK,), tl.int32)
    end = tl.load(cu_seqlens + sequence + 1) + tl.zeros((BLOCK,), tl.int32)
    if last >= max_seqlen:  # the tile holds places of several sequences
        later = tl.minimum(sequence + place // max_seqlen, batch - 1)
        place %= max_seqlen
        begin = tl.load(cu_seqlens + later)
        end = tl.load(cu_seqlens + later + 1)
    place -= _padding_before(end - begin, max_seqlen, left)
    token = begin + place
    holds = (place >= 0) & (token < end) & (token >= 0) & (token < num_tokens)
    offset = (token.to(tl.int64) * stride + unit % width) * PER_UNIT + element % PER_UNIT
    word = tl.load(packed + offset, mask=holds, other=0)
    fill = tl.where(element % 2 == 0, low, high).to(word.dtype)
    tile = out + tl.program_id(0).to(tl.int64) * BLOCK
    tl.store(tile + element, tl.where(holds, word, fill))


@triton.jit(
    do_not_specialize=["num_tokens", "batch", "max_seqlen", "left", "row_stride", "stride"],
    do_not_specialize_on_alignment=["width"],
)
def unpad_kernel(
    padded, cu_seqlens, out, num_tokens, batch, max_seqlen, left, width, row_stride: tl.int64,
    stride: tl.int64, PER_UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    element = tl.arange(0, BLOCK)
    row, skipped, unit = _begin_tile(width, PER_UNIT, BLOCK)
    first = row.to(tl.int32)
    last = tl.minimum(first + (skipped + (BLOCK // PER_UNIT - 1)) // width, num_tokens - 1)
    token = first + unit // width
    # boundaries that begin past `first` would send the search out of bounds
    floor = tl.load(cu_seqlens)
    segment = find_segment(cu_seqlens, batch, tl.maximum(first, floor), 1)
    sequence = segment + tl.zeros((BLOCK,), tl.int32)
    begin = tl.load(cu_seqlens + segment) + tl.zeros((BLOCK,), tl.int32)
    end = tl.load(cu_seqlens + segment + 1) + tl.zeros((BLOCK,), tl.int32)
    if last >= tl.load(cu_seqlens + segment + 1):  # the tile holds tokens of several sequences
        final = find_segment(cu_seqlens, batch, tl.maximum(last, floor), 1)
        sequence = find_segments(cu_seqlens, segment, final, token, 1)
        begin = tl.load(cu_seqlens + sequence)
        end = tl.load(cu_seqlens + sequence + 1)
    place = token - begin + _padding_before(end - begin, max_seqlen, left)
    held = (token >= begin) & (token < end) & (place >= 0) & (place < max_seqlen)
    offset = sequence.to(tl.int64) * row_stride + place.to(tl.int64) * stride + unit % width
    word = tl.load(padded + offset * PER_UNIT + element % PER_UNIT, mask=held, other=0)
    tile = out + tl.program_id(0).to(tl.int64) * BLOCK
    tl.store(tile + element, word)


def pad_forward(
    packed: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, value: complex, side: str
) -> torch.Tensor:
    """Launch the kernel for boundaries that are contiguous."""
    batch = cu_seqlens.shape[0] - 1
    shape, numbers = (batch, max_seqlen, *packed.shape[1:]), (packed.shape[0], batch, max_seqlen)
    fill = _fill(value, packed.dtype)
    return _launch("pad", pad_kernel, packed, shape, cu_seqlens, numbers, side=side, fill=fill)


def unpad_forward(
    padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int, side: str
) -> torch.Tensor:
    """Launch the kernel for boundaries that are contiguous."""
    batch, max_seqlen, *rest = padded.shape
    shape, numbers = (num_tokens, *rest), (num_tokens, batch, max_seqlen)
    if batch == 0:  # boundaries of no sequence that claim tokens
        return padded.new_zeros(shape)
    return _launch("unpad", unpad_kernel, padded, shape, cu_seqlens, numbers, side=side)


def _launch(
    op: str, kernel, source: torch.Tensor, shape, cu_seqlens: torch.Tensor, numbers,
    *, side: str, fill=(),
) -> torch.Tensor:  # fmt: skip
    """Return a result of ``shape`` that a kernel wrote in whole tiles.

    A unit is the widest in which the rows of the source can be counted, and an element, two of
    which make a unit of 16 bytes, is what the kernel moves.
    """
    size, lead = source.element_size(), 1 if op == "pad" else 2
    is_dense = source.numel() == 0 or source[(0,) * lead].is_contiguous()
    if not is_dense or source.data_ptr() % size:
        source = source.clone(memory_format=torch.contiguous_format)
    row, lengths = prod(source.shape[lead:]), source.shape[:lead]
    pairs = zip(source.stride(), lengths, strict=False)
    steps = [step if length > 1 else 0 for step, length in pairs]
    offsets = (source.storage_offset(), row, *steps)
    unit = gcd(16, source.data_ptr(), *(size * offset for offset in offsets))
    element, width = min(unit, 8), row * size // unit
    if width > MAX_WIDTH:
        raise ValueError(
            f"{op}: a row must have at most {MAX_WIDTH} units of {unit} bytes, got {width}"
        )
    pairs = zip(steps, lengths, strict=True)
    extent = row + sum(step * (length - 1) for step, length in pairs) if source.numel() else 0
    memory = source.as_strided((extent,), (1,)).view(UNITS[element])
    launch = launch_on(f"{op}_kernel, elements of {element}", source.get_device())
    tile = launch.block * element
    tiles = cdiv(prod(shape) * size, tile)
    whole = source.new_empty(tiles * tile // size)
    launch(
        kernel, tiles, memory, cu_seqlens, whole.view(UNITS[element]), *numbers,
        int(side == "left"), width, *(step * size // unit for step in steps), *fill,
        PER_UNIT=unit // element, BLOCK=launch.block,
    )  # fmt: skip
    return whole[: prod(shape)].view(shape)


def _fill(value: complex, dtype: torch.dtype) -> tuple[int, int]:
    """Return 16 bytes of ``value`` as two integers."""
    if isinstance(value, int) and value == 0:
        return 0, 0
    repeated = torch.full((16 // dtype.itemsize,), value, dtype=dtype, device="cpu")
    low, high = repeated.view(torch.int64).tolist()
    return low, high
