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

from trajpack.kernels.block_shapes import Launch, launch_on
from trajpack.kernels.fields.gather_fields import UNITS
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
    packed: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    value: complex,
    side: str,
) -> torch.Tensor:
    """Launch the kernel for boundaries that are contiguous."""
    source = _Source("pad", packed, 1)
    launch = _launch("pad_kernel", source)
    batch = cu_seqlens.shape[0] - 1
    shape = (batch, max_seqlen, *packed.shape[1:])
    whole, elements, tiles = _whole_tiles(packed, prod(shape), source.element, launch.block)
    if tiles:
        low, high = _fill(value, packed.dtype)
        (stride,) = source.strides
        with torch.cuda.device_of(packed):  # Triton launches on the current device
            pad_kernel[(tiles,)](
                source.memory, cu_seqlens, elements, packed.shape[0], batch, max_seqlen,
                int(side == "left"), source.width, stride, low, high,
                PER_UNIT=source.unit // source.element, BLOCK=launch.block, **launch.options,
            )  # fmt: skip
    return whole[: prod(shape)].view(shape)


def unpad_forward(
    padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int, side: str
) -> torch.Tensor:
    """Launch the kernel for boundaries that are contiguous."""
    source = _Source("unpad", padded, 2)
    launch = _launch("unpad_kernel", source)
    batch, max_seqlen = padded.shape[:2]
    shape = (num_tokens, *padded.shape[2:])
    whole, elements, tiles = _whole_tiles(padded, prod(shape), source.element, launch.block)
    if batch == 0:
        whole.zero_()  # boundaries of no sequence that claim tokens
    elif tiles:
        row_stride, stride = source.strides
        with torch.cuda.device_of(padded):  # Triton launches on the current device
            unpad_kernel[(tiles,)](
                source.memory, cu_seqlens, elements, num_tokens, batch, max_seqlen,
                int(side == "left"), source.width, row_stride, stride,
                PER_UNIT=source.unit // source.element, BLOCK=launch.block, **launch.options,
            )  # fmt: skip
    return whole[: prod(shape)].view(shape)


class _Source:
    """A tensor as flat memory, counted in the widest unit that its rows allow.

    A row is the dimensions from ``lead`` on. ``memory`` has elements of ``element`` bytes, two for
    a unit of 16. ``width``, the size of a row, and ``strides``, those of the leading dimensions,
    count units.
    """

    def __init__(self, op: str, tensor: torch.Tensor, lead: int) -> None:
        size, shape = tensor.element_size(), tensor.shape
        if not _rows_are_dense(tensor, lead) or tensor.data_ptr() % size:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        row = prod(shape[lead:])
        steps = [
            step if length > 1 else 0
            for step, length in zip(tensor.stride()[:lead], shape[:lead], strict=True)
        ]
        offsets = (tensor.storage_offset(), row, *steps)
        self.unit = gcd(16, tensor.data_ptr(), *(size * offset for offset in offsets))
        self.element = min(self.unit, 8)
        self.width = row * size // self.unit
        self.strides = [step * size // self.unit for step in steps]
        if self.width > MAX_WIDTH:
            raise ValueError(
                f"{op}: a row must have at most {MAX_WIDTH} units of {self.unit} bytes, "
                f"got {self.width}"
            )
        extent = 0
        if tensor.numel():
            pairs = zip(steps, shape[:lead], strict=True)
            extent = row + sum(step * (length - 1) for step, length in pairs)
        self.memory = tensor.as_strided((extent,), (1,)).view(UNITS[self.element])


def _rows_are_dense(tensor: torch.Tensor, lead: int) -> bool:
    dense = 1
    for length, stride in zip(
        reversed(tensor.shape[lead:]), reversed(tensor.stride()[lead:]), strict=True
    ):
        if length > 1 and stride != dense:
            return tensor.numel() == 0
        dense *= length
    return True


def _launch(kernel: str, source: _Source) -> Launch:
    return launch_on(f"{kernel}, elements of {source.element}", source.memory.get_device())


def _whole_tiles(
    like: torch.Tensor, count: int, element: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Allocate ``count`` entries in whole tiles of ``block`` elements of ``element`` bytes.

    Return the memory as entries and as elements, and the number of tiles.
    """
    tile = block * element
    tiles = triton.cdiv(count * like.element_size(), tile)
    whole = like.new_empty(tiles * tile // like.element_size())
    return whole, whole.view(UNITS[element]), tiles


def _fill(value: complex, dtype: torch.dtype) -> tuple[int, int]:
    """Return 16 bytes of ``value`` as two integers."""
    if isinstance(value, int) and value == 0:
        return 0, 0
    repeated = torch.full((16 // dtype.itemsize,), value, dtype=dtype, device="cpu")
    low, high = repeated.view(torch.int64).tolist()
    return low, high
