"""What to roll out, and how: the options of ``trajpack rollout``, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from trajpack.agent.errors import SetupError

EngineName: TypeAlias = Literal["transformers", "sglang", "vllm"]
"""What generates: the model in this process, or servers of that kind."""
MAX_COUNT = 10_000_000
"""Any count beyond it is a slip of the finger."""


@dataclass(frozen=True)
class RolloutSettings:
    """What to roll out, and how.

    The same settings give the same questions, the same weights and the same order of
    trajectories. They also give the same tokens if ``concurrency`` is 1 and nothing is resumed
    or handed to workers; otherwise requests share a random generator, and which of them comes
    first depends on the clock.

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
    engine: EngineName = "transformers"
    """What generates. With servers, ``model`` is where the tokenizer is."""
    servers: tuple[str, ...] = ()
    """Addresses of the servers; with none, those in the environment (`ServerSettings`)."""
    log: Path | None = None
    """Folder of the `TrajectoryLog`, which a later rollout of the same settings goes on from."""
    num_workers: int = 0
    """Ray actors, each with an engine of its own; 0 rolls out in this process."""
    max_attempts: int = 1
    """How often an episode is tried before it counts as failed."""
    metrics_port: int | None = None
    """Port of the metrics on loopback; 0 takes any, ``None`` serves none."""

    def __post_init__(self) -> None:
        counts = ("num_prompts", "num_turns", "group_size", "concurrency", "max_new_tokens")
        for name in (*counts, "max_attempts"):
            _check_range(name, getattr(self, name), 1)
        _check_range("num_workers", self.num_workers, 0)
        if not math.isfinite(self.turn_discount):
            raise SetupError(f"turn_discount must be finite, got {self.turn_discount}")
        if not 0 <= self.seed < 2**32:
            raise SetupError(f"seed must be in [0, 2**32), got {self.seed}")
        if self.metrics_port is not None and not 0 <= self.metrics_port < 2**16:
            raise SetupError(f"metrics_port must be in [0, 65536), got {self.metrics_port}")
        self._check_engine()

    @property
    def has_servers(self) -> bool:
        """Whether another process generates, reached over HTTP."""
        return self.engine != "transformers"

    def _check_engine(self) -> None:
        if self.engine not in get_args(EngineName):
            names = ", ".join(get_args(EngineName))
            raise SetupError(f"engine must be one of {names}, got {self.engine!r}")
        if self.servers and not self.has_servers:
            raise SetupError("servers need an engine that speaks to them: sglang or vllm")
        if self.has_servers and self.model is None:
            raise SetupError(
                f"engine {self.engine!r} needs model: the folder of the tokenizer of the server's "
                "model"
            )


def _check_range(name: str, value: int, lowest: int) -> None:
    if not lowest <= value <= MAX_COUNT:
        raise SetupError(f"{name} must be from {lowest} to {MAX_COUNT:,}, got {value}")
