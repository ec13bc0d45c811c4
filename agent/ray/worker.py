"""The actor of a rollout worker, its options, and the weights that it receives."""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy.typing as npt
import torch

from trajpack.agent import errors
from trajpack.agent.errors import EngineEndedError, EpisodeError, has_engine_ended, reason_of
from trajpack.agent.protocols import Agent, Engine, Environment, Prompt
from trajpack.agent.runner.episode import RunnerContext, attempt_episode, check_serving
from trajpack.packing.buffer.trajectory_arrays import TrajectoryArrays, as_array

MakeWorker: TypeAlias = Callable[
    [int], AbstractAsyncContextManager[tuple[Engine, Agent, Environment]]
]
"""Called in the process of a worker with its number, from 0; must survive pickling. The context
enters and leaves the engine. A worker that replaces a lost one has the same number."""
LoadWeights: TypeAlias = Callable[[Any, dict[str, Any], int], Awaitable[None]]
"""Loads weights into an engine: ``(engine, state_dict, version)``."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    """The weights of one policy version, put into the object store once for all workers.

    Attributes:
        version: Policy version.
        arrays: Torch dtype and values of each tensor, by name.
    """

    version: int
    arrays: Mapping[str, tuple[str, npt.NDArray[Any]]]

    @classmethod
    def of(cls, state_dict: Mapping[str, torch.Tensor], version: int) -> Weights:
        """Copy the tensors of a state dict to the host."""
        return cls(version, {name: as_array(value) for name, value in state_dict.items()})

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors, which may be views of read-only memory: copy, never write.

        Example:
            >>> Weights.of({"bias": torch.ones(2)}, version=3).state_dict()
            {'bias': tensor([1., 1.])}
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            return {
                name: torch.from_numpy(array).view(getattr(torch, dtype))
                for name, (dtype, array) in self.arrays.items()
            }


async def update_weights(engine: Any, state_dict: dict[str, Any], version: int) -> None:
    """Load weights by the engine's ``update_weights``, as `TransformersEngine` has it."""
    await engine.update_weights(state_dict, version)


@dataclass(frozen=True)
class WorkerOptions:
    """Options of rollout workers; a value out of range is a `ValueError`.

    Attributes:
        concurrency: Maximum number of running episodes on one worker.
        num_cpus: Cores that Ray reserves for a worker.
        num_gpus: GPUs, or a fraction of one, that Ray reserves for a worker.
        num_threads: Torch threads of a worker; more threads than cores slow all workers down.
        start_timeout_s: Seconds to start or to load new weights, after which a worker counts as
            lost.
        heartbeat_s: Seconds between two pings of a worker.
        hang_timeout_s: Seconds without a reply to a ping, after which a worker counts as lost.
        max_redos: Times that an episode restarts because its worker was lost, before it fails.
        max_restarts: Consecutive restarts of a worker without a finished episode, before it is
            given up.
        drain: Whether new weights wait until all requests are answered, with new requests held
            back: for engines that cannot load weights between two tokens.
        load_weights: Loads new weights into the engine.
    """

    concurrency: int = 16
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    num_threads: int = 1
    start_timeout_s: float = 600.0
    heartbeat_s: float = 2.0
    hang_timeout_s: float = 60.0
    max_redos: int = 3
    max_restarts: int = 5
    drain: bool = False
    load_weights: LoadWeights = update_weights

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


@dataclass(frozen=True)
class WorkerStatus:
    """Process and weights of a serving worker.

    Attributes:
        node: Ray's id of the node.
        version: Policy version of the worker's weights.
    """

    pid: int
    node: str
    version: int


class RolloutWorker:
    """The actor: an engine, an agent and an environment on one event loop."""

    def __init__(self, make_worker: MakeWorker, number: int, options: WorkerOptions) -> None:
        torch.set_num_threads(options.num_threads)
        self._make_worker = make_worker
        self._number = number
        self._options = options
        self._context: RunnerContext | None = None
        self._life: asyncio.Task[None] | None = None
        self._stopped: asyncio.Event | None = None

    async def start(self, weights: Weights | None) -> WorkerStatus:
        """Enter the worker's context and load the current weights."""
        import ray

        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopped = asyncio.Event()
        self._life = asyncio.create_task(self._live(started))
        await asyncio.wait({started, self._life}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            await self._life  # raises the error of `make_worker`
        version = await self.set_weights(weights)
        return WorkerStatus(os.getpid(), ray.get_runtime_context().get_node_id(), version)

    async def _live(self, started: asyncio.Future[None]) -> None:
        """Enter and leave the context in one task, as cancel scopes require."""
        assert self._stopped is not None
        async with self._make_worker(self._number) as (engine, agent, environment):
            check_serving(engine)
            self._context = RunnerContext(engine, agent, environment)
            started.set_result(None)
            await self._stopped.wait()

    async def set_weights(self, weights: Weights | None) -> int:
        """Load weights if they are newer than the engine's; return the engine's version."""
        context = self._required()
        if weights is None or weights.version <= context.engine.version:
            return context.engine.version
        async with AsyncExitStack() as stack:
            if self._options.drain:
                await stack.enter_async_context(context.gate.paused(drain=True))
            # time limits stand still while an engine loads weights
            stack.enter_context(context.gate.standstill())
            state_dict = weights.state_dict()
            await self._options.load_weights(context.engine, state_dict, weights.version)
        version: int = context.engine.version
        if version != weights.version:
            raise RuntimeError(f"the engine has version {version} after loading {weights.version}")
        return version

    async def ping(self) -> int:
        """Return the policy version; a reply proves that the event loop runs."""
        version: int = self._required().engine.version
        return version

    async def roll_out(self, prompt: Prompt) -> TrajectoryArrays | EpisodeError:
        """Run the episode ``prompt.id`` and return its trajectories, or its error."""
        context = self._required()
        try:
            return TrajectoryArrays.of(await attempt_episode(context, prompt))
        except Exception as error:  # noqa: BLE001 - of any kind: it belongs to the episode
            return portable(error, prompt.id)

    async def stop(self) -> None:
        """Leave the worker's context."""
        if self._life is not None and self._stopped is not None:
            self._stopped.set()
            await asyncio.wait({self._life})

    def _required(self) -> RunnerContext:
        if self._context is None:
            raise RuntimeError("the worker has not been started")
        return self._context


def portable(error: Exception, qid: str) -> EpisodeError:
    """Return an error of the nearest class of `agent.errors`, which any process can unpickle.

    Example:
        >>> portable(KeyError("answer"), "q0@1")
        EpisodeError("episode 'q0@1': KeyError: 'answer'")
    """
    if has_engine_ended(error):
        return EngineEndedError(qid, getattr(error, "reason", str(error)))
    if not isinstance(error, EpisodeError):
        return EpisodeError(qid, reason_of(error))
    kinds: list[Any] = [kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__]
    known: EpisodeError = kinds[0](qid, error.reason)
    return known
