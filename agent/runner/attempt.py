"""One attempt at an episode: its queues and its environment, and the failure that ends it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trajpack.agent.engines.queues import coroutine_of, is_running, reply_to
from trajpack.agent.errors import (
    EnvironmentFailedError,
    EpisodeCancelledError,
    EpisodeError,
    EpisodeTimeoutError,
    causes_of,
    end_of_program,
    reason_of,
)
from trajpack.agent.protocols import (
    Agent,
    Engine,
    Environment,
    GenerationRequest,
    Observation,
    Prompt,
    Reply,
)
from trajpack.agent.runner.observers import Observers, RolloutObserver
from trajpack.agent.runner.policy import RolloutPolicy, StalenessGate
from trajpack.agent.runner.results import Progress
from trajpack.agent.runner.silence import SilenceTimer
from trajpack.agent.runner.trajectory_check import check_trajectories
from trajpack.packing.text import one_line
from trajpack.packing.types import Trajectory

if TYPE_CHECKING:
    from anyio import CancelScope

_DEFAULT_POLICY = RolloutPolicy()
WEIGHTS = "weights newer than those of the last results (RolloutPolicy.staleness)"
"""What a run waits for that no episode may begin without."""
_WEIGHTS_FACTOR = 6
"""How much longer newer weights may take than other things: a training step."""


class RunnerContext:
    """Parts and options that all runs and episodes of a runner share.

    Arguments as of `RolloutRunner`.
    """

    def __init__(  # noqa: PLR0913 - the first three are its parts, the others are options
        self,
        engine: Engine,
        agent: Agent,
        environment: Environment,
        *,
        concurrency: int = 64,
        group_size: int = 1,
        policy: RolloutPolicy = _DEFAULT_POLICY,
        observers: Sequence[RolloutObserver] = (),
        finished: Collection[str] = (),
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.engine, self.agent, self.environment = engine, agent, environment
        self.concurrency, self.group_size = concurrency, group_size
        self.policy = policy
        self.observers = Observers(observers)
        self.finished = set(finished) if isinstance(finished, list | tuple) else finished
        self.on_progress = on_progress
        self.staleness = None if policy.staleness is None else StalenessGate(policy.staleness)
        self.gate = GenerationGate()
        self.silence = SilenceTimer(policy.silence_warning_s, self.waits_for)
        self.attempts: dict[RequestQueue, None] = {}
        """Attempts at episodes that are under way, in the order of their beginnings."""
        self.num_calls = 0
        """Calls of the environment that have no answer yet."""
        self.others: list[str] = []
        """What runs wait for while no episode is under way: prompts, or newer weights."""

    def waits_for(self) -> tuple[str, float]:
        """Return what keeps the runner waiting, as a `SilenceTimer` asks for it."""
        if self.gate.is_still:
            return "", 1
        awaited = []
        engine, environment, agent = (
            type(party).__name__ for party in (self.engine, self.environment, self.agent)
        )
        if num_open := self.gate.num_in_flight:
            awaited.append(
                f"replies of the engine {engine} (requests open: {num_open}; it must be entered by "
                "async with, and its tasks must run)"
            )
        if self.num_calls:
            awaited.append(f"answers of the environment {environment} (calls: {self.num_calls})")
        idle = [attempt.qid for attempt in self.attempts if attempt.is_alone]
        if idle and not getattr(self.agent, "is_remote", False):
            awaited.append(
                f"the agent {agent}, whose episode {idle[0]} waits for no reply and no call of the "
                f"environment (such episodes: {len(idle)})"
            )
        if awaited:
            ends = "RolloutPolicy(episode_timeout_s=...) ends such episodes"
            return f"{', '.join(awaited)}; {ends}", 1
        if self.attempts or not self.others:
            return "", 1
        return self.others[0], _WEIGHTS_FACTOR if WEIGHTS in self.others else 1

    @contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Note what a run waits for while the context lasts."""
        self.others.append(what)
        try:
            yield
        finally:
            self.others.remove(what)


