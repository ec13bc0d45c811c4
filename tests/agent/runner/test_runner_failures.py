from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from tests.agent.runner.runner_cases import (
    EchoEngine,
    NoEnvironment,
    TwoTurns,
    counted,
    failing,
    prompts,
    roll,
    runner,
    serve,
)
from trajpack.agent.engines.function_engine import FunctionEngine
from trajpack.agent.errors import (
    EngineEndedError,
    EnvironmentFailedError,
    EpisodeError,
    EpisodeTimeoutError,
    GenerationError,
    RequestRefusedError,
)
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.agent.runner.policy import RetryPolicy, RolloutPolicy
from trajpack.agent.runner.runner import Progress, RolloutRunner
from trajpack.agent.seeding import derive_seed
from trajpack.packing.types import Trajectory, Turn


class Panic(BaseException):
    """What compiled extensions raise, tokenizers among them: not even an Exception."""


class Mute(Exception):
    """An exception of others that has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Alike(Exception):
    """An exception that others equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (Mute(), "episode 'q1@0': Mute: without a text"),
        (ZeroDivisionError("no luck"), "episode 'q1@0': ZeroDivisionError: no luck"),
        (EpisodeError("q1@0", "lost"), "episode 'q1@0': lost"),
        (EpisodeError("q7", "lost"), "episode 'q1@0': EpisodeError: episode 'q7': lost"),
        (ValueError("x" * 100_000), f"episode 'q1@0': ValueError: {'x' * 1000}... (99,000 more"),
        (Panic("index out of range"), "episode 'q1@0': Panic: index out of range"),
    ],
)
def test_a_failing_agent_is_a_result_and_the_others_go_on(raised: Any, text: str) -> None:
    results = {r.prompt.id: r for r in roll(failing("q1@0", error=raised), 3)}
    assert [results[qid].error for qid in ("q0", "q2")] == [None, None]
    assert results["q1"].trajectories == ()
    error = results["q1"].error
    assert isinstance(error, EpisodeError)
    assert error.cause == "agent"
    assert str(error).startswith(text)
    assert len(str(error)) < 1100
    assert error is raised or error.__cause__ is raised


def test_the_environment_is_not_blamed_for_an_equal_exception_of_the_agent() -> None:
    class Environment:
        async def step(self, action: Any) -> Any:
            raise Alike

    async def agent(prompt: Prompt, env: Any, generate: Any) -> list[Trajectory]:
        with contextlib.suppress(Alike):
            await env.step(prompt)
        raise Alike

    (result,) = roll(agent, 1, environment=Environment())
    assert type(result.error) is EpisodeError


FAILURES: list[BaseException] = [
    *(ValueError("no"), StopIteration(3), StopAsyncIteration(), MemoryError(), RecursionError()),
    *(BaseException("no"), Panic("no"), asyncio.CancelledError(), ExceptionGroup("", [OSError()])),
    BaseExceptionGroup("", [BaseExceptionGroup("", [Panic("no")])]),
]
ENDS: list[BaseException] = [SystemExit(3), KeyboardInterrupt()]


class Judged(TwoTurns):
    """Asks the environment before it asks the engine."""

    async def run(self, prompt: Prompt, env: Any, generate: Any) -> Any:
        await env.step(prompt)
        return await super().run(prompt, env, generate)


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
def test_every_exception_fails_its_episode_or_ends_the_program(
    raised: BaseException, place: str
) -> None:
    judge = Judge(raised)
    agent = TwoTurns(before=judge.step) if place == "agent" else Judged()
    if raised in ENDS:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            roll(agent, 3, environment=judge)
        assert agent.active == 0
        return
    errors = {result.prompt.id: result.error for result in roll(agent, 3, environment=judge)}
    assert [errors["q0"], errors["q2"]] == [None, None]
    error = errors["q1"]
    assert isinstance(error, EpisodeError)
    assert agent.active == 0
    if not isinstance(raised, asyncio.CancelledError):
        assert error.cause == place


@pytest.mark.attack
@pytest.mark.parametrize("raised", [*FAILURES, *ENDS], ids=repr)
def test_every_exception_of_an_engine_is_a_reply_or_ends_the_program(raised: BaseException) -> None:
    async def draw(ids: Any, sampling: Any) -> Any:
        if ids == [1]:
            raise raised
        return [7], [-1.0], True

    async def body() -> list[Any]:
        asked = [Prompt("q0", [1]), Prompt("q1", [2])]
        async with FunctionEngine(draw) as engine, asyncio.timeout(30):
            running = RolloutRunner(engine, TwoTurns(), NoEnvironment())
            results = [result async for result in running.run(asked)]
            async with running.paused(drain=True):
                return [result.error for result in sorted(results, key=lambda it: it.qid)]

    if raised in ENDS:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            asyncio.run(body())
        return
    failed, well = asyncio.run(body())
    assert well is None
    assert isinstance(failed, EpisodeError)
    assert failed.cause == "generation"


