"""Rollout workers on a Ray cluster, which a runner uses as one engine and one agent."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trajpack.agent.blocking_work import to_end
from trajpack.agent.engines.serving import End, ServedEngine
from trajpack.agent.errors import EngineEndedError, EpisodeError, ServerUnavailableError, reason_of
from trajpack.agent.protocols import Generate, GenerationOutput, GenerationRequest, Prompt
from trajpack.agent.ray.worker import (
    MakeWorker,
    RolloutWorker,
    Weights,
    WorkerOptions,
    WorkerStatus,
)
from trajpack.agent.runner.runner import RolloutRunner
from trajpack.packing.buffer.trajectory_arrays import TrajectoryArrays
from trajpack.packing.optional import require
from trajpack.packing.text import one_line
from trajpack.packing.types import Trajectory

_logger = logging.getLogger(__name__)
_MAX_LOSSES = 4
"""Workers that are lost with an episode before it fails."""
_MAX_FAILURES = 6
"""Losses of a worker in a row, without a finished episode, before it is given up."""
_LEAVE_TIMEOUT_S = 5.0
_CONTROL_CALLS = 8
_NO_STATUS = WorkerStatus(0, "", -1)


class WorkerLostError(RuntimeError):
    """The process of a worker, its node or the way to it was lost, or its engine has ended."""


class RolloutWorkers(ServedEngine):
    """Workers that run episodes, each in a process of its own with an engine of its own.

    It is the engine and the agent of its `runner`, so that groups, filters, retries and staleness
    hold over the whole cluster. The call of an episode returns its trajectories, or raises once the
    worker was lost: only then the episode restarts on another one, so that it ends once. A lost
    worker is replaced; the new one loads the current weights before its first episode.

    Use it as an asynchronous context manager after Ray was initialised. Entering it waits for
    all workers, and logs a warning if the cluster is too small for them.

    Args:
        make_worker: Makes engine, agent and environment on each worker.
        num_workers: Number of workers.
        options: Options of the workers.

    Raises:
        ValueError: If ``num_workers`` is below 1.
        TimeoutError: From entering, if a worker did not start in time.
        WorkerLostError: From entering, if a worker died too often.
        Exception: From entering, an error of ``make_worker``, wrapped by Ray.
    """

    version = 0
    """Version of the weights published last."""
    is_remote = True
    """Tells a runner that no sign comes from an episode before its end."""

    def __init__(
        self, make_worker: MakeWorker, num_workers: int, *, options: WorkerOptions | None = None
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        require("anyio", "ray")
        super().__init__()
        self.num_workers, self.options = num_workers, options or WorkerOptions()
        self.num_lost = 0
        """Workers lost so far."""
        self.num_redone = 0
        """Restarts of episodes whose worker was lost."""
        self._make_worker = make_worker
        self._weights: Any = None
        self._publishing = asyncio.Lock()
        self._keepers: list[asyncio.Task[None]] = []
        self._serving: dict[_Worker, None] = {}
        self._has_entered = False
        self._changed = asyncio.Event()
        """Set, and replaced, whenever something changes that others wait for."""

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """Serving workers, with the last known version of their weights."""
        return tuple(worker.status for worker in self._serving)

    def runner(self, *, sampling: Any = None, **options: Any) -> RolloutRunner:
        """Return a `RolloutRunner` with these options, whose episodes run on these workers.

        ``concurrency`` is that of all workers unless given.
        """
        options = {"concurrency": self.num_workers * self.options.concurrency} | options
        return RolloutRunner(self, partial(self.run, sampling=sampling), None, **options)

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Raise a `RuntimeError`: engines and agents are on the workers."""
        raise RuntimeError("RolloutWorkers take no requests: use workers.runner(...)")

    async def publish(self, weights: Weights) -> None:
        """Put new weights, also before entering, into the object store; workers load them later.

        A worker that cannot load them is lost, and its successor starts with them.

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

        if self._keepers:
            raise RuntimeError("RolloutWorkers can be entered once")
        resources, options = ray.cluster_resources(), self.options
        for kind, each in (("CPU", options.num_cpus), ("GPU", options.num_gpus)):
            needed, there = self.num_workers * each, resources.get(kind, 0)
            if needed > there:
                text = f"the workers ask for {needed:g} {kind}s, the cluster has {there:g}"
                _logger.warning("waiting for a larger cluster: %s", one_line(text))
        self._begin_serving()
        for number in range(self.num_workers):
            keeper = asyncio.create_task(self._keep(number))
            keeper.add_done_callback(self._count_out)
            self._keepers.append(keeper)
        try:
            while len(self._serving) < self.num_workers:
                await self._changed.wait()
                for keeper in self._keepers:
                    if keeper.done():
                        keeper.result()
        except BaseException:
            await self.__aexit__()
            raise
        self._has_entered = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._end_serving(End("the workers were shut down", has_left=True))
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def run(
        self, prompt: Prompt, env: Any, generate: Generate, *, sampling: Any = None
    ) -> list[Trajectory]:
        """Run the episode ``prompt.id`` on a worker, and on another one if that is lost.

        Environments and engines are on the workers, so ``env`` and ``generate`` are not used.

        Raises:
            EpisodeError: As the worker reports it; a `ServerUnavailableError` if too many
                workers were lost with it, an `EngineEndedError` if none is left.
        """
        lost = ""
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
            self._serving.pop(worker, None)
            worker.wake.set()
            lost = reply.reason
        reason = f"{_MAX_LOSSES} workers were lost, the last: {lost}"
        raise ServerUnavailableError(prompt.id, reason)

    async def _place(self, qid: str) -> _Worker:
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
        """Keep worker ``number`` running: a new one takes the place of one that was lost.

        Ray's own restart would begin with the first weights.
        """
        import ray

        options, num_failures, lost = self.options, 0, ""
        actor_class = ray.remote(
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            max_concurrency=options.concurrency + _CONTROL_CALLS,
        )(RolloutWorker)
        while num_failures < _MAX_FAILURES:
            worker = _Worker(actor_class.remote(self._make_worker, number))
            try:
                await self._serve(worker)
            except Exception as error:
                if not (self._has_entered or isinstance(error, WorkerLostError)):
                    raise
                lost = reason_of(getattr(error, "cause", error))  # within Ray's wrapping
            finally:
                self._serving.pop(worker, None)
                self._tell()
                await to_end(asyncio.create_task(_end(worker)))
            self.num_lost += 1
            _logger.warning("a rollout worker was lost: %s", one_line(lost))
            num_failures = 1 if worker.has_finished else num_failures + 1
            await asyncio.sleep(0.05 * 2**num_failures)
        raise WorkerLostError(lost)

    async def _serve(self, worker: _Worker) -> None:
        """Start a worker, keep its weights current and ping it, until that raises."""
        options = self.options
        while True:
            worker.wake.clear()
            is_old = worker.status.version < self.version
            call = worker.actor.update.remote(self._weights if is_old else None)
            timeout_s = options.start_timeout_s if is_old else options.hang_timeout_s
            worker.status = await _answer_of(call, timeout_s)
            if worker.status.version >= self.version:
                if is_old:
                    self._serving[worker] = None
                    self._tell()
                with suppress(TimeoutError):
                    await asyncio.wait_for(worker.wake.wait(), options.hang_timeout_s / 10)

    def _count_out(self, keeper: asyncio.Task[None]) -> None:
        """Refuse episodes once all workers were given up."""
        if self._end is None and all(keeper.done() for keeper in self._keepers):
            reason = f"no rollout worker is left, the last was lost: {keeper.exception()}"
            self._end_serving(End(reason))
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(eq=False)
class _Worker:
    """One actor from its start to its end."""

    actor: Any
    status: WorkerStatus = _NO_STATUS
    """Its last answer."""
    num_running: int = 0
    has_finished: bool = False
    """Whether an episode has ended on it."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its keeper has to look after it."""


async def _answer_of(call: Any, timeout_s: float | None = None) -> Any:
    """Return the answer of an actor, or raise what it raised; cancelling this cancels the call.

    Raises:
        WorkerLostError: If process, node, memory or message were lost: Ray has a type for each.
        TimeoutError: If no answer comes in time.
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


async def _end(worker: _Worker) -> None:
    """Let a worker that has answered leave its context, if it can, and end its process."""
    import ray

    if worker.status.pid:
        with suppress(Exception):
            await _answer_of(worker.actor.leave.remote(), _LEAVE_TIMEOUT_S)
    ray.kill(worker.actor)
