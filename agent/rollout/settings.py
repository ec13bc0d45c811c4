"""Settings of a rollout: the options of ``trajpack rollout``, checked."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from trajpack.agent.errors import SettingError

EngineName: TypeAlias = Literal["transformers", "sglang", "vllm"]
"""The model in this process, or servers of that kind."""
LayoutName: TypeAlias = Literal["merged", "turns", "tree"]
"""Layout of a packed batch, or a tree, whose file has layout ``"merged"``."""
MAX_COUNT = 10_000_000
"""Upper bound of all counts."""
_COUNTS = (
    *("num_prompts", "num_turns", "group_size", "concurrency", "max_new_tokens", "max_attempts"),
    "num_workers",
)


@dataclass(frozen=True)
class RolloutSettings:
    """Settings of a rollout.

    The same settings give the same questions, the same weights and the same order of
    trajectories. They also give the same tokens if ``concurrency`` is 1 and the rollout is
    neither continued from a log nor run by workers; otherwise requests share a random generator
    in an order that depends on the clock.

    Attributes:
        dataset: JSONL file of questions, see `load_questions`; ``None`` makes sums of two
            numbers.
        model: Folder of a transformers causal language model and its tokenizer, or its name on
            the Hugging Face hub; ``None`` makes a tiny one with random weights. With servers only
            the tokenizer is read.
        num_prompts: Number of questions: the first ones of the file, or all if it has fewer.
        num_turns: Turns of an episode.
        group_size: Episodes for each question.
        concurrency: Maximum number of running episodes.
        max_new_tokens: Maximum number of tokens in a completion.
        turn_discount: Discount from one turn to the next.
        device: Device of the model and of the batch.
        seed: Seed of the tiny model's weights, the generated questions and the sampling.
        answers: Folder of the answer log; ``None`` keeps none.
        engine: The model in this process, or servers of that kind.
        servers: Addresses of the servers. Their token and file of certificates are the environment
            variables ``TRAJPACK_SERVER_TOKEN`` and ``TRAJPACK_SERVER_CA_FILE``.
        log: Folder of the `TrajectoryLog`, from which a rollout of the same settings continues.
        num_workers: Ray actors, each with an engine of its own; 0 runs in this process.
        max_attempts: Attempts at an episode before it counts as failed.
        metrics_port: Port of the metrics on loopback; 0 takes a free one, ``None`` serves none.

    Raises:
        SettingError: If a value is out of range.
    """

    dataset: Path | None = None
    model: str | os.PathLike[str] | None = None
    num_prompts: int = 16
    num_turns: int = 3
    group_size: int = 2
    concurrency: int = 16
    max_new_tokens: int = 32
    turn_discount: float = 1.0
    device: str = "cpu"
    seed: int = 0
    answers: Path | None = None
    engine: EngineName = "transformers"
    servers: tuple[str, ...] = ()
    log: Path | None = None
    num_workers: int = 0
    max_attempts: int = 1
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            least = 0 if name == "num_workers" else 1
            value = getattr(self, name)
            if not least <= value <= MAX_COUNT:
                raise SettingError(name, f"must be from {least} to {MAX_COUNT:,}, got {value}")
        if not math.isfinite(self.turn_discount):
            raise SettingError("turn_discount", f"must be finite, got {self.turn_discount}")
        if not 0 <= self.seed < 2**32:
            raise SettingError("seed", f"must be in [0, 2**32), got {self.seed}")
        if self.metrics_port is not None and not 0 <= self.metrics_port < 2**16:
            raise SettingError("metrics_port", f"must be in [0, 65536), got {self.metrics_port}")
        if self.engine not in get_args(EngineName):
            names = ", ".join(get_args(EngineName))
            raise SettingError("engine", f"must be one of {names}, got {self.engine!r}")
        if self.servers and not self.has_servers:
            raise SettingError("engine", "must be sglang or vllm where a server is given")
        if self.has_servers and not self.servers:
            raise SettingError("servers", f"are missing: with {self.engine} give their addresses")
        if self.has_servers and self.model is None:
            raise SettingError(
                "model",
                f"is missing: with {self.engine} it names the tokenizer of the server's model",
            )

    @property
    def has_servers(self) -> bool:
        """Whether servers generate, over HTTP."""
        return self.engine != "transformers"
