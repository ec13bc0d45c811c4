"""One attempt at an episode: its requests and its environment, and the failure that ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
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
    Engine,
    Generate,
    GenerationOutput,
    GenerationRequest,
    Prompt,
    SamplingParams,
)
from trajpack.agent.runner.gate import GenerationGate
from trajpack.agent.runner.observers import Observers, RolloutObserver
from trajpack.agent.runner.policy import RolloutPolicy, StalenessGate
from trajpack.agent.runner.replies import check_trajectories, checked_prompt, turn_of
from trajpack.agent.runner.results import Progress
from trajpack.agent.runner.silence import SilenceTimer
from trajpack.packing.conversion import as_integer
from trajpack.packing.optional import require
from trajpack.packing.types import Trajectory, Turn


@dataclass(eq=False)
class RunnerContext:
    """Parts and options that all runs and episodes of a runner share, see `RolloutRunner`."""

    engine: Engine
    agent: Any
    environment: Any
    _: KW_ONLY
    concurrency: int = 64
    group_size: int = 1
    sampling: Any = None
    policy: RolloutPolicy = field(default_factory=RolloutPolicy)
    observers: Sequence[RolloutObserver] = ()
    finished: Collection[str] = ()
    on_progress: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "group_size"):
            if as_integer(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not isinstance(self.policy, RolloutPolicy):
            raise TypeError(f"policy must be a RolloutPolicy, got {type(self.policy).__name__}")
        if isinstance(self.finished, str):
            raise TypeError(f"finished must be several names, got {self.finished!r}")
        if not isinstance(self.finished, Set):
            self.finished = frozenset(self.finished)
        require("anyio")
        self.run_agent = coroutine_of(self.agent)
        self.sampling = SamplingParams() if self.sampling is None else self.sampling
        staleness = self.policy.staleness
        self.staleness = None if staleness is None else StalenessGate(staleness)
        """Counts of results accepted and under way, if the policy limits staleness."""
        self.tell = Observers(self.observers)
        self.gate = GenerationGate()
        self.silence = SilenceTimer(self.policy.silence_warning_s, self._waits_for)
        self.num_attempts = self.num_calls = 0
        """Attempts at episodes, and calls of the environment, that are under way."""
        self.others: list[str] = []
        """What runs wait for while no episode is under way: prompts, or newer weights."""

    @contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Note what a run waits for while the context lasts."""
        self.others.append(what)
        try:
            yield
        finally:
            self.others.remove(what)

    def _waits_for(self) -> str:
        if self.gate.is_still or getattr(self.engine, "is_remote", False):
            return ""  # of episodes elsewhere no sign comes
        if not self.num_attempts:
            return f"waiting for {self.others[0]}" if self.others else ""
        engine, environment = type(self.engine).__name__, type(self.environment).__name__
        return (
            f"episodes under way: {self.num_attempts}, open requests to {engine}: "
            f"{self.gate.num_in_flight}, open calls of {environment}: {self.num_calls}; "
            "RolloutPolicy(episode_timeout_s=...) ends such episodes"
        )