class GenerationGate:
    """Re-entrant pause switch for requests to an engine, with a count of requests in flight.

    A pause may also stop the time limits of episodes, so that no episode is late for having
    waited at the gate.
    """

    def __init__(self) -> None:
        self.num_in_flight = 0
        """Requests that were sent and have no reply yet."""
        self._num_closings = 0
        self._num_standstills = 0
        self._limits: set[CancelScope] = set()
        self._left_s: dict[CancelScope, float] = {}
        # An event belongs to the event loop that first waits for it; a runner may see several.
        self._changed: asyncio.Event | None = None

    @property
    def is_closed(self) -> bool:
        """Whether requests have to wait."""
        return self._num_closings > 0

    @property
    def is_still(self) -> bool:
        """Whether time limits stand still."""
        return self._num_standstills > 0

    @asynccontextmanager
    async def paused(self, *, drain: bool) -> AsyncIterator[None]:
        """Hold requests and time limits back, once every request has a reply if they ``drain``."""
        self._num_closings += 1
        try:
            while drain and self.num_in_flight:
                await self._change()
            with self.standstill():
                yield
        finally:
            self._num_closings -= 1
            self._wake(self._num_closings)

    async def wait_open(self) -> None:
        """Wait until requests may be sent."""
        while self._num_closings:
            await self._change()

    def land(self, count: int = 1) -> None:
        """Count requests as answered, or as given up."""
        self.num_in_flight -= count
        self._wake(self.num_in_flight)

    @contextmanager
    def limit(self, seconds: float) -> Iterator[CancelScope]:
        """Cancel the body after ``seconds``, not counting the time of any `standstill`."""
        from anyio import CancelScope, current_time

        with CancelScope(deadline=current_time() + seconds) as scope:
            self._limits.add(scope)
            if self._num_standstills:
                self._stop(scope)
            try:
                yield scope
            finally:
                self._limits.discard(scope)
                self._left_s.pop(scope, None)

    @contextmanager
    def standstill(self) -> Iterator[None]:
        """Stop all time limits while the context lasts."""
        from anyio import current_time

        self._num_standstills += 1
        if self._num_standstills == 1:
            for scope in self._limits:
                self._stop(scope)
        try:
            yield
        finally:
            self._num_standstills -= 1
            if not self._num_standstills:
                while self._left_s:
                    scope, left_s = self._left_s.popitem()
                    scope.deadline = current_time() + left_s

    def _stop(self, scope: CancelScope) -> None:
        from anyio import current_time

        self._left_s[scope] = scope.deadline - current_time()
        scope.deadline = math.inf

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    def _wake(self, num_left: int) -> None:
        if not num_left and self._changed is not None:
            self._changed.set()
            self._changed = None


class RequestQueue(asyncio.Queue[Observation]):
    """Request queue of one attempt at an episode, and the state of the attempt.

    The engine's coroutine answers a request at once, on `replies`; ``count_reply`` counts it.
    """

    def __init__(
        self,
        qid: str,
        context: RunnerContext,
        count_reply: Callable[[Reply], None] | None = None,
    ) -> None:
        super().__init__()
        self.qid = qid
        self.context = context
        self.replies: asyncio.Queue[Reply] = asyncio.Queue()
        """Queue from which the agent takes replies."""
        self.environment_errors: list[BaseException] = []
        """Exceptions that the environment raised."""
        self.num_waits = 0
        """Calls of the environment and waits for the end of a pause that are under way."""
        self.num_requests = 0
        """Requests sent so far."""
        self._generate: Callable[[GenerationRequest], Awaitable[Reply]] | None = None
        self._count_reply = count_reply
        self._tasks: set[asyncio.Task[Reply]] = set()

    @property
    def is_alone(self) -> bool:
        """Whether the attempt waits only for its agent: not for engine, environment or gate."""
        return not self._tasks and not self.num_waits

    def open(self) -> None:
        """Open the episode in the engine.

        Raises:
            ValueError: If an episode of that name is open.
        """
        engine = self.context.engine
        self._generate = coroutine_of(engine, engine.open_episode(self.qid))
        self.context.silence.sign()
        self.context.attempts[self] = None

    def close(self) -> None:
        """End the attempt, and cancel the requests that have no reply."""
        self._generate = None
        self.context.attempts.pop(self, None)
        self.context.gate.land(len(self._tasks))
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self.context.engine.close_episode(self.qid)

    def full(self) -> bool:
        """Return whether generation is paused."""
        return self.context.gate.is_closed

    async def wait_open(self) -> None:
        """Wait until generation is not paused."""
        if self.full():
            self.num_waits += 1
            try:
                with self.context.observers.waiting("pause"):
                    await self.context.gate.wait_open()
            finally:
                self.num_waits -= 1

    async def put(self, item: Observation) -> None:
        """Send a request, once generation is not paused."""
        await self.wait_open()
        self.put_nowait(item)

    def put_nowait(self, item: Observation) -> None:
        """Send a request to the engine; its reply will come on `replies`.

        Raises:
            asyncio.QueueFull: If generation is paused.
            RuntimeError: If the attempt is over.
            EpisodeError: If it is no request, or is of another episode, whose replies do not come
                here.
        """
        if self.full():
            raise asyncio.QueueFull
        if self._generate is None:
            raise RuntimeError(f"episode {self.qid!r} is over: it asks no more")
        try:
            request = GenerationRequest(*item)
        except (TypeError, ValueError) as error:
            reason = f"expected a request (qid, token_ids, sampling), got {one_line(repr(item))}"
            raise EpisodeError(self.qid, reason) from error
        if request.qid != self.qid:
            reason = f"the agent put a request with the qid {request.qid!r}"
            raise EpisodeError(self.qid, f"{reason}: it must be its prompt's id, {self.qid!r}")
        turn = self.num_requests
        try:
            size = len(request.token_ids)
        except TypeError:  # of a generator, or an array without dimensions: the engine refuses it
            size = 0
        self.num_requests += 1
        self.context.silence.sign()
        self.context.observers.tell("generation_started", self.qid, turn, size)
        task = asyncio.get_running_loop().create_task(reply_to(request, self._generate))
        self.context.gate.num_in_flight += 1  # nothing can fail between the task and its count
        self._tasks.add(task)
        task.add_done_callback(partial(self._deliver, turn))

    def _deliver(self, turn: int, task: asyncio.Task[Reply]) -> None:
        """Give the engine's reply to the agent, unless the attempt is over."""
        if self._generate is None or task.cancelled() or task.exception() is not None:
            return
        reply = task.result()
        self._tasks.discard(task)
        self.context.gate.land()
        self.context.silence.sign()
        if self._count_reply is not None:
            self._count_reply(reply)
        self.context.observers.tell("generation_ended", self.qid, turn, reply)
        self.replies.put_nowait(reply)


