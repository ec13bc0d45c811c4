"""One attempt at an episode: its requests and its environment, and the failure that ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from trajpack.agent.errors import (
    EnvironmentFailedError,
    EpisodeCancelledError,
    EpisodeError,
    EpisodeTimeoutError,
    GenerationError,
    causes_of,
    reason_of,
)
from trajpack.agent.protocols import Engine, Generate, GenerationOutput, GenerationRequest, Prompt
from trajpack.agent.runner.replies import checked_prompt, checked_trajectories, turn_of
from trajpack.packing.types import Trajectory, Turn

if TYPE_CHECKING:
    from trajpack.agent.runner.runner import RolloutRunner

CountTurn: TypeAlias = Callable[[Turn], None]
ENDS = KeyboardInterrupt, SystemExit, GeneratorExit
"""Exceptions that end the program or the coroutine, and not an episode alone."""


class Attempt:
    """One attempt at an episode: what its agent asks."""

    def __init__(self, qid: str, runner: RolloutRunner, count_turn: CountTurn | None) -> None:
        self.qid, self.runner = qid, runner
        self.environment_errors: list[BaseException] = []
        """Exceptions that the environment raised."""
        self.num_requests = 0
        """Requests sent so far."""
        self._is_over = False
        self._count_turn = count_turn
        self._asking: set[asyncio.Task[Any] | None] = set()

    async def run(self, prompt: Prompt) -> Sequence[Trajectory]:
        """Run the agent, and cancel tasks that still ask at its end."""
        try:
            environment = ReportingEnvironment(self)
            answer = self.runner.run_agent(prompt, environment, self.generate)
            trajectories = await awaitable(answer, "run of the agent")
            return await checked_trajectories(trajectories)
        except ENDS:
            raise
        except asyncio.CancelledError as error:
            if _is_being_cancelled():
                raise
            reason = "something the agent awaited was cancelled"
            raise EpisodeCancelledError(self.qid, reason) from error
        except BaseException as error:  # of any kind: it must not end the other episodes
            if isinstance(error, EpisodeError) and error.qid == self.qid:
                raise
            kind = EpisodeTimeoutError if isinstance(error, TimeoutError) else EpisodeError
            raised = {id(cause) for cause in causes_of(error)}
            if any(id(known) in raised for known in self.environment_errors):
                kind = EnvironmentFailedError
            raise kind(self.qid, reason_of(error)) from error
        finally:
            self._is_over = True
            for task in self._asking:
                if task is not None:
                    task.cancel()

    async def generate(self, token_ids: Sequence[int], sampling: Any = None) -> Turn:
        """Ask the engine, once generation is not paused, and check its reply; see `Generate`."""
        prompt_ids, runner = checked_prompt(self.qid, token_ids), self.runner
        sampling = runner.sampling if sampling is None else sampling
        request = GenerationRequest(self.qid, prompt_ids.tolist(), sampling)
        timeout_s = runner.policy.generation_timeout_s
        late = EpisodeTimeoutError(self.qid, f"no reply within {timeout_s} s")
        task = asyncio.current_task()
        self._asking.add(task)
        try:
            await runner.gate.wait_open()
            if self._is_over:
                raise RuntimeError(f"episode {self.qid!r} is over: it asks no more")
            number = self.num_requests
            self.num_requests += 1
            runner.tell("generation_started", self.qid, number, prompt_ids.size)
            try:
                reply = await runner.gate.send(reply_of(runner.engine, request), timeout_s, late)
                turn = turn_of(self.qid, prompt_ids, reply)
            except EpisodeError as error:
                runner.tell("generation_ended", self.qid, number, error)
                raise
        finally:
            self._asking.discard(task)
        if self._count_turn is not None:
            self._count_turn(turn)
        runner.tell("generation_ended", self.qid, number, reply)
        return turn


async def reply_of(engine: Engine, request: GenerationRequest) -> GenerationOutput:
    """Return what the engine returns, or raise its failure as a `GenerationError`."""
    try:
        reply: GenerationOutput = await awaitable(
            engine.generate(request), "generate of the engine"
        )
        return reply
    except GenerationError as error:
        if error.qid != request.qid:
            raise type(error)(request.qid, error.reason) from error
        # The error says all there is to say; frames would keep bodies of replies alive.
        error.__context__ = None
        raise error.with_traceback(None) from error.__cause__
    except ENDS:
        raise
    except asyncio.CancelledError as error:
        if _is_being_cancelled():
            raise
        raise GenerationError(request.qid, "the generation was cancelled") from error
    except BaseException as error:  # a defect of an engine, of any kind, fails its request alone
        reason = f"the engine failed: {reason_of(error)}"
        raise GenerationError(request.qid, reason) from error


class ReportingEnvironment:
    """Proxy of the environment that reports the calls of one attempt, and their exceptions."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._environment = attempt.runner.environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def reset(self, *values: Any, **named: Any) -> Any:
        """Start an episode."""
        return await self._call(self._environment.reset, values, named)

    async def step(self, *values: Any, **named: Any) -> Any:
        """Take an action."""
        qid, tell = self._attempt.qid, self._attempt.runner.tell
        turn = max(self._attempt.num_requests - 1, 0)
        tell("verification_started", qid, turn)
        try:
            answer = await self._call(self._environment.step, values, named)
        except BaseException as error:
            tell("verification_ended", qid, turn, error)
            raise
        tell("verification_ended", qid, turn, None)
        return answer

    async def _call(
        self, method: Callable[..., Any], values: Sequence[Any], named: Mapping[str, Any]
    ) -> Any:
        runner = self._attempt.runner
        runner.num_calls += 1
        try:
            return await awaitable(method(*values, **named), "a method of the environment")
        except BaseException as error:
            self._attempt.environment_errors.append(error)
            raise
        finally:
            runner.num_calls -= 1


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def check_serving(engine: Engine) -> None:
    """Call the engine's `check_serving`, if it has one."""
    check = getattr(engine, "check_serving", None)
    if check is not None:
        check()


