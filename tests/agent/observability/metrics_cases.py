"""Metrics with a clock of their own, and what they are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trajpack.agent.observability.metrics import RolloutMetrics
from trajpack.agent.protocols import GenerationOutput, Prompt
from trajpack.agent.runner.runner import EpisodeResult
from trajpack.packing.types import Trajectory, Turn


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """Metrics, the clock they read, and short ways to ask for a value."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.metrics = RolloutMetrics(clock=self.clock)

    def __call__(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(f"trajpack_{name}", labels)
        assert value is not None, (name, labels)
        return value

    def at(self, now: float, hook: Callable[..., None], *args: Any, **options: Any) -> None:
        self.clock.now = 100 + now
        hook(*args, **options)


def reply(num_tokens: int = 2, *, no_eos: bool = False) -> GenerationOutput:
    ids = list(range(num_tokens))
    return GenerationOutput("q@0", [1, 2, 3], ids, [-1.0] * num_tokens, no_eos, 4, 4)


def result(*turns: Turn, qid: str = "q") -> EpisodeResult:
    return EpisodeResult(Prompt(qid, [1]), (Trajectory(f"{qid}@0", turns),))