@pytest.mark.parametrize("fault", ["size", "observer"])
def test_a_request_that_fails_before_it_is_sent_leaves_no_count(fault: str) -> None:
    class Panics(RolloutObserver):
        def generation_started(self, *_: Any) -> None:
            raise Panic("no")

    class AsksWithoutSize(TwoTurns):
        async def run(self, prompt: Prompt, env: Any, generate: Any) -> Any:
            await generate(np.array(5))
            raise ValueError("it was sent")

    async def body() -> list[Any]:
        agent = AsksWithoutSize() if fault == "size" else TwoTurns()
        observers = [Panics()] if fault == "observer" else []
        async with EchoEngine() as engine, asyncio.timeout(30):
            running = RolloutRunner(engine, agent, NoEnvironment(), observers=observers)
            results = [result async for result in running.run([Prompt("q0", [1])])]
            async with running.paused(drain=True):
                return results

    (result,) = asyncio.run(body())
    assert isinstance(result.error, EpisodeError)


def test_turns_of_a_failed_episode_are_sampled_but_not_kept() -> None:
    class FailsAtTheEnd(TwoTurns):
        async def run(self, *args: Any) -> list[Trajectory]:
            await super().run(*args)
            raise ValueError("no")

    seen: list[Progress] = []
    roll(FailsAtTheEnd(), 1, on_progress=seen.append)
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
    results = roll(TwoTurns(before=end), counted(prompts(100), taken), concurrency=3)
    assert len(results) == len(taken) <= 5
    assert [result.qid for result in results if result.error is None] == ["q0@0"]


@pytest.mark.parametrize("handling", ["none", "wraps", "groups", "forgets"])
def test_a_failure_of_the_environment_is_told_from_the_agents(handling: str) -> None:
    class Steps:
        async def run(self, prompt: Any, env: Any, generate: Any) -> Any:
            if handling == "groups":
                async with asyncio.TaskGroup() as group:
                    group.create_task(env.step(Prompt("q1@0", [])))
            try:
                await env.step(Prompt("q1@0", []))
            except LookupError as error:
                if handling == "wraps":
                    raise ValueError("no verdict") from error
                if handling == "none":
                    raise
            raise ValueError("another matter")

    (result,) = roll(Steps(), 1, environment=Judge(LookupError("no such answer")))
    assert type(result.error) is (EpisodeError if handling == "forgets" else EnvironmentFailedError)


GOOD: dict[str, Any] = {
    "prompt_ids": [1],
    "completion_ids": [2, 3],
    "completion_logprobs": [-1, -1],
}


def bad(**changes: Any) -> list[Trajectory]:
    return [Trajectory("t", [Turn(**GOOD), Turn(**(GOOD | changes))])]


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "TypeError: the agent must return a list of trajectories, got NoneType"),
        ([None], "TypeError: expected a Trajectory, got NoneType"),
        ([Trajectory("t", [])], "trajectory 't': must have at least one turn"),
        ([Trajectory("t", ["turn"])], "trajectory 't', turn 0: expected a Turn, got str"),  # type: ignore[list-item]
        (bad(completion_ids=[2]), "'t', turn 1: completion_logprobs must have one entry per"),
        (bad(completion_logprobs=[-1, float("nan")]), "turn 1: .* must be finite float32, got nan"),
        (bad(prompt_ids=[]), "turn 1: prompt_ids must not be empty"),
        (bad(reward=float("inf")), "turn 1: reward must be finite"),
        (bad(version_start=2, version_end=1), "turn 1: versions must not run backwards"),
        ([Trajectory("t", [Turn(**GOOD)], turn_discount=float("nan"))], "turn_discount must be"),
        (
            bad(prompt_ids=np.r_[np.zeros(2_000_000, np.int32), np.int32(-1)]),
            "turn 1: prompt_ids must be 0 or more, got -1",
        ),
    ],
)
def test_trajectories_that_a_buffer_would_refuse_are_a_failed_episode(
    returned: Any, reason: str
) -> None:
    class Returns(TwoTurns):
        async def run(self, *values: Any) -> Any:
            return returned if values[0].id == "q0@0" else await super().run(*values)

    results = {r.qid: r for r in roll(Returns(), 2)}
    assert results["q1@0"].error is None
    error = results["q0@0"].error
    assert type(error) is EpisodeError
    assert error.cause == "agent"
    with pytest.raises(EpisodeError, match=f"episode 'q0@0': .*{reason}"):
        raise error
    assert results["q0@0"].trajectories == ()


