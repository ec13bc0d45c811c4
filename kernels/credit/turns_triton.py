# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of `trajpack.kernels.credit.turns`: scores of trajectories, values of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import launch_on
from trajpack.kernels.reduce.whiten_triton import (
    CHUNK,
    PARTIALS,
    RESULTS,
    empty_results,
    store_moments,
)
from trajpack.kernels.search_triton import find_segment, find_segments

if TYPE_CHECKING:
    from trajpack.kernels.credit.turns import Turns


@triton.jit(do_not_specialize=["num_segments"])
def scores_kernel(
    turn_rewards,
    turn_truncated,
    cu_generated,
    cu_turns,
    scores,
    lengths,
    valid,
    num_segments,
    clip: tl.float64,
    BLOCK: tl.constexpr,
):
    """Write the scores of ``BLOCK`` trajectories."""
    segment = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = segment < num_segments
    begin = tl.load(cu_turns + segment, mask=exists, other=0)
    end = tl.load(cu_turns + segment + 1, mask=exists, other=0)
    score = tl.zeros((BLOCK,), tl.float64)
    longest = tl.max(end - begin, 0)
    done = 0
    while done < longest:
        score += tl.load(turn_rewards + begin + done, mask=begin + done < end, other=0.0)
        done += 1
    score = tl.where(score > clip, clip, tl.where(score < -clip, -clip, score))  # NaN stays
    tl.store(scores + segment, score, mask=exists)
    first = tl.load(cu_generated + begin, mask=exists, other=0)
    past = tl.load(cu_generated + end, mask=exists, other=0)
    tl.store(lengths + segment, past - first, mask=exists)
    cut = tl.load(turn_truncated + end - 1, mask=exists & (end > begin), other=0)
    tl.store(valid + segment, (cut == 0).to(tl.int8), mask=exists)


def scores_forward(
    turn_rewards: torch.Tensor,
    turn_truncated: torch.Tensor,
    cu_generated: torch.Tensor,
    cu_turns: torch.Tensor,
    clip: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch one lane per trajectory; return the fields of `Scores`."""
    num_segments = cu_turns.shape[0] - 1
    device = turn_rewards.device
    scores = torch.empty(num_segments, dtype=torch.float64, device=device)
    lengths = torch.empty(num_segments, dtype=torch.int32, device=device)
    valid = torch.empty(num_segments, dtype=torch.bool, device=device)
    launch = launch_on("scores_kernel", turn_rewards.get_device())
    if num_segments:
        with torch.cuda.device_of(turn_rewards):  # Triton launches on the current device
            scores_kernel[(triton.cdiv(num_segments, launch.block),)](
                turn_rewards,
                turn_truncated.view(torch.int8),
                cu_generated,
                cu_turns,
                scores,
                lengths,
                valid.view(torch.int8),
                num_segments,
                clip,
                BLOCK=launch.block,
                **launch.options,
            )
    return scores, lengths, valid


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
    results,
    counter,
    num_tokens,
    num_segments,
    weight: tl.float64,
    CHUNK: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Write a chunk of tokens, and the moments of all chunks.

    Memory is allocated for a whole last chunk.
    """
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
    store_moments(value, generated, results, counter, 0.0, PARTIALS)


def spread_forward(
    turns: Turns,
    rows: torch.Tensor | None,
    steps: torch.Tensor | None,
    *,
    others: torch.Tensor | None,
    weight: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch one program per chunk; return rows, others and the moments of `store_moments`."""
    turn_ids, cu_turns, spans = turns
    num_tokens, device = turn_ids.shape[0], turn_ids.device
    chunks = max(triton.cdiv(num_tokens, CHUNK), 1)
    memory = torch.empty(chunks * CHUNK, dtype=torch.float32, device=device)
    second = torch.empty_like(memory) if others is not None else memory.new_empty(0)
    results, counter = empty_results(chunks, device)
    with torch.cuda.device_of(turn_ids):  # Triton launches on the current device
        spread_kernel[(chunks,)](
            turn_ids,
            cu_turns,
            spans,
            rows,
            steps,
            others,
            memory,
            second,
            results,
            counter,
            num_tokens,
            cu_turns.shape[0] - 1,
            weight,
            CHUNK=CHUNK,
            PARTIALS=PARTIALS,
            **launch_on("spread_kernel", turn_ids.get_device()).options,
        )
    return memory[:num_tokens], second[:num_tokens], results[:RESULTS]
