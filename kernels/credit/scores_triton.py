# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernel of `trajpack.kernels.credit.scores`: one lane sums the turns of a trajectory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import launch_on


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