class RecordingEnvironment:
    """Proxy of the environment that records the calls of one attempt, and their exceptions."""

    def __init__(self, attempt: RequestQueue) -> None:
        self._attempt = attempt
        self._environment = attempt.context.environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def reset(self, *values: Any, **named: Any) -> Any:
        """Start an episode."""
        with self._calling():
            return await self._environment.reset(*values, **named)

    async def step(self, *values: Any, **named: Any) -> Any:
        """Take an action."""
        attempt, observers = self._attempt, self._attempt.context.observers
        turn = max(attempt.num_requests - 1, 0)
        observers.tell("verification_started", attempt.qid, turn)
        error: BaseException | None = None
        try:
            with self._calling():
                return await self._environment.step(*values, **named)
        except BaseException as raised:
            error = raised
            raise
        finally:
            observers.tell("verification_ended", attempt.qid, turn, error)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        attempt, context = self._attempt, self._attempt.context
        attempt.num_waits += 1
        context.num_calls += 1
        context.silence.sign()
        try:
            yield
        except BaseException as raised:
            attempt.environment_errors.append(raised)
            raise
        finally:
            attempt.num_waits -= 1
            context.num_calls -= 1
            context.silence.sign()


def check_serving(engine: Engine) -> None:
    """Call the engine's `check_serving`, if it has one."""
    check = getattr(engine, "check_serving", None)
    if check is not None:
        check()


async def attempt_episode(
    context: RunnerContext,
    prompt: Prompt,
    group: str,
    *,
    count_reply: Callable[[Reply], None] | None = None,
) -> tuple[Trajectory, ...]:
    """Run the episode ``prompt.id`` once and return its trajectories, complete and checked.

    Trajectories without a group get ``group``.

    Raises:
        EpisodeError: On any failure, with the original exception as its cause.
        asyncio.CancelledError: If the task is being cancelled.
    """
    attempt = RequestQueue(prompt.id, context, count_reply)
    timeout_s = context.policy.episode_timeout_s
    if timeout_s is None:
        return await _collect(attempt, prompt, group)
    failure: EpisodeError | None = None
    with context.gate.limit(timeout_s) as scope:
        try:
            trajectories = await _collect(attempt, prompt, group)
            if not scope.cancel_called:  # otherwise the agent ignored its cancellation
                return trajectories
        except EpisodeError as error:
            if not scope.cancel_called:  # otherwise the agent turned its cancellation into this
                raise
            failure = error
    raise EpisodeTimeoutError(prompt.id, f"not finished within {timeout_s:g} s") from failure


async def _collect(attempt: RequestQueue, prompt: Prompt, group: str) -> tuple[Trajectory, ...]:
    task = asyncio.current_task()
    try:
        attempt.open()
        try:
            given = await attempt.context.agent.collect_trajectory(
                prompt, RecordingEnvironment(attempt), attempt, attempt.replies
            )
        finally:
            attempt.close()
        await check_trajectories(given)
        return tuple(one if one.group is not None else replace(one, group=group) for one in given)
    except asyncio.CancelledError as error:
        if task is None or task.cancelling():
            raise
        reason = "something the agent awaited was cancelled"
        raise EpisodeCancelledError(prompt.id, reason) from error
    except BaseException as error:  # of any kind: it must not end the other episodes
        if end_of_program(error) is not None:
            raise
        if isinstance(error, EpisodeError) and error.qid == prompt.id:
            raise
        if isinstance(error, GeneratorExit) and not is_running(task):
            raise  # the interpreter closes this coroutine
        kind = EpisodeTimeoutError if isinstance(error, TimeoutError) else EpisodeError
        known = set(map(id, attempt.environment_errors))
        if any(id(one) in known for one in causes_of(error)):
            kind = EnvironmentFailedError
        raise kind(prompt.id, reason_of(error)) from error
