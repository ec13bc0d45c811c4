"""How rollout workers and trainer ranks are run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

from trajpack.agent.protocols import Agent, Engine, Environment

MakeWorker: TypeAlias = Callable[
    [int], AbstractAsyncContextManager[tuple[Engine, Agent, Environment]]
]
"""Makes what one worker holds: called on the worker with its number, from 0, so that it must
survive pickling; an engine is entered by it, and left when the context ends. A worker that takes
a lost one's place has its number."""
LoadWeights: TypeAlias = Callable[[Any, dict[str, Any], int], Awaitable[None]]
"""Gives an engine new weights: ``(engine, state_dict, version)``."""


async def update_weights(engine: Any, state_dict: dict[str, Any], version: int) -> None:
    """Give weights to an engine that takes them as `TransformersEngine` does."""
    await engine.update_weights(state_dict, version)


@dataclass(frozen=True)
class WorkerOptions:
    """How rollout workers are run.

    Raises:
        ValueError: If a value is out of range.
    """

    concurrency: int = 16
    """Episodes in flight on one worker at most."""
    num_cpus: float = 1.0
    """Cores that Ray sets aside for a worker."""
    num_gpus: float = 0.0
    """GPUs, or parts of one."""
    num_threads: int = 1
    """Threads of torch in a worker; with more than there are cores, all wait for each other."""
    start_timeout_s: float = 300.0
    """Seconds until a worker that has not started, or not taken new weights, counts as lost."""
    heartbeat_s: float = 2.0
    """Seconds between two questions whether a worker is alive, and what it warns of."""
    hang_timeout_s: float = 60.0
    """Seconds without an answer until it counts as lost."""
    max_redos: int = 3
    """How often an episode begins again because its worker was lost; then it has failed."""
    max_restarts: int = 5
    """How often a worker is started again without finishing an episode in between; then it is
    given up."""
    drain: bool = False
    """Whether an engine is given new weights only once every request is answered, and no new one
    reaches it meanwhile: for engines that cannot take them between two tokens."""
    load_weights: LoadWeights = update_weights
    """How an engine is given new weights."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("max_redos", "max_restarts", "num_cpus", "num_gpus"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("start_timeout_s", "heartbeat_s", "hang_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
