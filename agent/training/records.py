"""What is known of the steps of a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trajpack.agent.runner.runner import EpisodeResult
from trajpack.agent.training.policy_trainer import StepOutcome
from trajpack.packing.batch.batch import PackedBatch


@dataclass(frozen=True)
class StepRecord:
    """What is known of a step when it is over."""

    step: int
    """From 1."""
    success: float
    """Share of its answers that were right."""
    solved: float
    """Share of its episodes that ended with a right answer."""
    reward: float
    """Sum of an episode's rewards, on average."""
    num_tokens: int
    """Tokens of its batch."""
    num_generated: int
    """Those of them that the policy sampled."""
    seconds: float
    """Since the step before it was over, or since the first episode began."""
    outcome: StepOutcome
    """What the trainer did with it."""

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second, trained on as they came."""
        return self.num_generated / self.seconds


def record_step(
    step: int,
    episodes: Sequence[EpisodeResult],
    batch: PackedBatch,
    outcome: StepOutcome,
    seconds: float,
) -> StepRecord:
    """Put together what is known of a step."""
    turns = [episode.trajectories[0].turns for episode in episodes]
    count = len(turns)
    num_solved = sum(one[-1].reward > 0 for one in turns)
    return StepRecord(
        step=step,
        success=num_solved / sum(map(len, turns)),
        solved=num_solved / count,
        reward=sum(turn.reward for one in turns for turn in one) / count,
        num_tokens=batch.num_tokens,
        num_generated=batch.num_generated,
        seconds=seconds,
        outcome=outcome,
    )
