"""What to train, and how."""

from __future__ import annotations

from dataclasses import dataclass

from trajpack.agent.errors import SetupError

_LIMITS = {
    "num_steps": (1, 10_000),
    "num_prompts": (1, 1_000),
    "group_size": (2, 1_000),
    "num_turns": (1, 16),
    "warm_up_steps": (1, 10_000),
    "capacity": (128, 1_000_000),  # a conversation of 16 turns fits
    "seed": (0, 2**32 - 1),
}


@dataclass(frozen=True)
class TrainSettings:
    """What to train, and how.

    The same settings give the same weights to begin with and the same questions. What is sampled
    for them depends on the clock too: weights change while answers are under way.

    Raises:
        SetupError: If a value is out of range.
    """

    num_steps: int = 30
    """Steps of policy gradients."""
    num_prompts: int = 16
    """Questions for each step."""
    group_size: int = 8
    """Episodes for each question; their scores are compared."""
    num_turns: int = 3
    """Answers of an episode at most: it ends with the first right one."""
    warm_up_steps: int = 120
    """Supervised steps before the first episode."""
    learning_rate: float = 1e-3
    """Of policy gradients."""
    capacity: int = 512
    """Tokens of a micro-batch at most."""
    seed: int = 0
    """Of weights, questions, demonstrations and sampling."""

    def __post_init__(self) -> None:
        for name, (least, most) in _LIMITS.items():
            if not least <= getattr(self, name) <= most:
                limits = f"from {least:,} to {most:,}"
                raise SetupError(f"{name} must be {limits}, got {getattr(self, name):,}")
        if not 0 < self.learning_rate < float("inf"):
            raise SetupError(f"learning_rate must be positive, got {self.learning_rate}")

    @property
    def num_episodes(self) -> int:
        """Episodes of a step."""
        return self.num_prompts * self.group_size
