# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of `trajpack.kernels.credit.turns`: scores of trajectories, values of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trajpack.kernels.launches import cdiv, launch_on
from trajpack.kernels.runs import RUN_WIDTH, Run
from trajpack.kernels.search_triton import find_segment, find_segments

ROW = tl.constexpr(RUN_WIDTH)
GENERATED = tl.constexpr(int(Run.GENERATED))
TURN = tl.constexpr(int(Run.TURN))


@triton.jit(do_not_specialize=["num_segments"])
def scores_kernel(
    turn_rewards, cu_generated, cu_turns, group_ids, given, truncated, scores, lengths, shares,
    num_segments, clip: tl.float64, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the scores of ``BLOCK`` trajectories, and how many of a group count and are not 0."""
    segment = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = segment < num_segments
    begin = tl.load(cu_turns + segment, mask=exists, other=0)
    end = tl.load(cu_turns + segment + 1, mask=exists, other=0)
    if given is not None:
        score = tl.load(given + segment, mask=exists, other=0.0).to(tl.float64)
    else:
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
    counted = tl.load(group_ids + segment, mask=exists, other=-1) >= 0
    if truncated is not None:
        counted &= tl.load(truncated + segment, mask=exists, other=0) == 0
    part = shares + 2 * tl.program_id(0)
    tl.store(part, tl.sum(counted.to(tl.int32), 0))
    tl.store(part + 1, tl.sum((counted & (score != 0)).to(tl.int32), 0))


def scores_forward(
    *tables: torch.Tensor, given: torch.Tensor | None, truncated: torch.Tensor | None, clip: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch one lane per trajectory; return the fields of `Scores`."""
    turn_rewards, cu_generated, cu_turns, group_ids = tables
    num_segments = cu_turns.shape[0] - 1
    device = turn_rewards.device
    launch = launch_on("scores_kernel", turn_rewards.get_device())
    programs = cdiv(num_segments, launch.block)
    scores = torch.empty(num_segments, dtype=torch.float64, device=device)
    lengths = torch.empty(num_segments, dtype=torch.int32, device=device)
    shares = torch.empty((programs, 2), dtype=torch.int32, device=device)
    launch(
        scores_kernel, programs, turn_rewards, cu_generated, cu_turns, group_ids, given,
        None if truncated is None else truncated.view(torch.int8), scores, lengths, shares,
        num_segments, clip, BLOCK=launch.block,
    )  # fmt: skip
    return scores, lengths, shares


@triton.jit
def _value_of(values, steps, place, turn, known, weight):
    """Return ``values[place] + weight * steps[turn]``."""
    value = tl.zeros_like(turn).to(tl.float32)
    if values is not None:
        value = tl.load(values + place, mask=known, other=0.0)
    if steps is not None:
        value += weight * tl.load(steps + turn, mask=known, other=0.0)
    return value


@triton.jit(do_not_specialize=["stride", "num_runs", "num_tokens"])
def spread_kernel(
    runs, values, steps, index, others, spread, second, stride, num_runs, num_tokens, weight,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a tile of tokens; memory is allocated in whole tiles."""
    first = tl.program_id(0) * BLOCK
    token = first + tl.arange(0, BLOCK)
    low = find_segment(runs, num_runs, first, ROW)
    row = runs + low * ROW
    is_one = tl.load(row + ROW) >= first + BLOCK
    if is_one:  # the tile lies inside one run
        context = tl.load(row + GENERATED)
        known = first + BLOCK - tl.load(row) > context
        turn = tl.load(row + TURN)
        place = turn
        if index is not None:
            place = tl.load(index + turn * stride, mask=known, other=0)
        generated = token - tl.load(row) >= context
        value = _value_of(values, steps, place, turn, known, weight)
        tl.store(spread + token, tl.where(generated, value, 0.0))
        if others is not None:
            value = _value_of(others, None, place, turn, known, weight)
            tl.store(second + token, tl.where(generated, value, 0.0))
    else:
        last = tl.minimum(first + BLOCK, num_tokens) - 1
        high = find_segment(runs, num_runs, last, ROW)
        inside = tl.minimum(token, last)  # memory behind the last token is not used
        rows = runs + find_segments(runs, low, high, inside, ROW) * ROW
        generates = inside - tl.load(rows) >= tl.load(rows + GENERATED)
        turns = tl.load(rows + TURN)
        places = turns
        if index is not None:
            places = tl.load(index + turns * stride, mask=generates, other=0)
        tl.store(spread + token, _value_of(values, steps, places, turns, generates, weight))
        if others is not None:
            tl.store(second + token, _value_of(others, None, places, turns, generates, weight))


def spread_forward(
    num_tokens: int, runs: torch.Tensor, *rows: torch.Tensor | None, weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a program for each tile; return the tokens' values, and their other ones.

    ``rows`` are values, steps, index and others of `trajpack.kernels.credit.turns.spread`.
    """
    values, steps, index, others = rows
    launch = launch_on("spread_kernel", runs.get_device())
    tiles = cdiv(num_tokens, launch.block)
    memory = torch.empty(tiles * launch.block, dtype=torch.float32, device=runs.device)
    second = torch.empty_like(memory) if others is not None else memory.new_empty(0)
    launch(
        spread_kernel, tiles, runs, values, steps, index, others, memory,
        second, 1 if index is None else index.stride(0), runs.shape[0] - 1, num_tokens, weight,
        BLOCK=launch.block,
    )  # fmt: skip
    return memory[:num_tokens], second[:num_tokens]
