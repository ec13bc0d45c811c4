"""What to roll out, and how: the options of ``trajpack rollout``, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from trajpack.agent.errors import SetupError

MAX_COUNT = 10_000_000
"""Any count beyond it is a slip of the finger."""


@dataclass(frozen=True)
class RolloutSettings:
    """What to roll out, and how.

    The same settings give the same questions, the same weights and the same order of
    trajectories. They also give the same tokens if ``concurrency`` is 1; otherwise requests
    share a random generator, and which of them comes first depends on the clock.

    Raises:
        SetupError: If a value is out of range.
    """

    dataset: Path | None = None
    """JSONL file of questions, see `load_questions`; ``None`` makes sums by reasoning-gym."""
    model: Path | None = None
    """Folder of a transformers causal language model and its tokenizer; ``None`` makes a tiny
    one with random weights."""
    num_prompts: int = 16
    """How many questions: the first ones of the file, or all if it has fewer."""
    num_turns: int = 3
    """Turns of an episode."""
    group_size: int = 2
    """Episodes for each question."""
    concurrency: int = 16
    """Episodes in flight at most."""
    max_new_tokens: int = 32
    """Tokens of one completion at most."""
    turn_discount: float = 1.0
    """Discount from one turn to the next."""
    device: str = "cpu"
    """Where the model runs and the batch is packed."""
    seed: int = 0
    """Of the tiny model's weights, the questions made and the sampling."""
    answers: Path | None = None
    """Folder of the answer log; ``None`` keeps none."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "num_turns", "group_size", "concurrency", "max_new_tokens"):
            if not 1 <= getattr(self, name) <= MAX_COUNT:
                limits = f"from 1 to {MAX_COUNT:,}"
                raise SetupError(f"{name} must be {limits}, got {getattr(self, name)}")
        if not math.isfinite(self.turn_discount):
            raise SetupError(f"turn_discount must be finite, got {self.turn_discount}")
        if not 0 <= self.seed < 2**32:
            raise SetupError(f"seed must be in [0, 2**32), got {self.seed}")