# retries and time limits


def retrying(attempts: int, **options: Any) -> RolloutPolicy:
    return RolloutPolicy(retries=RetryPolicy(attempts, **({"wait_initial_s": 0.0} | options)))


class Fails(TwoTurns):
    """Raises the given errors, attempt after attempt, and then works."""

    def __init__(self, *errors: type[EpisodeError], only: str | None = None) -> None:
        super().__init__()
        self.errors = errors
        self.only = only
        self.seen: list[Prompt] = []

    async def run(self, *values: Any) -> list[Trajectory]:
        self.seen.append(values[0])
        attempt = sum(prompt.id == values[0].id for prompt in self.seen)
        found = await super().run(*values)
        if attempt <= len(self.errors) and self.only in (None, values[0].id):
            raise self.errors[attempt - 1](values[0].id, f"failure {attempt}")
        return found


def test_a_failure_is_tried_again_under_the_same_name_and_seed() -> None:
    agent = Fails(GenerationError, EpisodeTimeoutError)
    policy = RolloutPolicy(retries=RetryPolicy(3, wait_initial_s=0.0), seed=5)
    results = roll(agent, [Prompt("a", [1]), Prompt("b", [1], seed=3)], group_size=2, policy=policy)
    assert [(result.error, result.attempts) for result in results] == [(None, 3)] * 4
    assert all(len(result.trajectories) == 1 for result in results)
    assert Counter((prompt.id, prompt.seed) for prompt in agent.seen) == {
        (f"{name}@{k}", derive_seed(seed, f"{name}@{k}")): 3
        for name, seed in (("a", 5), ("b", 3))
        for k in (0, 1)
    }
    (result,) = roll(Fails(GenerationError, EpisodeTimeoutError), 1, policy=retrying(2))
    assert isinstance(result.error, EpisodeTimeoutError)
    assert (result.attempts, result.error.reason) == (2, "failure 2")


@pytest.mark.parametrize("kind", [EpisodeError, RequestRefusedError])
def test_a_failure_that_would_come_again_is_not_retried_by_default(
    kind: type[EpisodeError],
) -> None:
    (result,) = roll(Fails(kind), 1, policy=retrying(9))
    assert (result.attempts, type(result.error)) == (1, kind)
    (result,) = roll(Fails(kind), 1, policy=retrying(9, causes=["agent", "refused"]))
    assert (result.attempts, result.error) == (2, None)


def test_a_failed_episode_leaves_its_slot_to_others_while_it_waits() -> None:
    agent = Fails(GenerationError, only="q0@0")
    results = roll(agent, 2, concurrency=1, policy=retrying(2, wait_initial_s=0.2))
    assert [result.qid for result in results] == ["q1@0", "q0@0"]


def test_episodes_that_wait_to_be_tried_again_stop_new_ones() -> None:
    async def body(engine: EchoEngine) -> int:
        policy = retrying(2, wait_initial_s=60.0, wait_max_s=60.0)
        run = runner(engine, Fails(GenerationError), concurrency=3, policy=policy)
        async with aclosing(run.run(prompts(100))) as results:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(results), 0.2)
        return len(engine.opened)

    assert serve(body) == 6


def test_back_off_doubles_up_to_its_bound_and_is_the_same_again() -> None:
    policy = RetryPolicy(9, wait_initial_s=1.0, wait_max_s=5.0)
    for attempts, most in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (2000, 5.0)):
        seconds = [policy.wait_s(f"q{k}", attempts) for k in range(50)]
        assert most / 2 <= min(seconds) < 0.6 * most
        assert 0.9 * most < max(seconds) <= most
        assert seconds == [policy.wait_s(f"q{k}", attempts) for k in range(50)]


@pytest.mark.parametrize("handling", ["obeys", "goes on", "raises another"])
def test_an_episode_that_hangs_is_ended_by_the_clock(handling: str) -> None:
    class Hangs(TwoTurns):
        async def run(self, *values: Any) -> list[Trajectory]:
            if values[0].id == "q0@0":
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    if handling == "obeys":
                        raise
                    if handling == "raises another":
                        raise ValueError("interrupted") from None
                    return []
            return await super().run(*values)

    results = {r.qid: r for r in roll(Hangs(), 3, policy=RolloutPolicy(episode_timeout_s=0.5))}
    error = results["q0@0"].error
    assert isinstance(error, EpisodeTimeoutError)
    assert error.reason == "not finished within 0.5 s"
    assert [results[qid].error for qid in ("q1@0", "q2@0")] == [None, None]
