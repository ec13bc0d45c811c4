# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Selected tokens in one launch: a program owns one tile of ``BLOCK`` units.

Sources whose rows have the same width share their tiles and their search; positions and segments
are of width 1. Outputs are allocated in whole tiles, so every store is full width and unmasked.
Sources may begin anywhere, so loads are unit by unit: a thread loads the neighbours that it stores,
and the lanes of a warp load 4 units apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from trajpack.kernels.fields.gather_fields_triton import tile_of_rows
from trajpack.kernels.fields.units import Rows, empty_units
from trajpack.kernels.launches import cdiv, launch_on
from trajpack.kernels.rearrange.select_tokens import Segment
from trajpack.kernels.search_triton import find_segment, find_segments

SOURCE = tl.constexpr(int(Segment.SOURCE))
LENGTH = tl.constexpr(int(Segment.LENGTH))


@triton.jit
def _select_tile(
    sources, outs, places, table, stride, num_segments, num_sources, num_tokens, tile,
    WIDTH: tl.constexpr, WIDTHS: tl.constexpr, FILLS: tl.constexpr, ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a tile of every source with rows of ``WIDTH`` units."""
    first, base, last, token, distance = tile_of_rows(tile, num_tokens, WIDTH, BLOCK)
    low = find_segment(table, num_segments, base, 1)
    high = find_segment(table, num_segments, last, 1)
    segment = find_segments(table, low, high, token, 1)
    offset = token - tl.load(table + segment)
    index = tl.load(table + SOURCE * stride + segment) + offset
    given = offset < tl.load(table + LENGTH * stride + segment)
    given = given & (index >= 0) & (index < num_sources)
    unit = first + tl.arange(0, BLOCK)
    if WIDTH == 1 and len(places) > 0:
        position = tl.where(given, offset, 0) if ZERO else offset
        tl.store(places[0] + unit, position.to(tl.int64))
        tl.store(places[1] + unit, segment)
    place = index.to(tl.int64) * WIDTH + distance % WIDTH
    for number in tl.static_range(len(WIDTHS)):
        if WIDTHS[number] == WIDTH:
            value = tl.load(sources[number] + place, mask=given, other=FILLS[number])
            tl.store(outs[number] + unit, value)


@triton.jit(do_not_specialize=["stride", "num_segments", "num_sources", "num_tokens"])
def select_tokens_kernel(
    sources, outs, places, table, stride, num_segments, num_sources, num_tokens,
    WIDTHS: tl.constexpr, FILLS: tl.constexpr, ZERO: tl.constexpr, DISTINCT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    for number in tl.static_range(len(DISTINCT)):
        tiles = tl.cdiv(num_tokens.to(tl.int64) * DISTINCT[number], BLOCK).to(tl.int32)
        if (tile >= 0) & (tile < tiles):
            _select_tile(
                sources, outs, places, table, stride, num_segments, num_sources, num_tokens, tile,
                DISTINCT[number], WIDTHS, FILLS, ZERO, BLOCK,
            )  # fmt: skip
        tile -= tiles


def select_forward(
    sources: Sequence[torch.Tensor],
    table: torch.Tensor,
    num_tokens: int,
    rows: Sequence[Rows],
    positions: str,
) -> list[torch.Tensor]:
    """Launch the kernel on flat sources, for fresh outputs.

    Positions and segments come last, unless ``positions`` is empty.
    """
    places = [Rows(1, 8, 0), Rows(1, 4, 0)] if positions else []
    memory = empty_units([*rows, *places], num_tokens, table.device)
    outs, positions_and_segments = tuple(memory[: len(rows)]), tuple(memory[len(rows) :])
    launch = launch_on("select_tokens_kernel", table.get_device())
    widths = tuple(row.width for row in rows)
    distinct = tuple(sorted({*widths, *(row.width for row in places)}))
    tiles = sum(cdiv(num_tokens * width, launch.block) for width in distinct)
    if tiles:  # there may be no row
        launch(
            select_tokens_kernel, tiles, tuple(sources), outs, positions_and_segments, table,
            table.stride(0), table.shape[1] - 1, sources[0].shape[0] // rows[0].width, num_tokens,
            WIDTHS=widths, FILLS=tuple(row.fill for row in rows), ZERO=positions == "zero",
            DISTINCT=distinct, BLOCK=launch.block,
        )  # fmt: skip
    pairs = zip(memory, [*rows, *places], strict=True)
    return [units[: num_tokens * row.width] for units, row in pairs]
