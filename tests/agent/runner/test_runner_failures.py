from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.agent.runner.runner_cases import EchoEngine, NoEnvironment, TwoTurns, collect, prompts
from trajpack.agent.errors import EngineEndedError, EpisodeError
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.attempt import RunnerContext, attempt_episode
from trajpack.agent.runner.runner import Progress, RolloutRunner
from trajpack.packing.types import Trajectory


def test_a_failing_agent_is_a_result_and_the_others_go_on() -> None:
    async def fail(prompt: Prompt) -> None:
        if prompt.id == "q1@0":
            raise ZeroDivisionError("no such luck")
        if prompt.id == "q2@0":
            raise EpisodeError("q2@0", "lost")
        if prompt.id == "q3@0":
            raise EpisodeError("another", "lost")

    results = {r.prompt.id: r for r in asyncio.run(collect(TwoTurns(before=fail), prompts(5)))}
    assert [results[qid].error for qid in ("q0", "q4")] == [None, None]
    assert all(results[qid].trajectories == () for qid in ("q1", "q2", "q3"))
    error = results["q1"].error
    assert isinstance(error, EpisodeError)
    assert str(error) == "episode 'q1@0': ZeroDivisionError: no such luck"
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert str(results["q2"].error) == "episode 'q2@0': lost"
    assert str(results["q3"].error) == ("episode 'q3@0': EpisodeError: episode 'another': lost")


def test_a_cancellation_from_within_the_agent_is_a_failure_like_others() -> None:
    async def cancelled(prompt: Prompt) -> None:
        task = asyncio.create_task(asyncio.sleep(10))
        task.cancel()
        await task

    results = asyncio.run(collect(TwoTurns(before=cancelled), prompts(2)))
    assert all("was cancelled" in str(result.error) for result in results)


class Panic(BaseException):
    """What compiled extensions raise, tokenizers among them: not even an Exception."""


@pytest.mark.parametrize(
    "raised", [Panic("index out of range"), BaseExceptionGroup("several", [Panic("no")])]
)
def test_what_is_no_exception_is_a_failure_like_others(raised: BaseException) -> None:
    async def panic(prompt: Prompt) -> None:
        if prompt.id == "q1@0":
            raise raised

    results = {r.prompt.id: r for r in asyncio.run(collect(TwoTurns(before=panic), prompts(3)))}
    assert [results[qid].error for qid in ("q0", "q2")] == [None, None]
    error = results["q1"].error
    assert isinstance(error, EpisodeError)
    assert error.__cause__ is raised


@pytest.mark.parametrize(
    "raised", [SystemExit(3), BaseExceptionGroup("several", [KeyboardInterrupt()])]
)
def test_what_ends_the_program_is_no_failure(raised: BaseException) -> None:
    async def leave(prompt: Prompt) -> None:
        raise raised

    with pytest.raises(type(raised)):
        asyncio.run(collect(TwoTurns(before=leave), prompts(1)))


FAILURES: list[BaseException] = [
    *(ValueError("no"), StopIteration(3), StopAsyncIteration(), MemoryError(), RecursionError()),
    *(BaseException("no"), Panic("no"), asyncio.CancelledError(), ExceptionGroup("", [OSError()])),
    BaseExceptionGroup("", [BaseExceptionGroup("", [Panic("no")])]),
]
ENDS: list[BaseException] = [SystemExit(3), BaseExceptionGroup("", [OSError(), SystemExit(3)])]


class Judged(TwoTurns):
    """Asks the environment before it asks the engine."""

    async def collect_trajectory(self, prompt: Prompt, env: Any, *queues: Any) -> Any:
        await env.step(prompt)
        return await super().collect_trajectory(prompt, env, *queues)