def awaitable(answer: Any, method: str) -> Awaitable[Any]:
    """Return what a method returned, if it can be awaited."""
    if not isinstance(answer, Awaitable):
        raise TypeError(f"{method} must be `async def`, got {type(answer).__name__} from it")
    return answer


def check_made(name: str, value: Any) -> None:
    """Raise if ``value`` is a class where one of its objects is needed."""
    if isinstance(value, type):
        made = f"{value.__name__}(...)"
        raise TypeError(
            f"{name} must be an object, got the class {value.__name__}; make one: {made}"
        )


def coroutine_of(agent: Any) -> Callable[[Prompt, Any, Generate], Awaitable[Any]]:
    """Return an agent's coroutine function: the agent, if it can be called, or its ``run``."""
    check_made("agent", agent)
    function: Callable[..., Any] | None = agent if callable(agent) else getattr(agent, "run", None)
    if not callable(function):
        raise TypeError(
            "an agent must have a coroutine run(prompt, env, generate) or be one, got "
            f"{type(agent).__name__}"
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
    answer = coroutine_of(agent)(prompt, env, generate)
    trajectories = await awaitable(answer, "run of the agent")
    return labelled(await checked_trajectories(trajectories), prompt.task)


def labelled(trajectories: Sequence[Trajectory], group: str) -> tuple[Trajectory, ...]:
    """Return trajectories, of which those without a group get this one."""
    return tuple(
        path if path.group is not None else replace(path, group=group) for path in trajectories
    )


async def attempt_episode(
    runner: RolloutRunner, prompt: Prompt, *, count_turn: CountTurn | None = None
) -> Sequence[Trajectory]:
    """Run the episode ``prompt.id`` once and return its trajectories, complete and checked.

    Any failure is an `EpisodeError` with the original exception as its cause, but a cancellation of
    the task itself and `ENDS`.
    """
    attempt = Attempt(prompt.id, runner, count_turn)
    timeout_s = runner.policy.episode_timeout_s
    late = EpisodeTimeoutError(prompt.id, f"not finished within {timeout_s} s")
    trajectories = await runner.gate.in_time(attempt.run(prompt), timeout_s, late)
    if not attempt.num_requests and count_turn is not None:  # sampled elsewhere
        for trajectory in trajectories:
            for turn in trajectory.turns:
                count_turn(turn)
    return trajectories
