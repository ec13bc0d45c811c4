"""Rollout workers on a Ray cluster, which a runner uses as one engine and one agent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from trajpack.agent.blocking_work import run_to_end, to_end
from trajpack.agent.engines.serving import End, check_entered
from trajpack.agent.errors import EngineEndedError, EpisodeError, ServerUnavailableError, reason_of
from trajpack.agent.protocols import (
    Environment,
    Generate,
    GenerationOutput,
    GenerationRequest,
    Prompt,
)
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
_LONGEST_PAUSE_S = 5.0
_STOP_TIMEOUT_S = 10.0
_EARLY_STOP_TIMEOUT_S = 2.0
"""Seconds for a worker that has not started: Ray may not have placed its process yet."""
_KILL_TIMEOUT_S = 3.0
_CONTROL_CALLS = 8


class WorkerLostError(RuntimeError):
    """A worker died, hung, or failed so that only a new one can replace it."""


class RolloutWorkers:
    """Workers that run episodes, each in a process of its own with an engine of its own.

    It is both the engine and the agent of a `RolloutRunner`: groups, filters, retries and staleness
    hold over the whole cluster. An episode goes to the worker with the fewest, and its
    trajectories return as arrays through the object store. An episode whose worker dies or hangs
    restarts on another; replies of a lost worker are ignored, so that each episode ends once.

    A lost worker is replaced; the new one loads the current weights before its first episode.
    Use it as an asynchronous context manager after Ray was initialised. Entering it waits for
    all workers, and logs a warning at once if the cluster is too small for them.

    Args:
        make_worker: Makes engine, agent and environment on each worker.
        num_workers: Number of workers.
        options: Options of the workers.

    Raises:
        ValueError: If ``num_workers`` is below 1.
        WorkerLostError: From entering, if a worker did not start in time, or died too often.
        Exception: From entering, an error of ``make_worker``, wrapped by Ray.
    """

    def __init__(
        self,
        make_worker: MakeWorker,
        num_workers: int,
        *,
        options: WorkerOptions | None = None,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        require("anyio", "ray")
        self.options = options or WorkerOptions()
        self.num_workers = num_workers
        self.num_lost = 0
        """Workers lost so far."""
        self.num_redone = 0
        """Restarts of episodes whose worker was lost."""
        self.num_turns = 0
        """Turns received."""
        self.num_tokens = 0
        """Sampled tokens received."""
        self._make_worker = make_worker
        self._weights: Any = None
        self._version = 0
        self._publishing = asyncio.Lock()
        self._published: asyncio.Future[None] | None = None
        self._loaded = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._num_kept = num_workers
        self._last_lost = ""
        self._serving: list[_Worker] = []
        self._slots = asyncio.Semaphore(0)
        """At least one for each free place on a serving worker."""
        self._end: End | None = None

    @property
    def concurrency(self) -> int:
        """Maximum number of running episodes on all workers."""
        return self.num_workers * self.options.concurrency

    @property
    def version(self) -> int:
        """Version of the weights published last."""
        return self._version

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """Serving workers, with the last known version of their weights."""
        return tuple(
            WorkerStatus(worker.status.pid, worker.status.node, worker.version)
            for worker in self._serving
            if worker.status is not None
        )

    def check_serving(self) -> None:
        """Raise a `RuntimeError` unless the workers are entered, in this event loop."""
        left = self._end if self._end is not None and self._end.has_left else None
        check_entered(self, left, self._keepers[0].get_loop() if self._keepers else None)

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Raise a `RuntimeError`: agents and engines run on the workers."""
        raise RuntimeError("RolloutWorkers take no requests: use workers.runner(...)")

    async def publish(self, weights: Weights) -> None:
        """Put new weights into the object store and return; the workers load them by themselves.

        A worker that cannot load them is lost, and its successor starts with them. Weights
        published before entering are loaded at the start of each worker; without any, a worker
        has those of ``make_worker``, as version 0.

        Raises:
            ValueError: If the version is not higher than the last.
        """
        import ray

        async with self._publishing:
            if weights.version <= self._version:
                raise ValueError(f"version must exceed {self._version}, got {weights.version}")
            self._weights = await run_to_end(lambda: ray.put(weights))
            self._version = weights.version
        if self._published is not None:
            published = self._published
            self._published = asyncio.get_running_loop().create_future()
            published.set_result(None)

    async def everywhere(self) -> None:
        """Wait until all serving workers have the weights published last."""
        while any(worker.version < self._version for worker in self._serving):
            self._loaded.clear()
            await self._loaded.wait()

    async def __aenter__(self) -> RolloutWorkers:
        if self._keepers:
            raise RuntimeError("RolloutWorkers can be entered once")
        fits, resources = await run_to_end(self._resources)
        if not fits:
            _logger.warning("waiting for a larger cluster: %s", one_line(resources))
        loop = asyncio.get_running_loop()
        self._published = loop.create_future()
        started = [loop.create_future() for _ in range(self.num_workers)]
        self._keepers = [asyncio.create_task(self._keep(n, told)) for n, told in enumerate(started)]
        for keeper in self._keepers:
            keeper.add_done_callback(self._count_out)
        try:
            await asyncio.gather(*started)
        except BaseException:
            await self.__aexit__()
            for future in started:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # only the first one is raised
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._end is None or not self._end.has_left:
            self._finish(End("the workers were shut down", has_left=True))
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def runner(self, **options: Any) -> RolloutRunner:
        """Return a `RolloutRunner` with these options, whose episodes run on these workers.

        ``concurrency`` is that of all workers unless given.
        """
        options = {"concurrency": self.concurrency} | options
        return RolloutRunner(self, self, _RemoteEnvironment(), **options)

    is_remote = True
    """Tells a runner that no sign comes from an episode before its end."""

    async def run(self, prompt: Prompt, env: Environment, generate: Generate) -> list[Trajectory]:
        """Run the episode ``prompt.id`` on a worker, and on another one if that is lost.

        Args:
            prompt: Prompt of the episode.
            env: Not used: the environment is on the workers, as the engine is.
            generate: Not used.

        Raises:
            EpisodeError: As the worker reports it; a `ServerUnavailableError` if too many
                workers were lost with it, an `EngineEndedError` if none is left.
        """
        lost = ""
        for attempt in range(1 + self.options.max_redos):
            worker = await self._take_slot(prompt.id)
            self.num_redone += attempt > 0
            try:
                reply: TrajectoryArrays | EpisodeError = await worker.call("roll_out", prompt)
            except WorkerLostError as error:
                lost = str(error)
                continue
            except Exception as error:  # raised before the agent began
                raise EpisodeError(prompt.id, describe_exception(error)) from error
            finally:
                worker.num_running -= 1
                self._slots.release()
            if isinstance(reply, EngineEndedError):
                lost = reply.reason
                worker.lose(f"its engine has ended: {lost}")
                continue
            worker.num_finished += 1
            if isinstance(reply, EpisodeError):
                raise reply
            self.num_turns += len(reply.turns)
            self.num_tokens += len(reply.logprobs)
            # A view would keep the object store's memory as long as the trajectory.
            return reply.copied().trajectories()
        num_lost = self.options.max_redos + 1
        raise ServerUnavailableError(prompt.id, f"{num_lost} workers were lost, the last: {lost}")

    async def _take_slot(self, qid: str) -> _Worker:
        """Wait, in order of arrival, for a place on the worker with the most free ones.

        Slots of lost workers have no place; they are dropped here. If no worker is left, an
        `EngineEndedError` is raised.
        """
        while True:
            if self._end is None:
                await self._slots.acquire()
            if self._end is not None:
                self._slots.release()  # for the next that waits
                raise EngineEndedError(qid, self._end.reason)
            able = [one for one in self._serving if one.num_free > 0 and not one.lost.done()]
            if able:
                worker = max(able, key=lambda one: one.num_free)
                worker.num_running += 1
                return worker

    def _finish(self, end: End) -> None:
        """Refuse episodes that wait for a worker or come later."""
        if self._end is None or end.has_left:
            reason = end.reason if self._end is None else self._end.reason
            self._end = End(reason, has_left=end.has_left)
        self._slots.release()

    async def _keep(self, number: int, started: asyncio.Future[Any]) -> None:
        """Keep worker ``number`` running; restart it whenever it is lost.

        Ray's own restart would repeat the constructor with its first arguments, so with old
        weights, and would count restarts after finished episodes too.
        """
        num_failures, lost = 0, ""
        while num_failures <= self.options.max_restarts:
            worker = _Worker(self._make_worker, number, self.options)
            try:
                await self._serve(worker, started)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - a new worker follows any error
                if not (started.done() or worker.has_died):  # `__aenter__` raises it
                    if isinstance(error, WorkerLostError):  # a time-out
                        _, resources = await run_to_end(self._resources)
                        error = WorkerLostError(f"{error}; {resources}")
                    return started.set_exception(error)
                worker.lose(describe_exception(error))
                self.num_lost += 1
                self._last_lost = lost = worker.lost.result()
                _logger.warning("a rollout worker was lost: %s", one_line(lost))
            finally:
                if worker in self._serving:
                    self._serving.remove(worker)
                self._loaded.set()
                await to_end(asyncio.create_task(worker.end()))
            num_failures = 1 if worker.num_finished else num_failures + 1
            await asyncio.sleep(min(0.05 * 2**num_failures, _LONGEST_PAUSE_S))
        _logger.error("a rollout worker is given up after %d failures in a row", num_failures)
        if not started.done():
            return started.set_exception(WorkerLostError(lost))
        return None

    async def _serve(self, worker: _Worker, started: asyncio.Future[Any]) -> None:
        """Start a worker, keep its weights current and ping it; ends with an exception."""
        options = self.options
        worker.status = await worker.call("start", self._weights, timeout_s=options.start_timeout_s)
        assert worker.status is not None
        worker.version = worker.status.version
        while True:
            published = self._published
            assert published is not None  # since the workers were entered
            if worker.version < self._version:
                worker.version = await worker.call(
                    "set_weights", self._weights, timeout_s=options.start_timeout_s
                )
                self._loaded.set()
                continue
            if worker not in self._serving:
                self._serving.append(worker)
                for _ in range(options.concurrency):
                    self._slots.release()
                if not started.done():
                    started.set_result(None)
            events: set[asyncio.Future[Any]] = {worker.lost, published}
            timeout_s = options.heartbeat_s
            await asyncio.wait(events, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if worker.lost.done():
                raise WorkerLostError(worker.lost.result())
            worker.version = await worker.call("ping", timeout_s=options.hang_timeout_s)

    def _count_out(self, keeper: asyncio.Task[None]) -> None:
        """Count a worker that is given up; without any left, refuse episodes."""
        if keeper.cancelled():
            self._last_lost = "the task that kept it was cancelled"
        elif (error := keeper.exception()) is not None:
            self._last_lost = describe_exception(error)
        self._num_kept -= 1
        if not self._num_kept:
            self._finish(End(f"no rollout worker is left, the last was lost: {self._last_lost}"))

    def _resources(self) -> tuple[bool, str]:
        """Return whether the cluster can ever hold the workers, and what they and it have."""
        import ray

        there, free = ray.cluster_resources(), ray.available_resources()
        options, count = self.options, self.num_workers
        wanted = {"CPU": count * options.num_cpus, "GPU": count * options.num_gpus}
        wanted = {kind: amount for kind, amount in wanted.items() if amount}
        parts = [
            f"{amount:g} {kind}s, of which the cluster has {there.get(kind, 0.0):g} "
            f"({free.get(kind, 0.0):g} free now)"
            for kind, amount in wanted.items()
        ]
        fits = all(amount <= there.get(kind, 0.0) for kind, amount in wanted.items())
        return fits, f"{count} rollout workers ask for {' and '.join(parts)}"


class _Worker:
    """One actor from its start to its loss or end."""

    def __init__(self, make_worker: MakeWorker, number: int, options: WorkerOptions) -> None:
        import ray

        actor = ray.remote(
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            max_concurrency=options.concurrency + _CONTROL_CALLS,
            max_restarts=0,  # `RolloutWorkers._keep` restarts it
            max_task_retries=0,
        )(RolloutWorker)
        self._actor = actor.remote(make_worker, number, options)
        self._concurrency = options.concurrency
        self._calls: set[asyncio.Future[Any]] = set()
        self.number = number
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done with the reason once the worker is lost."""
        self.status: WorkerStatus | None = None
        """Status at the start; None before."""
        self.version = -1
        """Last known version of its weights; -1 before the start."""
        self.num_running = 0
        self.num_finished = 0
        self.has_died = False
        """Whether its process or node ended."""

    @property
    def num_free(self) -> int:
        """Episodes that it can still take."""
        return self._concurrency - self.num_running

    def lose(self, reason: str) -> None:
        """Mark the worker as lost: its calls raise `WorkerLostError`."""
        if not self.lost.done():
            self.lost.set_result(reason)

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the actor and return its result, or raise its exception.

        Cancelling the wait cancels the call on the worker. If the worker is lost before it
        replies, or does not reply in time, a `WorkerLostError` is raised.
        """
        import ray

        ref = getattr(self._actor, method).remote(*args)
        reply: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
        self._calls.add(reply)
        reply.add_done_callback(self._forget)
        try:
            await asyncio.wait(
                {reply, self.lost}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        try:
            if reply.done():
                return reply.result()
            self.lose(f"no answer to {method!r} within {timeout_s} s")
        except Exception as error:
            if not is_loss(error):
                raise
            self.has_died = True
            self.lose(" ".join(describe_exception(error).split()))
        raise WorkerLostError(self.lost.result())

    def _forget(self, reply: asyncio.Future[Any]) -> None:
        self._calls.discard(reply)
        if not reply.cancelled():
            reply.exception()  # marks it as retrieved

    async def end(self) -> None:
        """Let the worker leave its context if it still can, and kill its process."""
        import ray

        try:
            if not self.lost.done():
                timeout_s = _EARLY_STOP_TIMEOUT_S if self.status is None else _STOP_TIMEOUT_S
                with contextlib.suppress(Exception):
                    await self.call("stop", timeout_s=timeout_s)
        finally:  # also when the event loop cancels all of its tasks
            self.lose("it was ended")
            ray.kill(self._actor, no_restart=True)
        if self._calls:  # their callbacks come from another thread and need this event loop
            await asyncio.wait(self._calls, timeout=_KILL_TIMEOUT_S)
        for reply in self._calls:
            reply.cancel()


class _RemoteEnvironment:
    """The environment of a runner whose episodes run on workers."""

    async def reset(self) -> None:
        """Do nothing."""

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Raise `NotImplementedError`."""
        raise NotImplementedError("the environment is on the rollout workers")


def describe_exception(error: BaseException) -> str:
    """Return the kind and message of an exception, without Ray's wrapping.

    Example:
        >>> describe_exception(KeyError("answer"))
        "KeyError: 'answer'"
    """
    inner = getattr(error, "cause", None)
    return reason_of(inner if isinstance(inner, BaseException) else error)


def is_loss(error: Exception) -> bool:
    """Return whether Ray raised an exception about an actor, rather than the actor itself.

    Ray has a type each for the loss of process, node, memory and message.
    """
    from ray.exceptions import RayError, RayTaskError

    return isinstance(error, RayError) and not isinstance(error, RayTaskError)
