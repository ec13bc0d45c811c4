# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernel of `gather_fields`: one program writes ``BLOCK`` units of one field.

A unit has 1, 2, 4 or 8 bytes. The tiles of a field follow those of the field before in the grid.
Outputs are allocated in whole tiles, so every store is full width and unmasked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from trajpack.kernels.fields.gather_fields import GatherInputs
from trajpack.kernels.launches import cdiv, launch_on
from trajpack.kernels.runs import RUN_WIDTH, Run
from trajpack.kernels.search_triton import find_segment, find_segments

ROW = tl.constexpr(RUN_WIDTH)
SOURCE = tl.constexpr(int(Run.SOURCE))
GENERATED = tl.constexpr(int(Run.GENERATED))


@triton.jit
def tile_of_rows(tile, num_tokens, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return a tile's first unit, first and last token, each unit's token, and its distance.

    The first unit is int64. Units behind the last token, which nobody reads, count as its own. The
    distance is that from the first token's first unit.
    """
    first = tile.to(tl.int64) * BLOCK
    base = (first // WIDTH).to(tl.int32)
    begun = (first - base.to(tl.int64) * WIDTH).to(tl.int32)  # units of the token before the tile
    unit = begun + tl.arange(0, BLOCK)
    last = tl.minimum(base + (begun + BLOCK - 1) // WIDTH, num_tokens - 1)
    return first, base, last, tl.minimum(base + unit // WIDTH, last), unit


@triton.jit
def _gather_tile(
    words, runs, source, out, tile, num_runs, num_tokens, STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, FILL: tl.constexpr, GENERATED_ONLY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first, base, last, token, distance = tile_of_rows(tile, num_tokens, WIDTH, BLOCK)
    low = find_segment(runs, num_runs, base, ROW)
    high = find_segment(runs, num_runs, last, ROW)
    run = find_segments(runs, low, high, token, ROW)
    row = token - tl.load(runs + run * ROW)
    given = tl.load(runs + run * ROW + SOURCE) >= 0
    if GENERATED_ONLY:
        row -= tl.load(runs + run * ROW + GENERATED)
        given = given & (row >= 0)
    begin = tl.load(source + run * STRIDE) // UNIT
    place = begin + row.to(tl.int64) * WIDTH + distance % WIDTH
    value = tl.load(words.to(out.dtype, bitcast=True) + place, mask=given, other=FILL)
    tl.store(out + first + tl.arange(0, BLOCK), value)


@triton.jit(do_not_specialize=["num_runs", "num_tokens"])
def gather_fields_kernel(
    words, runs, sources, outs, num_runs, num_tokens, WIDTHS: tl.constexpr, UNITS: tl.constexpr,
    FILLS: tl.constexpr, GENERATED_ONLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    for field in tl.static_range(len(WIDTHS)):
        tiles = tl.cdiv(num_tokens.to(tl.int64) * WIDTHS[field], BLOCK).to(tl.int32)
        if (tile >= 0) & (tile < tiles):
            _gather_tile(
                words, runs, sources + field, outs[field], tile, num_runs, num_tokens, len(WIDTHS),
                WIDTHS[field], UNITS[field], FILLS[field], GENERATED_ONLY[field], BLOCK,
            )  # fmt: skip
        tile -= tiles


def write_rows(out: Sequence[torch.Tensor], given: GatherInputs) -> None:
    """Launch the kernel on outputs in whole tiles, which it writes to the end."""
    words, runs, sources, num_tokens, layouts, masks = given
    launch = launch_on("gather_fields_kernel", words.get_device())
    tiles = sum(cdiv(num_tokens * layout.width, launch.block) for layout in layouts)
    if not tiles:
        return
    widths, units, fills = zip(*layouts, strict=True)
    launch(
        gather_fields_kernel, tiles, words, runs, sources, tuple(out), runs.shape[0] - 1,
        num_tokens, WIDTHS=widths, UNITS=units, FILLS=fills,
        GENERATED_ONLY=tuple(map(int, masks)), BLOCK=launch.block,
    )  # fmt: skip