class Judge(NoEnvironment):
    """Raises an error for the second prompt."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0)
        if action.id == "q1@0":
            raise self.error


@pytest.mark.attack
@pytest.mark.parametrize("place", ["agent", "environment"])
@pytest.mark.parametrize("raised", [*FAILURES, *ENDS], ids=repr)
def test_whatever_is_raised_fails_its_episode_or_ends_the_program(
    raised: BaseException, place: str
) -> None:
    async def body() -> dict[str, Any]:
        judge = Judge(raised)
        agent = TwoTurns(before=judge.step) if place == "agent" else Judged()
        async with EchoEngine() as engine:
            try:
                results = [r async for r in RolloutRunner(engine, agent, judge).run(prompts(3))]
            finally:
                assert engine.open == {}
                assert agent.active == 0
        return {result.prompt.id: result.error for result in results}

    if raised in ENDS:
        with pytest.raises(type(raised)):
            asyncio.run(body())
        return
    errors = asyncio.run(body())
    assert [errors["q0"], errors["q2"]] == [None, None]
    assert isinstance(errors["q1"], EpisodeError)


@pytest.mark.parametrize(
    "raised", [GeneratorExit("by the agent"), BaseExceptionGroup("several", [GeneratorExit()])]
)
def test_a_generator_exit_of_an_agent_is_a_failure_like_others(raised: BaseException) -> None:
    async def leave(prompt: Prompt) -> None:
        if prompt.id == "q1@0":
            raise raised

    results = {r.prompt.id: r for r in asyncio.run(collect(TwoTurns(before=leave), prompts(3)))}
    assert [results[qid].error for qid in ("q0", "q2")] == [None, None]
    error = results["q1"].error
    assert isinstance(error, EpisodeError)
    assert error.cause == "agent"
    assert error.__cause__ is raised


def test_a_generator_exit_of_an_environment_is_its_failure() -> None:
    class Leaves(NoEnvironment):
        async def step(self, action: Any) -> Any:
            raise GeneratorExit

    class Steps(TwoTurns):
        async def collect_trajectory(self, prompt: Prompt, env: Any, *queues: Any) -> Any:
            await env.step(None)

    async def body() -> list[str]:
        async with EchoEngine() as engine:
            results = RolloutRunner(engine, Steps(), Leaves()).run(prompts(2))
            return [result.error.cause async for result in results if result.error]

    assert asyncio.run(body()) == ["environment", "environment"]


def test_a_coroutine_that_is_closed_without_an_event_loop_ends_silently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    closed: list[str] = []

    async def wait(prompt: Prompt) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except GeneratorExit:
            closed.append(prompt.id)
            raise

    loop = asyncio.new_event_loop()
    context = RunnerContext(EchoEngine(), TwoTurns(before=wait), NoEnvironment())
    task = loop.create_task(attempt_episode(context, Prompt("q0@0", [1]), "q0"))
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    with contextlib.suppress(AttributeError):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = task.get_coro()
    assert coroutine is not None
    coroutine.close()
    del task, coroutine
    gc.collect()
    assert closed == ["q0@0"]
    assert unraisable == []


def test_what_is_no_list_of_trajectories_is_a_failure() -> None:
    class Broken:
        async def collect_trajectory(self, *args: Any) -> Any:
            return None

    (result,) = asyncio.run(collect(Broken(), prompts(1)))
    assert "TypeError" in str(result.error)


def test_a_name_that_is_in_flight_already_fails_and_leaves_the_first_alone() -> None:
    twice = [Prompt("same", [1]), Prompt("same", [2])]
    results = asyncio.run(collect(TwoTurns(before=lambda _: asyncio.sleep(0.01)), twice))
    assert [result.error is None for result in results] == [False, True]
    assert "'same@0' is open already" in str(results[0].error)


def test_turns_of_a_failed_episode_are_sampled_but_not_kept() -> None:
    class FailsAtTheEnd(TwoTurns):
        async def collect_trajectory(self, *args: Any) -> list[Trajectory]:
            await super().collect_trajectory(*args)
            raise ValueError("no")

    seen: list[Progress] = []
    asyncio.run(collect(FailsAtTheEnd(), prompts(1), on_progress=seen.append))
    assert (seen[-1].num_turns, seen[-1].num_kept_turns, seen[-1].num_failed) == (2, 0, 1)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_no_prompts_are_drawn_once_the_engine_has_ended(is_wrapped: bool) -> None:
    async def end(prompt: Prompt) -> None:
        if prompt.id != "q0@0":
            await asyncio.sleep(0.005)
            error = EngineEndedError(prompt.id, "generation has died")
            if is_wrapped:
                raise ValueError("no reply") from error
            raise error

    taken: list[str] = []

    def lazily() -> Iterator[Prompt]:
        for prompt in prompts(100):
            taken.append(prompt.id)
            yield prompt

    results = asyncio.run(collect(TwoTurns(before=end), lazily(), concurrency=3))
    assert len(results) == len(taken) <= 5
    assert [result.qid for result in results if result.error is None] == ["q0@0"]
