"""The actor of a rollout worker, its options, and the weights that it receives."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy.typing as npt
import torch

from trajpack.agent import errors
from trajpack.agent.errors import EngineEndedError, EpisodeError, has_engine_ended
from trajpack.agent.protocols import Agent, Engine, Environment, Prompt
from trajpack.agent.runner.episode import attempt_episode, check_serving
from trajpack.agent.runner.runner import RolloutRunner
from trajpack.packing.buffer.trajectory_arrays import TrajectoryArrays, as_array

MakeWorker: TypeAlias = Callable[
    [int], AbstractAsyncContextManager[tuple[Engine, Agent, Environment]]
]
"""Called in the process of a worker with its number, from 0; must survive pickling. The context
enters and leaves the engine. A worker that replaces a lost one has the same number."""


@dataclass(frozen=True)
class Weights:
    """The weights of one policy version, put into the object store once for all workers."""

    version: int
    arrays: Mapping[str, tuple[str, npt.NDArray[Any]]]
    """Torch dtype and values of each tensor, by name."""

    @classmethod
    def of(cls, state_dict: Mapping[str, torch.Tensor], version: int) -> Weights:
        """Copy the tensors of a state dict to the host."""
        return cls(version, {name: as_array(value) for name, value in state_dict.items()})

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors, which may be views of read-only memory: copy, never write."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return {
                name: torch.from_numpy(array).view(getattr(torch, dtype))
                for name, (dtype, array) in self.arrays.items()
            }


@dataclass(frozen=True)
class WorkerOptions:
    """Options of rollout workers.

    Attributes:
        concurrency: Maximum number of running episodes on one worker.
        num_cpus: Cores that Ray reserves for a worker; torch has as many threads there.
        num_gpus: GPUs, or a fraction of one, that Ray reserves for a worker.
        start_timeout_s: Seconds to start or to load weights, after which a worker counts as lost.
        hang_timeout_s: The same for the answer to a ping; pings are a tenth of that apart.
    """

    concurrency: int = 16
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    start_timeout_s: float = 600.0
    hang_timeout_s: float = 30.0


@dataclass(frozen=True)
class WorkerStatus:
    """Process, node (Ray's id) and policy version of a serving worker."""

    pid: int
    node: str
    version: int


class RolloutWorker:
    """The actor: an engine, an agent and an environment on one event loop."""

    def __init__(self, make_worker: MakeWorker, number: int) -> None:
        self._make_worker = make_worker
        self._number = number
        self._life: asyncio.Task[None] | None = None
        self._has_engine_ended = asyncio.Event()

    async def enter(self) -> None:
        """Enter the context, unless it was entered; raise if it has ended."""
        if self._life is None:
            self._entered = asyncio.get_running_loop().create_future()
            self._life = asyncio.create_task(self._live())
        await asyncio.wait({self._life, self._entered}, return_when=asyncio.FIRST_COMPLETED)
        if self._life.done():
            await self._life
            raise RuntimeError("its engine has ended")

    async def update(self, weights: Weights | None) -> WorkerStatus:
        """Enter the context, and load weights if they are newer than the engine's."""
        import ray

        await self.enter()
        engine: Any = self._parts[0]
        if weights is not None and weights.version > engine.version:
            await engine.update_weights(weights.state_dict(), weights.version)
            if engine.version != weights.version:
                raise RuntimeError(f"version {engine.version} after loading {weights.version}")
        return WorkerStatus(os.getpid(), ray.get_runtime_context().get_node_id(), engine.version)

    async def _live(self) -> None:
        """Enter and leave the context in one task, as cancel scopes require."""
        async with self._make_worker(self._number) as self._parts:
            check_serving(self._parts[0])
            self._entered.set_result(None)
            await self._has_engine_ended.wait()

    async def leave(self) -> None:
        """Leave the context."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait({self._life})

    async def roll_out(self, prompt: Prompt, sampling: Any) -> TrajectoryArrays | EpisodeError:
        """Run an episode; return its trajectories, or an error that any process can unpickle."""
        try:
            runner = RolloutRunner(*self._parts, sampling=sampling)
            return TrajectoryArrays.of(await attempt_episode(runner, prompt))
        except EpisodeError as error:
            if has_engine_ended(error):
                self._has_engine_ended.set()
                return EngineEndedError(prompt.id, error.reason)
            kinds = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
            return next(kinds)(prompt.id, error.reason)  # type: ignore[no-any-return]
