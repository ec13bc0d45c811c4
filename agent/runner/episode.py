"""One attempt at an episode: its requests and its environment, and the failure that ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajpack.agent.errors import (
    EnvironmentFailedError,
    EpisodeCancelledError,
    EpisodeError,
    EpisodeTimeoutError,
    GenerationError,
    causes_of,
    end_of_program,
    reason_of,
)
from trajpack.agent.protocols import (
    Agent,
    Engine,
    Environment,
    Generate,
    GenerationOutput,
    GenerationRequest,
    Prompt,
    SamplingParams,
)
from trajpack.agent.runner.gate import GenerationGate
from trajpack.agent.runner.observers import Observers, RolloutObserver
from trajpack.agent.runner.policy import RolloutPolicy, StalenessGate
from trajpack.agent.runner.replies import checked_prompt, turn_of
from trajpack.agent.runner.results import Progress
from trajpack.agent.runner.silence import SilenceTimer
from trajpack.agent.runner.trajectory_check import check_trajectories
from trajpack.packing.types import Trajectory, Turn

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
        sampling: Any = None,
        policy: RolloutPolicy = _DEFAULT_POLICY,
        observers: Sequence[RolloutObserver] = (),
        finished: Collection[str] = (),
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.engine, self.agent, self.environment = engine, agent, environment
        self.concurrency, self.group_size = concurrency, group_size
        self.sampling = SamplingParams() if sampling is None else sampling
        self.policy = policy
        self.observers = Observers(observers)
        self.finished = set(finished) if isinstance(finished, list | tuple) else finished
        self.on_progress = on_progress
        self.staleness = None if policy.staleness is None else StalenessGate(policy.staleness)
        self.gate = GenerationGate()
        self.silence = SilenceTimer(policy.silence_warning_s, self.waits_for)
        self.attempts: dict[Attempt, None] = {}
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


class Attempt:
    """One attempt at an episode: what its agent asks and waits for."""

    def __init__(
        self,
        qid: str,
        context: RunnerContext,
        count_turn: Callable[[Turn], None] | None = None,
    ) -> None:
        self.qid = qid
        self.context = context
        self.environment_errors: list[BaseException] = []
        """Exceptions that the environment raised."""
        self.num_waits = 0
        """Calls of the environment and waits for the end of a pause that are under way."""
        self.num_requests = 0
        """Requests sent so far."""
        self._is_over = False
        self._count_turn = count_turn
        self._asking: set[asyncio.Task[Any] | None] = set()

    @property
    def is_alone(self) -> bool:
        """Whether the attempt waits only for its agent: not for engine, environment or gate."""
        return not self._asking and not self.num_waits

    def open(self) -> None:
        """Count the attempt as under way."""
        self.context.silence.sign()
        self.context.attempts[self] = None

    def close(self) -> None:
        """End the attempt, and cancel tasks that still ask."""
        self._is_over = True
        self.context.attempts.pop(self, None)
        for task in self._asking:
            if task is not None:
                task.cancel()

    async def generate(self, token_ids: Sequence[int], sampling: Any = None) -> Turn:
        """Ask the engine, once generation is not paused; see `Generate`.

        Raises:
            RuntimeError: If the attempt is over.
        """
        prompt_ids = checked_prompt(self.qid, token_ids)
        task = asyncio.current_task()
        self._asking.add(task)
        try:
            await self._wait_open()
            if self._is_over:
                raise RuntimeError(f"episode {self.qid!r} is over: it asks no more")
            return await self._ask(prompt_ids, sampling)
        finally:
            self._asking.discard(task)

    async def _wait_open(self) -> None:
        if self.context.gate.is_closed:
            with self.context.observers.waiting("pause"):
                await self.context.gate.wait_open()

    async def _ask(self, prompt_ids: npt.NDArray[np.int32], sampling: Any) -> Turn:
        """Send a request, tell observers, and return its checked reply."""
        context, number = self.context, self.num_requests
        self.num_requests += 1
        sampling = context.sampling if sampling is None else sampling
        request = GenerationRequest(self.qid, prompt_ids.tolist(), sampling)
        timeout_s = context.policy.generation_timeout_s
        late = EpisodeTimeoutError(self.qid, f"no reply within {timeout_s} s")
        context.silence.sign()
        context.observers.tell("generation_started", self.qid, number, prompt_ids.size)
        try:
            with context.gate.sending():
                asked = reply_of(context.engine, request)
                reply = await context.gate.in_time(asked, timeout_s, late)
            turn = turn_of(self.qid, prompt_ids, reply)
        except EpisodeError as error:
            context.observers.tell("generation_ended", self.qid, number, error)
            raise
        finally:
            context.silence.sign()
        if self._count_turn is not None:
            self._count_turn(turn)
        context.observers.tell("generation_ended", self.qid, number, reply)
        return turn


async def reply_of(engine: Engine, request: GenerationRequest) -> GenerationOutput:
    """Return what the engine returns, or raise its failure as a `GenerationError`.

    Raises:
        GenerationError: Also where the engine raised anything else, or was cancelled itself.
        asyncio.CancelledError: If the calling task is being cancelled.
        KeyboardInterrupt: As `SystemExit`, alone or within a group: these end the program.
    """
    task = asyncio.current_task()
    try:
        return await engine.generate(request)
    except GenerationError as error:
        if error.qid != request.qid:
            raise type(error)(request.qid, error.reason) from error
        # The error says all there is to say; frames would keep bodies of replies alive.
        error.__context__ = None
        raise error.with_traceback(None) from error.__cause__
    except asyncio.CancelledError as error:
        if task is None or task.cancelling():
            raise
        raise GenerationError(request.qid, "the generation was cancelled") from error
    except BaseException as error:  # a defect of an engine, of any kind, fails its request alone
        if (end := end_of_program(error)) is not None:
            raise end from None  # a task hands on no group that holds it
        if isinstance(error, GeneratorExit) and not is_running(task):
            raise  # the interpreter closes this coroutine
        reason = f"the engine failed: {reason_of(error)}"
        raise GenerationError(request.qid, reason) from error


class RecordingEnvironment:
    """Proxy of the environment that records the calls of one attempt, and their exceptions."""

    def __init__(self, attempt: Attempt) -> None:
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


def coroutine_of(agent: Any) -> Callable[[Prompt, Any, Generate], Awaitable[Any]]:
    """Return an agent's coroutine function: the agent, if it can be called, or its ``run``.

    Raises:
        TypeError: If it has neither.
    """
    function = agent if callable(agent) else getattr(agent, "run", None)
    if not callable(function):
        raise TypeError(
            "an agent must have a coroutine run(prompt, env, generate) or be one, got "
            f"{type(agent).__name__} (QueueAgent takes one with queues)"
        )
    return function


async def run_episode(
    agent: Any, env: Any, prompt: Prompt, generate: Generate
) -> tuple[Trajectory, ...]:
    """Run one episode without a runner, as within the loop of another system.

    Args:
        agent: Agent, or the coroutine function that is one.
        env: Environment of the episode.
        prompt: Opening; its id names the episode.
        generate: Asks the other system's engine.

    Returns:
        The agent's trajectories, checked as a `TrajectoryBuffer` would check them; those without a
        group get the name of the task.

    Raises:
        TypeError: If the agent returns no list of trajectories, or a value in it is of the wrong
            kind.
        ValueError: If a value in it is out of range, or lengths disagree.
        Exception: As the agent raised it.
    """
    given = await coroutine_of(agent)(prompt, env, generate)
    await check_trajectories(given)
    return labelled(given, prompt.task)


def labelled(trajectories: Sequence[Trajectory], group: str) -> tuple[Trajectory, ...]:
    """Return trajectories, of which those without a group get this one."""
    return tuple(
        one if one.group is not None else replace(one, group=group) for one in trajectories
    )


def is_running(task: asyncio.Task[Any] | None) -> bool:
    """Return whether an event loop runs the task now."""
    try:
        return task is not None and asyncio.current_task() is task
    except RuntimeError:  # no event loop runs
        return False


async def attempt_episode(
    context: RunnerContext,
    prompt: Prompt,
    *,
    count_turn: Callable[[Turn], None] | None = None,
) -> Sequence[Trajectory]:
    """Run the episode ``prompt.id`` once and return its trajectories, complete and checked.

    Raises:
        EpisodeError: On any failure, with the original exception as its cause.
        asyncio.CancelledError: If the task is being cancelled.
    """
    attempt = Attempt(prompt.id, context, count_turn)
    timeout_s = context.policy.episode_timeout_s
    late = EpisodeTimeoutError(prompt.id, f"not finished within {timeout_s} s")
    return await context.gate.in_time(_collect(attempt, prompt), timeout_s, late)


async def _collect(attempt: Attempt, prompt: Prompt) -> Sequence[Trajectory]:
    task = asyncio.current_task()
    try:
        attempt.open()
        try:
            agent = coroutine_of(attempt.context.agent)
            found = await agent(prompt, RecordingEnvironment(attempt), attempt.generate)
        finally:
            attempt.close()
        await check_trajectories(found)
        return found  # type: ignore[no-any-return]
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
