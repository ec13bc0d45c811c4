# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernel of `gather_words`: one program writes ``BLOCK`` words from a table of addresses.

The stream is allocated in whole tiles, so its store is full width and unmasked. A program finds
the source tensor of its first word by a 64-ary search and reads the tensors of its tile one after
another. All lanes read the same kind of entry, so only one of the loads runs. Addresses may have
any alignment, so entries are loaded one by one: a request uses a quarter of each sector that it
touches, and the next three requests use the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trajpack.kernels.fields.gather_words import PIECE_WIDTH, Kind, Piece
from trajpack.kernels.launches import cdiv, launch_on
from trajpack.kernels.search_triton import find_segment

BLOCK = launch_on("gather_words_kernel", -1).block
"""Words of a tile in the interpreter; on a device the architecture decides."""
ROW = tl.constexpr(PIECE_WIDTH)
ADDRESS = tl.constexpr(int(Piece.ADDRESS))
START = tl.constexpr(int(Piece.START))
KIND = tl.constexpr(int(Piece.KIND))
INT64 = tl.constexpr(int(Kind.INT64))
INT16 = tl.constexpr(int(Kind.INT16))
INT8 = tl.constexpr(int(Kind.INT8))
UINT8 = tl.constexpr(int(Kind.UINT8))
FLOAT64 = tl.constexpr(int(Kind.FLOAT64))
BFLOAT16 = tl.constexpr(int(Kind.BFLOAT16))
FLOAT16 = tl.constexpr(int(Kind.FLOAT16))


@triton.jit
def _load(address, offset, inside, DTYPE: tl.constexpr):
    return tl.load(address.to(tl.pointer_type(DTYPE)) + offset, mask=inside, other=0)


@triton.jit
def _load_words(address, kind, offset, inside):
    """Return the words of one tensor, where ``inside``."""
    if kind == INT64:
        word = _load(address, offset, inside, tl.int64).to(tl.int32)
    elif kind == INT16:
        word = _load(address, offset, inside, tl.int16).to(tl.int32)
    elif kind == INT8:
        word = _load(address, offset, inside, tl.int8).to(tl.int32)
    elif kind == UINT8:
        word = _load(address, offset, inside, tl.uint8).to(tl.int32)
    elif kind == FLOAT64:
        word = _load(address, offset, inside, tl.float64).to(tl.float32).to(tl.int32, bitcast=True)
    elif kind == BFLOAT16:  # the upper half of a float32
        word = _load(address, offset, inside, tl.uint16).to(tl.int32) << 16
    elif kind == FLOAT16:
        word = _load(address, offset, inside, tl.float16).to(tl.float32).to(tl.int32, bitcast=True)
    else:
        word = _load(address, offset, inside, tl.int32)
    return word


@triton.jit(do_not_specialize=["num_sources", "num_words"])
def gather_words_kernel(table, words, num_sources, num_words, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    place = first + tl.arange(0, BLOCK)
    source = find_segment(table + START, num_sources, first, ROW)
    word = tl.zeros((BLOCK,), tl.int32)
    limit = tl.minimum(first + BLOCK, num_words)
    start = first
    while start < limit:
        row = table + source * ROW
        begin = tl.load(row + START).to(tl.int32)
        end = tl.load(row + ROW + START).to(tl.int32)  # the last source ends at num_words
        inside = (place >= start) & (place < end)
        taken = _load_words(tl.load(row + ADDRESS), tl.load(row + KIND), place - begin, inside)
        word = tl.where(inside, taken, word)
        start = end
        source += 1
    tl.store(words + place, word)


def gather_words_forward(table: torch.Tensor, num_words: int) -> torch.Tensor:
    """Launch the kernel on a contiguous table and cut the stream to ``num_words``."""
    launch = launch_on("gather_words_kernel", table.get_device())
    tiles = cdiv(num_words, launch.block)
    words = torch.empty(tiles * launch.block, dtype=torch.int32, device=table.device)
    launch(
        gather_words_kernel, tiles, table, words, table.shape[0] - 1, num_words, BLOCK=launch.block
    )
    return words[:num_words]