class Attempt:
    """One attempt at an episode: what its agent asks."""

    def __init__(
        self, qid: str, context: RunnerContext, count_turn: Callable[[Turn], None] | None
    ) -> None:
        self.qid = qid
        self.context = context
        self.environment_errors: list[BaseException] = []
        """Exceptions that the environment raised."""
        self.num_requests = 0
        """Requests sent so far."""
        self._is_over = False
        self._count_turn = count_turn
        self._asking: set[asyncio.Task[Any] | None] = set()

    @contextmanager
    def lasting(self) -> Iterator[None]:
        """Count the attempt as under way; at its end, cancel tasks that still ask."""
        self.context.silence.sign()
        self.context.num_attempts += 1
        try:
            yield
        finally:
            self._is_over = True
            self.context.num_attempts -= 1
            for task in self._asking:
                if task is not None:
                    task.cancel()

    async def generate(self, token_ids: Sequence[int], sampling: Any = None) -> Turn:
        """Ask the engine, once generation is not paused; see `Generate`.

        Raises:
            RuntimeError: If the attempt is over.
        """
        prompt_ids = checked_prompt(self.qid, token_ids)
        task, gate = asyncio.current_task(), self.context.gate
        self._asking.add(task)
        try:
            if gate.is_closed:
                with self.context.tell.waiting("pause"):
                    await gate.wait_open()
            if self._is_over:
                raise RuntimeError(f"episode {self.qid!r} is over: it asks no more")
            return await self._ask(prompt_ids, sampling)
        finally:
            self._asking.discard(task)

    async def _ask(self, prompt_ids: npt.NDArray[np.int32], sampling: Any) -> Turn:
        """Send a request, tell observers, and return its checked reply."""
        context, number = self.context, self.num_requests
        self.num_requests += 1
        sampling = context.sampling if sampling is None else sampling
        request = GenerationRequest(self.qid, prompt_ids.tolist(), sampling)
        timeout_s = context.policy.generation_timeout_s
        late = EpisodeTimeoutError(self.qid, f"no reply within {timeout_s} s")
        context.silence.sign()
        context.tell("generation_started", self.qid, number, prompt_ids.size)
        try:
            with context.gate.sending():
                asked = reply_of(context.engine, request)
                reply = await context.gate.in_time(asked, timeout_s, late)
            turn = turn_of(self.qid, prompt_ids, reply)
        except EpisodeError as error:
            context.tell("generation_ended", self.qid, number, error)
            raise
        finally:
            context.silence.sign()
        if self._count_turn is not None:
            self._count_turn(turn)
        context.tell("generation_ended", self.qid, number, reply)
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
        _raise_end(error, task)
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
        attempt, tell = self._attempt, self._attempt.context.tell
        turn = max(attempt.num_requests - 1, 0)
        tell("verification_started", attempt.qid, turn)
        error: BaseException | None = None
        try:
            with self._calling():
                return await self._environment.step(*values, **named)
        except BaseException as raised:
            error = raised
            raise
        finally:
            tell("verification_ended", attempt.qid, turn, error)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        context = self._attempt.context
        context.num_calls += 1
        context.silence.sign()
        try:
            yield
        except BaseException as raised:
            self._attempt.environment_errors.append(raised)
            raise
        finally:
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
    function: Callable[..., Any] | None = agent if callable(agent) else getattr(agent, "run", None)
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
        The agent's trajectories; those without a group get the name of the task.

    Raises:
        TypeError, ValueError: If a `TrajectoryBuffer` would not take what the agent returns.
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
        KeyboardInterrupt: As `SystemExit`, alone or within a group: these end the program.
    """
    attempt = Attempt(prompt.id, context, count_turn)
    timeout_s = context.policy.episode_timeout_s
    late = EpisodeTimeoutError(prompt.id, f"not finished within {timeout_s} s")
    found = await context.gate.in_time(_collect(attempt, prompt), timeout_s, late)
    if not attempt.num_requests and count_turn is not None:  # sampled elsewhere
        for trajectory in found:
            for turn in trajectory.turns:
                count_turn(turn)
    return found


async def _collect(attempt: Attempt, prompt: Prompt) -> Sequence[Trajectory]:
    task = asyncio.current_task()
    try:
        with attempt.lasting():
            environment = RecordingEnvironment(attempt)
            found = await attempt.context.run_agent(prompt, environment, attempt.generate)
        await check_trajectories(found)
        return found  # type: ignore[no-any-return]
    except asyncio.CancelledError as error:
        if task is None or task.cancelling():
            raise
        reason = "something the agent awaited was cancelled"
        raise EpisodeCancelledError(prompt.id, reason) from error
    except BaseException as error:  # of any kind: it must not end the other episodes
        _raise_end(error, task)
        if isinstance(error, EpisodeError) and error.qid == prompt.id:
            raise
        kind = EpisodeTimeoutError if isinstance(error, TimeoutError) else EpisodeError
        known = set(map(id, attempt.environment_errors))
        if any(id(one) in known for one in causes_of(error)):
            kind = EnvironmentFailedError
        raise kind(prompt.id, reason_of(error)) from error


def _raise_end(error: BaseException, task: asyncio.Task[Any] | None) -> None:
    """Raise what ends the program, also from a group, which no task hands on; or this coroutine."""
    if (end := end_of_program(error)) is not None:
        raise end from None
    try:
        is_running = task is not None and asyncio.current_task() is task
    except RuntimeError:  # no event loop runs
        is_running = False
    if isinstance(error, GeneratorExit) and not is_running:
        raise error  # the interpreter closes the coroutine
