"""What runs in the process of a rollout worker: an engine, an agent and an environment."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from trajpack.agent import errors
from trajpack.agent.errors import EngineEndedError, EpisodeError, has_engine_ended, reason_of
from trajpack.agent.protocols import Engine, Prompt
from trajpack.agent.ray.payload import TrajectoryArrays
from trajpack.agent.ray.rollouts.options import MakeWorker, WorkerOptions
from trajpack.agent.ray.weights import Weights
from trajpack.agent.runner.attempt import attempt_episode, check_serving
from trajpack.agent.runner.bridge import RunnerContext
from trajpack.agent.runner.gates import GenerationGate
from trajpack.agent.runner.observers import Observers
from trajpack.agent.runner.watchdog import Patience, Watchdog
from trajpack.packing.text import one_line

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeReply:
    """What a worker sends back for one episode."""

    arrays: TrajectoryArrays | None = None
    """Its trajectories; None if it failed."""
    error: EpisodeError | None = None
    """Why it failed."""


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker says of itself when it has started."""

    pid: int
    """Of its process."""
    node: str
    """Ray's name of the machine that it runs on."""
    version: int
    """Of its weights."""


@dataclass(frozen=True)
class WorkerPulse:
    """What a worker says when it is asked whether it is alive."""

    version: int
    """Of its weights."""
    warnings: tuple[str, ...]
    """Of its watchdog, since it was asked before."""


class RolloutWorker:
    """The actor. Its methods run on one event loop, many at once.

    Args:
        make_worker: Makes engine, agent and environment.
        number: Of the worker, from 0.
        options: As the coordinator has them.
    """

    def __init__(self, make_worker: MakeWorker, number: int, options: WorkerOptions) -> None:
        torch.set_num_threads(options.num_threads)
        self._make_worker = make_worker
        self._number = number
        self._options = options
        self._context: RunnerContext | None = None
        self._life: asyncio.Task[None] | None = None
        self._stopped: asyncio.Event | None = None
        self._warnings: list[str] = []

    async def start(self, weights: Weights | None) -> WorkerStatus:
        """Make the parts, and load the current weights before anything is served."""
        import ray

        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopped = asyncio.Event()
        self._life = asyncio.create_task(self._live(started))
        await asyncio.wait({started, self._life}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            await self._life  # raises what making the parts raised
        version = await self.set_weights(weights)
        return WorkerStatus(os.getpid(), ray.get_runtime_context().get_node_id(), version)

    async def _live(self, started: asyncio.Future[None]) -> None:
        """Enter and leave the parts in one task: cancel scopes demand it."""
        assert self._stopped is not None
        async with self._make_worker(self._number) as (engine, agent, environment):
            check_serving(engine)
            gate = GenerationGate()
            watchdog = Watchdog(engine, environment, agent, gate=gate, warn=self._warn)
            self._context = RunnerContext(engine, agent, environment, Observers(), gate, watchdog)
            started.set_result(None)
            await self._stopped.wait()

    async def set_weights(self, weights: Weights | None) -> int:
        """Load weights if they are newer than the engine's; return the version it has then."""
        context = self._required()
        if weights is not None and weights.version > context.engine.version:
            if self._options.drain:
                context.gate.close()
                await context.gate.wait_drained()
            try:
                with context.gate.standstill():  # an engine may not reply while it loads them
                    await self._load(context.engine, weights)
            finally:
                if self._options.drain:
                    context.gate.open()
        return context.engine.version

    async def _load(self, engine: Engine, weights: Weights) -> None:
        await self._options.load_weights(engine, weights.state_dict(), weights.version)
        if engine.version != weights.version:
            raise RuntimeError(
                f"the engine has version {engine.version} after loading {weights.version}"
            )

    async def ping(self) -> WorkerPulse:
        """Return new warnings; that the call returns shows that the event loop turns."""
        version = self._required().engine.version
        warnings, self._warnings = tuple(self._warnings), []
        return WorkerPulse(version, warnings)

    def _warn(self, text: str) -> None:
        """Log a warning here, and keep it for the coordinator's next `ping`."""
        _logger.warning("%s", one_line(text, 2000))
        self._warnings.append(text)

    async def roll_out(self, prompt: Prompt, patience: Patience | None = None) -> EpisodeReply:
        """Run the episode ``prompt.id``; what goes wrong in it is in the reply.

        Args:
            prompt: Of the episode.
            patience: Of the coordinator's run; None keeps the present one.
        """
        context = self._required()
        if patience is not None:
            context.watchdog.adopt(patience)
        group = prompt.id.rpartition("@")[0] or prompt.id
        try:
            return EpisodeReply(TrajectoryArrays.of(await attempt_episode(context, prompt, group)))
        except Exception as error:  # noqa: BLE001 - of any kind: it belongs to the episode
            return EpisodeReply(error=portable(error, prompt.id))

    async def stop(self) -> None:
        """Leave engine and environment."""
        if self._life is not None and self._stopped is not None:
            self._stopped.set()
            await asyncio.wait({self._life})

    def _required(self) -> RunnerContext:
        if self._context is None:
            raise RuntimeError("the worker has not been started")
        return self._context


def portable(error: Exception, qid: str) -> EpisodeError:
    """Return an error that any process can unpickle, of the nearest kind that this library has.

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
