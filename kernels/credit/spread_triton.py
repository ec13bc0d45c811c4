# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernel of `trajpack.kernels.credit.spread`: one program writes one chunk of tokens.

Each token looks up its turn, and the turn's trajectory. A chunk is one of
`trajpack.kernels.whiten`; its moments are stored too, so that whitening needs no further launch
to read the result again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import launch_on
from trajpack.kernels.reduce.whiten_triton import CHUNK, store_chunk_moments
from trajpack.kernels.search_triton import find_segment, find_segments

if TYPE_CHECKING:
    from trajpack.kernels.credit.spread import Turns


@triton.jit(do_not_specialize=["num_tokens", "num_segments"])
def spread_kernel(
    turn_ids,
    cu_turns,
    spans,
    rows,
    steps,
    others,
    spread,
    second,
    partials,
    num_tokens,
    num_segments,
    weight: tl.float64,
    CHUNK: tl.constexpr,
):
    """Write one whole chunk; memory behind the last token is allocated for it."""
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    turn = tl.load(turn_ids + at, mask=at < num_tokens, other=-1)
    generated = turn >= 0
    highest = tl.max(turn, 0)
    lowest = tl.min(tl.where(generated, turn, highest), 0)
    value = tl.zeros((CHUNK,), tl.float32)
    if others is None:
        if rows is not None:  # noqa: SIM102 - the compiler takes one condition at a time
            if highest >= 0:
                low = find_segment(cu_turns, num_segments, lowest, 1)
                high = find_segment(cu_turns, num_segments, highest, 1)
                trajectory = find_segments(cu_turns, low, high, tl.maximum(turn, lowest), 1)
                value = tl.load(rows + trajectory, mask=generated, other=0.0)
        if steps is not None:
            step = tl.load(steps + turn, mask=generated, other=0.0)
            value = (value + weight * step).to(tl.float32)
    else:
        first = tl.load(spans + 2 * turn, mask=generated, other=0)
        value = tl.load(rows + first, mask=generated, other=0.0)
        other = tl.load(others + first, mask=generated, other=0.0)
        tl.store(second + at, other)
    tl.store(spread + at, value)
    store_chunk_moments(value, generated, partials, chunk, tl.num_programs(0).to(tl.int64))


def spread_forward(
    turns: Turns,
    rows: torch.Tensor | None,
    steps: torch.Tensor | None,
    *,
    others: torch.Tensor | None,
    weight: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch one program per chunk; return rows, others and the chunks' moments."""
    turn_ids, cu_turns, spans = turns
    num_tokens, device = turn_ids.shape[0], turn_ids.device
    chunks = triton.cdiv(num_tokens, CHUNK)
    room = torch.empty(chunks * CHUNK, dtype=torch.float32, device=device)
    second = torch.empty_like(room) if others is not None else room.new_empty(0)
    partials = torch.empty((5, chunks), dtype=torch.float64, device=device)
    if chunks:
        with torch.cuda.device_of(turn_ids):  # Triton launches on the current device
            spread_kernel[(chunks,)](
                turn_ids,
                cu_turns,
                spans,
                rows,
                steps,
                others,
                room,
                second,
                partials,
                num_tokens,
                cu_turns.shape[0] - 1,
                weight,
                CHUNK=CHUNK,
                **launch_on("spread_kernel", turn_ids.get_device()).options,
            )
    return room[:num_tokens], second[:num_tokens], partials
