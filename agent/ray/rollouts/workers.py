"""Rollout workers on a Ray cluster, which look like one engine and one agent to a runner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from trajpack.agent.blocking_work import run_to_end
from trajpack.agent.engines.queues import End, ObservationQueue, check_entered
from trajpack.agent.errors import EngineEndedError, EpisodeError, ServerUnavailableError
from trajpack.agent.protocols import Observation, Prompt, Reply
from trajpack.agent.ray.rollouts.dispatch import Dispatch
from trajpack.agent.ray.rollouts.life import WorkerLife, WorkerLostError, finished, told_by
from trajpack.agent.ray.rollouts.options import MakeWorker, WorkerOptions
from trajpack.agent.ray.rollouts.stand_ins import RemoteAgent, RemoteEnvironment
from trajpack.agent.ray.rollouts.worker import EpisodeReply, WorkerStatus
from trajpack.agent.ray.room import describe_room, lacking_room
from trajpack.agent.ray.weights import Weights
from trajpack.agent.runner.runner import RolloutRunner
from trajpack.agent.runner.watchdog import Patience
from trajpack.packing.optional import require
from trajpack.packing.text import one_line
from trajpack.packing.types import Trajectory

_logger = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 5.0


class RolloutWorkers:
    """Workers that roll episodes out, each in a process of its own with an engine of its own.

    It stands in for an `Engine`, and `agent` for an `Agent`: with both, a `RolloutRunner` has its
    groups, filters, retries and staleness over a whole cluster. An episode goes to the worker
    with the fewest, and comes back as arrays through the object store. One whose worker dies or
    hangs begins again on another; what comes from a worker that was given up counts for
    nothing, so that each episode ends once.

    A worker that was lost is replaced. The new one gets the current weights before its first
    episode. Use it as an asynchronous context manager; Ray must have been initialised. Entering
    it waits for all workers; where the cluster is too small for them, a warning says so at once.

    Args:
        make_worker: Makes engine, agent and environment on each worker.
        num_workers: How many.
        options: How they are run.

    Raises:
        ValueError: If ``num_workers`` is below 1.
        WorkerLostError: From entering, if one has not started in time, or died too often.
        Exception: From entering, what ``make_worker`` raised, in Ray's wrapping.

    Cost: a process for each worker, some 2.5 s of a core and 330 MB without its engine. Each
    episode takes some 2 ms of this process (measured on two busy cores), and a copy of its arrays.
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
        """How the workers are run."""
        self.num_workers = num_workers
        """How many there are when all is well."""
        self.agent = RemoteAgent(self.roll_out)
        """Has episodes run on the workers."""
        self.num_lost = 0
        """Workers lost so far."""
        self.num_redone = 0
        """Times that an episode began again since its worker was lost."""
        self.num_turns = 0
        """Turns that have come back."""
        self.num_tokens = 0
        """Tokens sampled in them."""
        self._make_worker = make_worker
        self._weights: Any = None
        self._version = 0
        self._obs_queue = ObservationQueue(self._refuse)
        self._open: dict[str, asyncio.Queue[Reply]] = {}
        self._dispatch = Dispatch()
        self._publishing = asyncio.Lock()
        self._keepers: list[asyncio.Task[None]] = []
        self._left: End | None = None
        self._num_kept = num_workers
        self._last_lost = ""
        self._news: asyncio.Future[None] | None = None
        self._taken = asyncio.Event()

    @property
    def concurrency(self) -> int:
        """Episodes that all workers together take at once."""
        return self.num_workers * self.options.concurrency

    @property
    def version(self) -> int:
        """Version of the weights published last."""
        return self._version

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        """Those that serve now, with the version of their weights that is known."""
        return tuple(
            WorkerStatus(life.status.pid, life.status.node, life.version)
            for life in self._dispatch.serving
            if life.status is not None
        )

    @property
    def obs_queue(self) -> asyncio.Queue[Observation]:
        """Refuses each request with a `RuntimeError`: agents ask the engines of their workers."""
        return self._obs_queue

    def _refuse(self, observation: Observation) -> bool:
        raise RuntimeError("RolloutWorkers take no requests: use workers.runner(...)")

    def check_serving(self) -> None:
        """Raise unless the workers were entered and not left.

        Raises:
            RuntimeError: If they have not been entered, were left, or were entered in another
                event loop.
        """
        check_entered(self, self._left, self._keepers[0].get_loop() if self._keepers else None)

    def open_episode(self, qid: str) -> asyncio.Queue[Reply]:
        """Return a queue on which nothing will come.

        Raises:
            ValueError: If an episode of that name is open.
        """
        if qid in self._open:
            raise ValueError(f"episode {qid!r} is open already")
        return self._open.setdefault(qid, asyncio.Queue())

    def close_episode(self, qid: str) -> None:
        """Forget ``qid``."""
        self._open.pop(qid, None)

    async def publish(self, weights: Weights) -> None:
        """Send new weights to all workers; returns before they have them.

        A worker that is busy with older ones goes on; one that cannot take them is lost, and
        its successor starts with them. Before the workers are entered, it says what they begin
        with; until then each has what ``make_worker`` gave it, which counts as version 0.

        Args:
            weights: Under a version above the present one.

        Raises:
            ValueError: If the version is not.

        Cost: one copy into the object store, whatever the number of workers.
        """
        import ray

        async with self._publishing:
            if weights.version <= self._version:
                raise ValueError(f"version must exceed {self._version}, got {weights.version}")
            self._weights = await run_to_end(lambda: ray.put(weights))
            self._version = weights.version
        if self._news is not None:
            news, self._news = self._news, asyncio.get_running_loop().create_future()
            news.set_result(None)

    async def everywhere(self) -> None:
        """Wait until all workers that serve have the weights published last."""
        while any(life.version < self._version for life in self._dispatch.serving):
            self._taken.clear()
            await self._taken.wait()

    async def __aenter__(self) -> RolloutWorkers:
        if self._keepers:
            raise RuntimeError("RolloutWorkers can be entered once")
        if lacking := await run_to_end(lambda: self._room(lacking_room)):
            _logger.warning("waiting for a larger cluster: %s", one_line(lacking))
        loop = asyncio.get_running_loop()
        self._news = loop.create_future()
        started = [loop.create_future() for _ in range(self.num_workers)]
        self._keepers = [asyncio.create_task(self._keep(n, told)) for n, told in enumerate(started)]
        for keeper in self._keepers:
            keeper.add_done_callback(self._give_up)
        try:
            await asyncio.gather(*started)
        except BaseException:
            await self.__aexit__()
            for future in started:
                if not future.cancel() and not future.cancelled():
                    future.exception()  # the first one's is raised
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._left = End("the workers were shut down", has_left=True)
        self._dispatch.finish(self._left.reason)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self, number: int, started: asyncio.Future[Any]) -> None:
        """Have one worker, again and again."""
        num_failures, lost = 0, ""
        while num_failures <= self.options.max_restarts:
            life = WorkerLife(self._make_worker, number, self.options)
            try:
                await self._serve(life, started)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it was, a new one is tried
                if not (started.done() or life.has_died):  # somebody waits to hear of it
                    return started.set_exception(await self._explained(error))
                life.lose(told_by(error))
                self.num_lost += 1
                self._last_lost = lost = life.lost.result()
                _logger.warning("a rollout worker was lost: %s", one_line(lost))
            finally:
                self._dispatch.dismiss(life)
                self._taken.set()
                await finished(life.end())
            num_failures = 1 if life.num_finished else num_failures + 1
            await asyncio.sleep(min(0.05 * 2**num_failures, _LONGEST_PAUSE_S))
        _logger.error("a rollout worker is given up after %d failures in a row", num_failures)
        if not started.done():
            return started.set_exception(WorkerLostError(lost))
        return None

    def _give_up(self, keeper: asyncio.Task[None]) -> None:
        """Count a worker that is kept no more; without any, no episode is waited for."""
        if keeper.cancelled():
            self._last_lost = "the task that kept it was cancelled"
        elif (error := keeper.exception()) is not None:
            self._last_lost = told_by(error)
        self._num_kept -= 1
        if not self._num_kept:
            reason = f"no rollout worker is left, the last was lost: {self._last_lost}"
            self._dispatch.finish(reason)

    async def _explained(self, error: Exception) -> Exception:
        """Return an error of a worker's start; one that waited in vain says for what."""
        if not isinstance(error, WorkerLostError):
            return error
        room = await run_to_end(lambda: self._room(describe_room))
        return WorkerLostError(f"{error}; {room}")

    def _room(self, tell: Callable[[str, int, WorkerOptions], str]) -> str:
        return tell("rollout workers", self.num_workers, self.options)

    async def _serve(self, life: WorkerLife, started: asyncio.Future[Any]) -> None:
        """Start a worker, give it all news there are, then work; ends with an exception."""
        await life.start(self._weights)
        while True:
            news = self._news
            if self._weights is not None and life.version < self._version:
                await life.set_weights(self._weights)
                self._taken.set()
                continue
            if life not in self._dispatch.serving:
                self._dispatch.enlist(life)
                if not started.done():
                    started.set_result(None)
            assert news is not None  # since the workers were entered
            events: set[asyncio.Future[Any]] = {life.lost, news}
            heartbeat_s = self.options.heartbeat_s
            await asyncio.wait(events, timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if life.lost.done():
                raise WorkerLostError(life.lost.result())
            await life.ping()

    def runner(self, **options: Any) -> RolloutRunner:
        """Return a runner whose episodes run on these workers, as many at once as they take.

        Args:
            **options: Of `RolloutRunner`, but for engine, agent and environment. Policies about
                groups, staleness, retries and time are followed here, over all workers.
        """
        options = {"concurrency": self.concurrency} | options
        return RolloutRunner(self, self.agent, RemoteEnvironment(), **options)

    async def roll_out(self, prompt: Prompt, patience: Patience | None = None) -> list[Trajectory]:
        """Run the episode ``prompt.id`` on some worker, on another one if that is lost.

        Args:
            prompt: Of the episode.
            patience: With silence, of the run that it belongs to. Warnings of a worker about an
                engine, environment or agent that is silent for longer are logged here after its
                next heartbeat.

        Raises:
            EpisodeError: As the worker reports it; a `ServerUnavailableError` if too many
                workers were lost with it, an `EngineEndedError` if none is left.
        """
        lost = ""
        for attempt in range(1 + self.options.max_redos):
            life = await self._dispatch.acquire(prompt.id)
            self.num_redone += attempt > 0
            try:
                reply: EpisodeReply = await life.call("roll_out", prompt, patience)
            except WorkerLostError as error:
                lost = str(error)
                continue
            except Exception as error:  # what did not even reach the agent
                raise EpisodeError(prompt.id, told_by(error)) from error
            finally:
                self._dispatch.release(life)
            if isinstance(reply.error, EngineEndedError):
                lost = reply.error.reason
                life.lose(f"its engine has ended: {lost}")
                continue
            life.num_finished += 1
            return self._accept(reply)
        num_lost = self.options.max_redos + 1
        raise ServerUnavailableError(prompt.id, f"{num_lost} workers were lost, the last: {lost}")

    def _accept(self, reply: EpisodeReply) -> list[Trajectory]:
        if reply.error is not None:
            raise reply.error
        assert reply.arrays is not None
        self.num_turns += len(reply.arrays.turns)
        self.num_tokens += len(reply.arrays.logprobs)
        # A view would keep the store's memory for as long as somebody keeps the trajectory.
        return reply.arrays.copied().trajectories()
