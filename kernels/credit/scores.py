"""What trajectories have as a whole: score, length, whether they count."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trajpack.kernels.dispatch import LIBRARY
from trajpack.kernels.reduce.segment_reduce import segment_sum


class Scores(NamedTuple):
    """Trajectories as members of their groups."""

    scores: torch.Tensor
    """float64 ``[trajectories]``: sum of the turns' rewards."""
    lengths: torch.Tensor
    """int32 ``[trajectories]``: generated tokens."""
    valid: torch.Tensor
    """bool ``[trajectories]``: False where the last turn was cut off."""


def scores_of_trajectories(
    turn_rewards: torch.Tensor,
    turn_truncated: torch.Tensor,
    cu_generated: torch.Tensor,
    cu_turns: torch.Tensor,
    clip: float,
    impl: str,
) -> Scores:
    """Sum up what the turns of each trajectory have.

    Args:
        turn_rewards: ``[turns]`` float64.
        turn_truncated: ``[turns]`` bool.
        cu_generated: ``[turns + 1]`` int32: generated tokens before each turn.
        cu_turns: ``[trajectories + 1]`` int32.
        clip: Scores are brought within ``[-clip, clip]``.
        impl: ``"torch"`` or ``"triton"``.

    Cost: one launch. No copy, no host synchronisation.
    """
    return Scores(
        *torch.ops.trajpack.scores_of_trajectories(
            turn_rewards, turn_truncated, cu_generated, cu_turns, clip, impl
        )
    )


def _run(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    turn_rewards, turn_truncated, cu_generated, cu_turns, clip, impl = inputs
    if impl == "triton":
        from trajpack.kernels.credit.scores_triton import scores_forward

        return scores_forward(*inputs[:5])
    scores = segment_sum(turn_rewards, cu_turns, impl="torch").clamp(-clip, clip)
    ends = cu_turns[1:].long()
    lengths = cu_generated[cu_turns.long()].diff()
    if not turn_rewards.shape[0]:
        return scores, lengths, torch.ones_like(lengths, dtype=torch.bool)
    has_turns = ends > cu_turns[:-1]
    return scores, lengths, ~(has_turns & turn_truncated[(ends - 1).clamp(min=0)])


def _fake(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num = inputs[3].shape[0] - 1
    scores = inputs[0].new_empty(num)
    return scores, scores.new_empty(num, dtype=torch.int32), scores.new_empty(num, dtype=torch.bool)


LIBRARY.define(
    "scores_of_trajectories(Tensor turn_rewards, Tensor turn_truncated, Tensor cu_generated, "
    "Tensor cu_turns, float clip, str impl) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.impl("scores_of_trajectories", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::scores_of_trajectories", _fake, lib=LIBRARY)
