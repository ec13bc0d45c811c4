"""Settings of a rollout, which are the options of ``trajpack rollout``, and its places."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from trajpack.agent.errors import SetupError

EngineName: TypeAlias = Literal["transformers", "sglang", "vllm"]
LayoutName: TypeAlias = Literal["merged", "turns", "tree"]
SETTINGS_FILE = "rollout.json"  # in the folder of a rollout's log


@dataclass(frozen=True)
class RolloutSettings:
    """Settings of a rollout; ``trajpack rollout --help`` says what each is, and checks its range.

    A `SetupError` says that they do not fit together.
    """

    dataset: Path | None = None
    model: str | Path | None = None
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
        if not math.isfinite(self.turn_discount):
            raise SetupError(f"--turn-discount must be finite, got {self.turn_discount}")
        has_servers = self.engine != "transformers"
        if self.servers and not has_servers:
            raise SetupError("--engine must be sglang or vllm where a server is given")
        if has_servers and not self.servers:
            raise SetupError(f"--server is missing: with {self.engine} give each address")
        if has_servers and self.model is None:
            raise SetupError(f"--model is missing: with {self.engine} it names the tokenizer")


def check_places(batch_file: Path, answers: Path | None, *, replace: bool) -> None:
    """Raise `SetupError` if more is lost than an earlier batch, if it may be, and its tokenizer."""
    if batch_file.suffix != ".safetensors" or batch_file.is_dir():
        raise SetupError(f"--out must be a .safetensors file, got {batch_file}")
    if batch_file.exists() and not replace:
        raise SetupError(f"{batch_file} exists; --force replaces it")
    folder = batch_file.with_suffix(".tokenizer")
    for place in (batch_file, folder):
        if answers is not None and answers.resolve().is_relative_to(place.resolve()):
            raise SetupError(f"--answers must not be {place} or in it, got {answers}")
    is_tokenizer = (folder / "tokenizer_config.json").is_file() and not folder.is_symlink()
    if os.path.lexists(folder) and not is_tokenizer:
        raise SetupError(f"{folder} is not the tokenizer of a batch and will not be replaced")
