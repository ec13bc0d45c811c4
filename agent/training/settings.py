"""Settings of the demonstration of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from trajpack.agent.errors import SettingError
from trajpack.agent.rollout.settings import LayoutName

LIMITS = {
    "num_steps": (1, 10_000),
    "num_prompts": (1, 1_000),
    "group_size": (2, 1_000),
    "num_turns": (1, 16),
    "warm_up_steps": (1, 10_000),
    "capacity": (128, 1_000_000),  # a conversation of 16 turns fits
    "seed": (0, 2**32 - 1),
}
"""Least and largest value of each integer."""


@dataclass(frozen=True)
class TrainSettings:
    """Settings of a training; a value out of range raises `SettingError`.

    The same settings give the same initial weights and the same questions. The sampled tokens
    also depend on the clock, since weights change while episodes run.

    Attributes:
        num_steps: Number of policy-gradient steps.
        num_prompts: Questions for each step.
        group_size: Episodes for each question.
        num_turns: Maximum number of answers in an episode, which ends with the first right one.
        warm_up_steps: Number of supervised steps before the first episode.
        learning_rate: Learning rate of the policy-gradient steps.
        capacity: Maximum number of tokens, or nodes, in a micro-batch.
        layout: Layout of the batches; ``"tree"`` trains on trees.
        seed: Seed of weights, questions, demonstrations and sampling.
    """

    num_steps: int = 30
    num_prompts: int = 16
    group_size: int = 8
    num_turns: int = 3
    warm_up_steps: int = 120
    learning_rate: float = 1e-3
    capacity: int = 512
    layout: LayoutName = "merged"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            if not least <= getattr(self, name) <= most:
                limits = f"from {least:,} to {most:,}"
                raise SettingError(name, f"must be {limits}, got {getattr(self, name):,}")
        if self.layout not in get_args(LayoutName):
            names = ", ".join(get_args(LayoutName))
            raise SettingError("layout", f"must be one of {names}, got {self.layout!r}")
        if not 0 < self.learning_rate < float("inf"):
            raise SettingError("learning_rate", f"must be positive, got {self.learning_rate}")
