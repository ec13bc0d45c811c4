"""Rollout workers on a Ray cluster, which a runner uses as one engine and one agent."""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy.typing as npt
import torch

from trajpack.agent import errors
from trajpack.agent.blocking_work import to_end
from trajpack.agent.engines.serving import End, ServedEngine
from trajpack.agent.errors import (
    EngineEndedError,
    EpisodeError,
    ServerUnavailableError,
    has_engine_ended,
    reason_of,
)
from trajpack.agent.protocols import Agent, Engine, Environment, GenerationOutput, Prompt
from trajpack.agent.runner.episode import attempt_episode, check_serving
from trajpack.agent.runner.runner import RolloutRunner
from trajpack.packing.buffer.trajectory_arrays import TrajectoryArrays, as_array
from trajpack.packing.optional import require
from trajpack.packing.text import one_line
from trajpack.packing.types import Trajectory

_logger = logging.getLogger(__name__)
_MAX_LOSSES = 4
"""Workers that are lost with an episode before it fails."""
_MAX_FAILURES = 6
"""Losses of a worker in a row, without a finished episode, before it is given up."""
_LEAVE_TIMEOUT_S = 5.0

MakeWorker: TypeAlias = Callable[
    [int], AbstractAsyncContextManager[tuple[Engine, Agent, Environment]]
]
"""Called in a worker's process with its number, from 0, which a replacement keeps; is pickled."""


@dataclass(frozen=True)
class Weights:
    """The weights of one policy version, put into the object store once for all workers."""

    version: int
    arrays: Mapping[str, tuple[str, npt.NDArray[Any]]]  # torch dtype and values of each tensor

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
    """Options of each rollout worker.

    Attributes:
        concurrency: Episodes that run on it at most.
        num_cpus: Cores that Ray reserves for it; torch has as many threads there.
        num_gpus: GPUs, or a fraction of one, that Ray reserves for it.
        start_timeout_s: Seconds to start or to load weights, after which it counts as lost.
        hang_timeout_s: The same for the answer to a ping; pings are a tenth of that apart.
    """

    concurrency: int = 16
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    start_timeout_s: float = 600.0
    hang_timeout_s: float = 30.0


class RolloutWorker:
    """The actor: an engine, an agent and an environment on one event loop."""

    def __init__(self, make_worker: MakeWorker, number: int) -> None:
        self._make_worker, self._number = make_worker, number
        self._life: asyncio.Task[None] | None = None

    async def update(self, weights: Weights | None) -> tuple[int, int]:
        """Enter the context, load newer weights; return process id and version of the weights."""
        if self._life is None:
            self._entered = asyncio.Event()
            self._life = asyncio.create_task(self._live())
            self._life.add_done_callback(lambda _: self._entered.set())
        await self._entered.wait()
        if self._life.done():
            await self._life
        engine: Any = self._parts[0]
        if weights is not None and weights.version > engine.version:
            await engine.update_weights(weights.state_dict(), weights.version)
            if engine.version != weights.version:
                raise RuntimeError(f"version {engine.version} after loading {weights.version}")
        return os.getpid(), engine.version

    async def _live(self) -> None:
        """Enter and leave the context in one task, as cancel scopes require."""
        async with self._make_worker(self._number) as self._parts:
            check_serving(self._parts[0])
            self._entered.set()
            await asyncio.Event().wait()

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
                return EngineEndedError(prompt.id, error.reason)
            kinds = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
            return next(kinds)(prompt.id, error.reason)  # type: ignore[no-any-return]


@dataclass(eq=False)
class WorkerProcess:
    """One actor from its start to its end, with the last known version of its weights."""

    actor: Any
    pid: int = 0
    version: int = -1
    num_running: int = 0
    has_finished: bool = False
    """Whether an episode has ended on it."""
    lost: str = ""
    """Why an episode found it lost."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its keeper has to look after it."""


class WorkerLostError(RuntimeError):
    """The process of a worker, its node or the way to it was lost, or its engine has ended."""


