"""Score, length and validity of each trajectory, from its turns."""

from __future__ import annotations

from typing import NamedTuple

import torch

from trajpack.kernels.dispatch import register_op
from trajpack.kernels.reduce.segment_reduce import segment_sum


class Scores(NamedTuple):
    """Trajectories as members of their groups: ``[trajectories]`` each."""

    scores: torch.Tensor
    """float64: sum of the turns' rewards."""
    lengths: torch.Tensor
    """int32: number of generated tokens."""
    valid: torch.Tensor
    """bool: False where the last turn was cut off."""


def scores_of_trajectories(
    turn_rewards: torch.Tensor,
    turn_truncated: torch.Tensor,
    cu_generated: torch.Tensor,
    cu_turns: torch.Tensor,
    *,
    clip: float,
    impl: str,
) -> Scores:
    """Sum the rewards and the generated tokens of each trajectory's turns.

    Args:
        turn_rewards: ``[turns]`` float64.
        turn_truncated: ``[turns]`` bool.
        cu_generated: ``[turns + 1]`` int32: generated tokens before each turn.
        cu_turns: ``[trajectories + 1]`` int32.
        clip: Scores are clipped to ``[-clip, clip]``.
        impl: ``"torch"`` or ``"triton"``.

    Cost: one launch. No copy, no host synchronisation.
    """
    return Scores(
        *torch.ops.trajpack.scores_of_trajectories(
            turn_rewards, turn_truncated, cu_generated, cu_turns, clip, impl
        )
    )


def _run(
    turn_rewards: torch.Tensor,
    turn_truncated: torch.Tensor,
    cu_generated: torch.Tensor,
    cu_turns: torch.Tensor,
    clip: float,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if impl == "triton":
        from trajpack.kernels.credit.scores_triton import scores_forward

        return scores_forward(turn_rewards, turn_truncated, cu_generated, cu_turns, clip)
    scores = segment_sum(turn_rewards, cu_turns, impl="torch").clamp(-clip, clip)
    ends = cu_turns[1:].long()
    lengths = cu_generated[cu_turns.long()].diff()
    if not turn_rewards.shape[0]:
        return scores, lengths, torch.ones_like(lengths, dtype=torch.bool)
    has_turns = ends > cu_turns[:-1]
    return scores, lengths, ~(has_turns & turn_truncated[(ends - 1).clamp(min=0)])


def _fake(
    turn_rewards: torch.Tensor,
    turn_truncated: torch.Tensor,
    cu_generated: torch.Tensor,
    cu_turns: torch.Tensor,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = turn_rewards.new_empty(cu_turns.shape[0] - 1)
    return (
        scores,
        torch.empty_like(scores, dtype=torch.int32),
        torch.empty_like(scores, dtype=torch.bool),
    )


register_op(
    "scores_of_trajectories(Tensor turn_rewards, Tensor turn_truncated, Tensor cu_generated, "
    "Tensor cu_turns, float clip, str impl) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
