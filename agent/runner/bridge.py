"""Bridge from an agent's two queues to the engine's coroutine, and a proxy of the environment.

Both record what the attempt does: for observers, the watchdog and pauses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trajpack.agent.engines.queues import reply_to
from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import (
    Agent,
    Engine,
    Environment,
    GenerationRequest,
    Observation,
    Reply,
)
from trajpack.agent.runner.gates import GenerationGate
from trajpack.agent.runner.observers import Observers
from trajpack.agent.runner.watchdog import Patience, Watchdog
from trajpack.packing.text import one_line


@dataclass(frozen=True, eq=False)
class RunnerContext:
    """Engine, agent, environment and observers that all episodes of a runner share."""

    engine: Engine
    """Engine that has been entered."""
    agent: Agent
    """Agent that collects the trajectories."""
    environment: Environment
    """Environment that judges them."""
    observers: Observers
    """Observers of each step."""
    gate: GenerationGate
    """Pause switch that every request passes."""
    watchdog: Watchdog
    """Warns of attempts that wait for long."""
    timeout_s: float | None = None
    """Time limit of one attempt in seconds; None sets none."""


class Attempt:
    """State of one attempt at an episode.

    Args:
        qid: Name of the episode.
        context: Parts of the runner.
        generate: Coroutine of the engine that answers one request.
        count_reply: Called with each reply when it comes, if given.
    """

    def __init__(
        self,
        qid: str,
        context: RunnerContext,
        generate: Callable[[GenerationRequest], Awaitable[Reply]],
        *,
        count_reply: Callable[[Reply], None] | None = None,
    ) -> None:
        self.qid = qid
        """Name of the episode."""
        self.context = context
        """Parts of the runner."""
        self.requests = RequestQueue(self)
        """Queue on which the agent puts requests."""
        self.replies = _ReplyQueue(self)
        """Queue from which the agent takes replies."""
        self.environment_errors: list[BaseException] = []
        """Exceptions that the environment raised."""
        self.sign_at = 0.0
        """Time of the last sign of life, in seconds of the event loop's clock."""
        self.num_waits = 0
        """Calls of the environment and waits for the end of a pause that are under way."""
        self._generate = generate
        self._count_reply = count_reply
        self._is_over = False
        self._num_asked = 0
        self._tasks: set[asyncio.Task[None]] = set()
        context.watchdog.begin(self)

    @property
    def is_alone(self) -> bool:
        """Whether the attempt waits only for its agent: not for engine, environment or gate."""
        return not self._tasks and not self.num_waits

    def send(self, observation: Observation) -> None:
        """Send a request to the engine; its reply will come on `replies`.

        Raises:
            RuntimeError: If the attempt is over.
            EpisodeError: If it is no request, or is of another episode, whose replies do not come
                here.
        """
        if self._is_over:
            raise RuntimeError(f"episode {self.qid!r} is over: it asks no more")
        try:
            request = GenerationRequest(*observation)
        except (TypeError, ValueError) as error:
            given = one_line(repr(observation))
            reason = f"expected a request (qid, token_ids, sampling), got {given}"
            raise EpisodeError(self.qid, reason) from error
        if request.qid != self.qid:
            reason = f"the agent put a request with the qid {request.qid!r}"
            raise EpisodeError(self.qid, f"{reason}: it must be its prompt's id, {self.qid!r}")
        turn = self._num_asked
        self._num_asked += 1
        self.context.watchdog.asked(self)
        self.context.gate.num_in_flight += 1
        if self.context.observers:
            size = len(request.token_ids) if hasattr(request.token_ids, "__len__") else 0
            self.context.observers.tell("generation_started", self.qid, turn, size)
        task = asyncio.get_running_loop().create_task(self._answer(request, turn))
        self._tasks.add(task)

    async def _answer(self, request: GenerationRequest, turn: int) -> None:
        reply = await reply_to(request, self._generate)
        if self._is_over:
            return
        self._tasks.discard(asyncio.current_task())
        self.context.gate.land()
        self.context.watchdog.replied(self)
        if self._count_reply is not None:
            self._count_reply(reply)
        if self.context.observers:
            self.context.observers.tell("generation_ended", self.qid, turn, reply)
        self.replies.put_nowait(reply)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Record a call of the environment, and its exception."""
        self.num_waits += 1
        self.context.watchdog.called(self)
        try:
            yield
        except BaseException as raised:
            self.environment_errors.append(raised)
            raise
        finally:
            self.num_waits -= 1
            self.context.watchdog.answered(self)

    async def step(self, *values: Any, **named: Any) -> Any:
        """Call the environment's ``step``, and tell observers."""
        turn = max(self._num_asked - 1, 0)
        self.context.observers.tell("verification_started", self.qid, turn)
        error: BaseException | None = None
        try:
            with self.calling():
                return await self.context.environment.step(*values, **named)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.context.observers.tell("verification_ended", self.qid, turn, error)

    def close(self) -> None:
        """End the attempt, and cancel the requests that have no reply."""
        self._is_over = True
        self.context.watchdog.end(self)
        self.context.gate.land(len(self._tasks))
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()


class RequestQueue(asyncio.Queue[Observation]):
    """Request queue of an attempt: an item is not stored, but sent to the engine."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self._attempt = attempt

    @property
    def patience(self) -> Patience:
        """Patience of the run, for an agent that runs episodes in another process."""
        return self._attempt.context.watchdog.patience

    async def wait_open(self) -> None:
        """Wait until generation is not paused."""
        attempt, context = self._attempt, self._attempt.context
        if context.gate.is_closed:
            attempt.num_waits += 1
            try:
                async with context.observers.waiting("pause"):
                    await context.gate.wait_open()
            finally:
                attempt.num_waits -= 1
                context.watchdog.sign(attempt)

    async def put(self, item: Observation) -> None:
        """Send a request, once generation is not paused."""
        await self.wait_open()
        self._attempt.send(item)

    def put_nowait(self, item: Observation) -> None:
        """Send a request; while generation is paused the queue counts as full.

        Raises:
            asyncio.QueueFull: If generation is paused.
        """
        if self.full():
            raise asyncio.QueueFull
        self._attempt.send(item)

    def full(self) -> bool:
        """Return whether generation is paused."""
        return self._attempt.context.gate.is_closed


class _ReplyQueue(asyncio.Queue[Reply]):
    """Reply queue of an attempt; taking a reply is a sign of life."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self._attempt = attempt

    def _get(self) -> Reply:
        self._attempt.context.watchdog.sign(self._attempt)
        reply: Reply = super()._get()
        return reply


class RecordingEnvironment:
    """Proxy of the environment that records the calls of one attempt."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._environment = attempt.context.environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def reset(self, *values: Any, **named: Any) -> Any:
        """Start an episode."""
        with self._attempt.calling():
            return await self._environment.reset(*values, **named)

    async def step(self, *values: Any, **named: Any) -> Any:
        """Take an action."""
        return await self._attempt.step(*values, **named)