class RolloutWorkers(ServedEngine):
    """Workers that run episodes, each in a process of its own with an engine of its own.

    It is the engine and the agent of its `runner`, so that groups, filters, retries and staleness
    hold over the whole cluster. An episode restarts on another worker only once its own was lost. A
    lost worker is replaced; the new one loads the current weights before its first episode.

    Use it as an asynchronous context manager after Ray was initialised. Entering it waits for
    all workers, and logs a warning if the cluster is too small for them.

    Args:
        make_worker: Makes engine, agent and environment on each worker.
        num_workers: Number of workers.
        options: Options of each worker.

    Raises:
        ValueError: If ``num_workers`` is below 1.
        Exception: From entering, an error of ``make_worker``, wrapped by Ray; a `TimeoutError` if a
            worker did not start in time, a `WorkerLostError` if one died too often.
    """

    version = 0  # of the weights published last
    is_remote = True  # tells a runner that no sign comes from an episode before its end

    def __init__(
        self, make_worker: MakeWorker, num_workers: int, *, options: WorkerOptions | None = None
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        require("anyio", "ray")
        super().__init__()
        self.num_workers, self.options = num_workers, options or WorkerOptions()
        self.num_lost = self.num_redone = 0
        """Workers lost so far, and restarts of episodes whose worker was lost."""
        self._make_worker = make_worker
        self._weights: Any = None
        self._publishing = asyncio.Lock()
        self._keepers: list[asyncio.Task[None]] = []
        self._serving: dict[WorkerProcess, None] = {}
        self._changed = asyncio.Event()
        """Set, and replaced, whenever something changes that others wait for."""

    @property
    def workers(self) -> tuple[WorkerProcess, ...]:
        """Serving workers, with ``pid`` and the last known ``version`` of their weights."""
        return tuple(self._serving)

    def runner(self, *, sampling: Any = None, **options: Any) -> RolloutRunner:
        """Return a `RolloutRunner` with these options; its concurrency is that of all workers."""
        options = {"concurrency": self.num_workers * self.options.concurrency} | options
        return RolloutRunner(self, partial(self.run, sampling=sampling), None, **options)

    async def generate(self, request: Any) -> GenerationOutput:
        """Raise a `RuntimeError`: engines and agents are on the workers."""
        raise RuntimeError("RolloutWorkers take no requests: use workers.runner(...)")

    async def publish(self, weights: Weights) -> None:
        """Put new weights, also before entering, into the object store; workers load them later.

        Raises:
            ValueError: If the version is not higher than the last, or than 0.
        """
        import ray

        async with self._publishing:
            if weights.version <= self.version:
                raise ValueError(f"version must exceed {self.version}, got {weights.version}")
            self._weights = await asyncio.to_thread(ray.put, weights)
            self.version = weights.version
        for worker in self._serving:
            worker.wake.set()

    async def __aenter__(self) -> RolloutWorkers:
        import ray

        resources, options = ray.cluster_resources(), self.options
        for kind, each in (("CPU", options.num_cpus), ("GPU", options.num_gpus)):
            needed, there = self.num_workers * each, resources.get(kind, 0)
            if needed > there:
                text = f"the workers ask for {needed:g} {kind}s, the cluster has {there:g}"
                _logger.warning("waiting for a larger cluster: %s", one_line(text))
        self._begin_serving()
        self._keepers = [asyncio.create_task(self._keep(k)) for k in range(self.num_workers)]
        for keeper in self._keepers:
            keeper.add_done_callback(self._count_out)
        try:
            while len(self._serving) < self.num_workers:
                await self._changed.wait()
                for keeper in self._keepers:
                    if keeper.done():
                        keeper.result()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._end_serving(End("the workers were shut down", has_left=True))
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def run(
        self, prompt: Prompt, env: Any, generate: Any, *, sampling: Any = None
    ) -> list[Trajectory]:
        """Run the episode ``prompt.id`` on a worker, and on another one if that is lost.

        Raises:
            EpisodeError: As the worker reports it; a `ServerUnavailableError` if too many
                workers were lost with it, an `EngineEndedError` if none is left.
        """
        for attempt in range(_MAX_LOSSES):
            worker = await self._place(prompt.id)
            self.num_redone += attempt > 0
            reply: TrajectoryArrays | EpisodeError
            try:
                reply = await _answer_of(worker.actor.roll_out.remote(prompt, sampling))
            except WorkerLostError as error:
                reply = EngineEndedError(prompt.id, str(error))
            finally:
                worker.num_running -= 1
                self._tell()
            if not isinstance(reply, EngineEndedError):
                worker.has_finished = True
                if isinstance(reply, EpisodeError):
                    raise reply
                # A view would keep the object store's memory as long as the trajectory.
                return reply.copied().trajectories()
            worker.lost = reply.reason
            self._serving.pop(worker, None)
            worker.wake.set()
        reason = f"{_MAX_LOSSES} workers were lost, the last: {worker.lost}"
        raise ServerUnavailableError(prompt.id, reason)

    async def _place(self, qid: str) -> WorkerProcess:
        """Wait for a worker that can take an episode; return the one with the fewest."""
        while True:
            if self._end is not None:
                raise self._end.as_error(qid)
            worker = min(self._serving, key=lambda worker: worker.num_running, default=None)
            if worker is not None and worker.num_running < self.options.concurrency:
                worker.num_running += 1
                return worker
            await self._changed.wait()

    async def _keep(self, number: int) -> None:
        """Replace worker ``number`` when it is lost; Ray's own restart would load old weights."""
        import ray

        options, num_failures, lost = self.options, 0, ""
        actor_class = ray.remote(
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            max_concurrency=options.concurrency + 8,  # pings, too
        )(RolloutWorker)
        while num_failures < _MAX_FAILURES:
            worker = WorkerProcess(actor_class.remote(self._make_worker, number))
            try:
                await self._serve(worker)
            except Exception as error:
                has_lived = num_failures or worker.pid
                if not has_lived and not isinstance(error, WorkerLostError):
                    raise
                lost = reason_of(getattr(error, "cause", error))  # within Ray's wrapping
            finally:
                self._serving.pop(worker, None)
                await to_end(asyncio.create_task(_end(worker)))
            self.num_lost += 1
            _logger.warning("a rollout worker was lost: %s", one_line(lost))
            num_failures = 1 if worker.has_finished else num_failures + 1
            await asyncio.sleep(0.05 * 2**num_failures)
        raise WorkerLostError(lost)

    async def _serve(self, worker: WorkerProcess) -> None:
        """Start a worker, keep its weights current and ping it, until that raises."""
        options = self.options
        while not worker.lost:
            worker.wake.clear()
            is_old = worker.version < self.version
            call = worker.actor.update.remote(self._weights if is_old else None)
            timeout_s = options.start_timeout_s if is_old else options.hang_timeout_s
            worker.pid, worker.version = await _answer_of(call, timeout_s)
            if worker.version >= self.version:
                if is_old:
                    self._serving[worker] = None
                    self._tell()
                with suppress(TimeoutError):
                    await asyncio.wait_for(worker.wake.wait(), options.hang_timeout_s / 10)
        raise WorkerLostError(worker.lost)

    def _count_out(self, keeper: asyncio.Task[None]) -> None:
        """Refuse episodes once all workers were given up."""
        if self._end is None and all(keeper.done() for keeper in self._keepers):
            reason = f"no rollout worker is left, the last was lost: {keeper.exception()}"
            self._end_serving(End(reason))
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _answer_of(call: Any, timeout_s: float | None = None) -> Any:
    """Return the answer of an actor, or raise what it raised; cancelling this cancels the call.

    Of process, node, memory or message that were lost, Ray's own errors become `WorkerLostError`.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except asyncio.CancelledError:
        ray.cancel(call)
        raise
    except RayTaskError:
        raise
    except RayError as error:
        raise WorkerLostError(reason_of(error)) from error
    except TimeoutError as error:
        raise TimeoutError(f"a rollout worker gave no answer within {timeout_s} s") from error


async def _end(worker: WorkerProcess) -> None:
    """Let a worker that has answered leave its context, if it can, and end its process."""
    import ray

    if worker.pid:
        with suppress(Exception):
            await _answer_of(worker.actor.leave.remote(), _LEAVE_TIMEOUT_S)
    ray.kill(worker.actor)
