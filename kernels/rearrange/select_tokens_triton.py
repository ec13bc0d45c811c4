# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Selected tokens in one launch: a program owns one tile of ``BLOCK`` tokens, or of one field.

The program of a tile of tokens writes positions, segments and every field of one unit per token:
they share one search. A field of several units per token has tiles of its own, later in the grid.
Outputs are allocated in whole tiles, so every store is full width and unmasked. Sources may begin
anywhere, so loads are unit by unit: a thread loads the neighbours that it stores, and the lanes of
a warp load 4 units apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import launch_on
from trajpack.kernels.rearrange.segments import Rows, Segment
from trajpack.kernels.runs import TILE
from trajpack.kernels.search_triton import find_segment, find_segments

SOURCE = tl.constexpr(int(Segment.SOURCE))
LENGTH = tl.constexpr(int(Segment.LENGTH))


@triton.jit
def _place(table, stride, num_segments, num_sources, first, last, token):
    """Return each token's segment, place in it, index in the source, and whether it is there."""
    low = find_segment(table, num_segments, first, 1)
    high = find_segment(table, num_segments, last, 1)
    segment = find_segments(table, low, high, token, 1)
    offset = token - tl.load(table + segment)
    index = tl.load(table + SOURCE * stride + segment) + offset
    given = offset < tl.load(table + LENGTH * stride + segment)
    given = given & (index >= 0) & (index < num_sources)
    return segment, offset, index, given


@triton.jit
def _select_tokens(
    sources, outs, places, table, stride, num_segments, num_sources, num_tokens, tile,
    WIDTHS: tl.constexpr, FILLS: tl.constexpr, ZERO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write position, segment and every source of one unit to a row for a tile of tokens."""
    first = tile * BLOCK
    token = first + tl.arange(0, BLOCK)
    last = tl.minimum(first + BLOCK, num_tokens) - 1
    inside = tl.minimum(token, last)  # what stands behind the last token is cut off
    segment, offset, index, given = _place(
        table, stride, num_segments, num_sources, first, last, inside
    )
    if len(places) > 0:
        position = tl.where(given, offset, 0) if ZERO else offset
        tl.store(places[0] + token, position.to(tl.int64))
        tl.store(places[1] + token, segment)
    for number in tl.static_range(len(WIDTHS)):
        if WIDTHS[number] == 1:
            value = tl.load(sources[number] + index, mask=given, other=FILLS[number])
            tl.store(outs[number] + token, value)


@triton.jit
def _select_rows(
    source, out, table, stride, num_segments, num_sources, num_tokens, tile,
    WIDTH: tl.constexpr, FILL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a tile of units of one source that has several to a row."""
    first = tile.to(tl.int64) * BLOCK
    base = (first // WIDTH).to(tl.int32)
    begun = (first - base.to(tl.int64) * WIDTH).to(tl.int32)  # units of the token before the tile
    lane = tl.arange(0, BLOCK)
    last = tl.minimum(base + (begun + BLOCK - 1) // WIDTH, num_tokens - 1)
    token = tl.minimum(base + (begun + lane) // WIDTH, last)  # what stands behind is cut off
    _, _, index, given = _place(table, stride, num_segments, num_sources, base, last, token)
    place = index.to(tl.int64) * WIDTH + (begun + lane) % WIDTH
    value = tl.load(source + place, mask=given, other=FILL)
    tl.store(out + first + lane, value)


@triton.jit(do_not_specialize=["stride", "num_segments", "num_sources", "num_tokens"])
def select_tokens_kernel(
    sources, outs, places, table, stride, num_segments, num_sources, num_tokens,
    WIDTHS: tl.constexpr, FILLS: tl.constexpr, ZERO: tl.constexpr, BY_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if BY_TOKEN:
        tiles = tl.cdiv(num_tokens, BLOCK)
        if tile < tiles:
            _select_tokens(
                sources, outs, places, table, stride, num_segments, num_sources, num_tokens, tile,
                WIDTHS, FILLS, ZERO, BLOCK,
            )  # fmt: skip
        tile -= tiles
    for number in tl.static_range(len(WIDTHS)):
        if WIDTHS[number] > 1:
            tiles = tl.cdiv(num_tokens.to(tl.int64) * WIDTHS[number], BLOCK).to(tl.int32)
            if (tile >= 0) & (tile < tiles):
                _select_rows(
                    sources[number], outs[number], table, stride, num_segments, num_sources,
                    num_tokens, tile, WIDTHS[number], FILLS[number], BLOCK,
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
    device = table.device
    sizes = [num_tokens * row.width for row in rows] + [num_tokens] * (2 * bool(positions))
    dtypes = [source.dtype for source in sources]
    dtypes += [torch.int64, torch.int32] if positions else []
    memory = [
        torch.empty(triton.cdiv(size, TILE) * TILE, dtype=dtype, device=device)
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    outs, places = memory[: len(rows)], memory[len(rows) :]
    launch = launch_on("select_tokens_kernel", table.get_device())
    by_token = bool(positions) or any(row.width == 1 for row in rows)
    tiles = by_token * triton.cdiv(num_tokens, launch.block)
    tiles += sum(triton.cdiv(num_tokens * w, launch.block) for w, _, _ in rows if w > 1)
    if tiles:
        with torch.cuda.device_of(table):  # Triton launches on the current device
            select_tokens_kernel[(tiles,)](
                tuple(sources), tuple(outs), tuple(places), table, table.stride(0),
                table.shape[1] - 1, sources[0].shape[0] // rows[0].width, num_tokens,
                WIDTHS=tuple(row.width for row in rows), FILLS=tuple(row.fill for row in rows),
                ZERO=positions == "zero", BY_TOKEN=by_token,
                BLOCK=launch.block, **launch.options,
            )  # fmt: skip
    return [out[:size] for out, size in zip(memory, sizes, strict=True)]
