# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernel of `trajpack.kernels.build`: one program writes all fields of ``BLOCK`` tokens.

Outputs are allocated in whole tiles, so every store is full width and unmasked. A program finds
the runs of its first and its last token by a 64-ary search. A tile inside one run loads the run's
row once; in any other tile each lane finds its own run by halving, and gathers. So the cost of a
tile hardly depends on the number of its runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trajpack.kernels.launches import cdiv, launch_on
from trajpack.kernels.runs import RUN_WIDTH, TILE, Run
from trajpack.kernels.search_triton import find_segment, find_segments

BLOCK = launch_on("build_kernel", -1).block
"""Tokens of a tile in the interpreter; on a device the architecture decides."""
WHOLE = tl.constexpr(TILE)
ROW = tl.constexpr(RUN_WIDTH)
SOURCE = tl.constexpr(int(Run.SOURCE))
GENERATED = tl.constexpr(int(Run.GENERATED))
LOGPROB = tl.constexpr(int(Run.LOGPROB))
POSITION = tl.constexpr(int(Run.POSITION))
SEQUENCE = tl.constexpr(int(Run.SEQUENCE))
TURN = tl.constexpr(int(Run.TURN))
VERSION = tl.constexpr(int(Run.VERSION))


@triton.jit
def _write_tile(words, row, turn_returns, memory, size, token, inside):
    """Write a tile of each field to memory of `trajpack.kernels.fields.build.empty_memory`.

    ``row`` is the row of the tile's run, or that of each token's run. ``inside`` are the tokens;
    those behind the last one, whose memory is not used, count as the last.
    """
    none = tl.zeros_like(token)
    offset = inside - tl.load(row)
    source = tl.load(row + SOURCE)
    word = tl.load(words + source + offset, mask=source >= 0, other=0)
    context = tl.load(row + GENERATED)
    generated = offset >= context
    place = tl.load(row + LOGPROB) - context + offset
    logprob = tl.load(words + place, mask=generated, other=0)
    turn = tl.load(row + TURN) + none
    earned = tl.load(turn_returns + turn, mask=generated, other=0.0)
    position = tl.load(row + POSITION) + offset
    sequence = tl.load(row + SEQUENCE) + none
    version = tl.where(generated, tl.load(row + VERSION), -1)
    tl.store(memory + token, word.to(tl.int64))
    tl.store(memory + size + token, position.to(tl.int64))
    ints = (memory + 2 * size).to(tl.pointer_type(tl.int32))
    tl.store(ints + token, sequence)
    tl.store(ints + size + token, tl.where(generated, turn, -1))
    tl.store(ints + 2 * size + token, logprob)
    tl.store(ints + 3 * size + token, version)
    tl.store(ints + 4 * size + token, earned.to(tl.int32, bitcast=True))
    masks = (ints + 5 * size).to(tl.pointer_type(tl.int8))
    tl.store(masks + token, 1 - generated.to(tl.int8))
    tl.store(masks + size + token, generated.to(tl.int8))


@triton.jit(do_not_specialize=["num_runs", "num_tokens"])
def build_kernel(words, runs, turn_returns, memory, num_runs, num_tokens, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    token = first + tl.arange(0, BLOCK)
    size = tl.cdiv(num_tokens, WHOLE).to(tl.int64) * WHOLE
    low = find_segment(runs, num_runs, first, ROW)
    if tl.load(runs + (low + 1) * ROW) >= first + BLOCK:
        _write_tile(words, runs + low * ROW, turn_returns, memory, size, token, token)
    else:
        last = tl.minimum(first + BLOCK, num_tokens) - 1
        high = find_segment(runs, num_runs, last, ROW)
        inside = tl.minimum(token, last)
        row = runs + find_segments(runs, low, high, inside, ROW) * ROW
        _write_tile(words, row, turn_returns, memory, size, token, inside)


def write_fields(
    words: torch.Tensor,
    runs: torch.Tensor,
    turn_returns: torch.Tensor,
    *,
    num_tokens: int,
    memory: torch.Tensor,
) -> None:
    """Launch the kernel; it writes ``memory`` of `empty_memory` to the end."""
    launch = launch_on("build_kernel", words.get_device())
    launch(
        build_kernel, cdiv(num_tokens, launch.block), words, runs, turn_returns, memory,
        runs.shape[0] - 1, num_tokens, BLOCK=launch.block,
    )  # fmt: skip
