from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from tests.agent.runner.runner_cases import EchoEngine, TwoTurns, collect, prompts, runner
from trajpack.agent.errors import (
    EnvironmentFailedError,
    EpisodeError,
    EpisodeTimeoutError,
    GenerationError,
    RequestRefusedError,
)
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.policy import BackOff, RetryPolicy, RolloutPolicy
from trajpack.agent.runner.runner import RolloutRunner
from trajpack.agent.seeding import derive_seed
from trajpack.packing.types import Trajectory, Turn

AT_ONCE = BackOff(0.0)


def retrying(attempts: int, **options: Any) -> RolloutPolicy:
    return RolloutPolicy(retries=RetryPolicy(attempts, wait=AT_ONCE, **options))


class Fails(TwoTurns):
    """Raises what it is given, attempt after attempt, and then works."""

    def __init__(self, *errors: type[EpisodeError] | None) -> None:
        super().__init__()
        self.errors = errors
        self.seen: list[Prompt] = []

    async def collect_trajectory(self, *values: Any) -> list[Trajectory]:
        self.seen.append(values[0])
        attempt = sum(prompt.id == values[0].id for prompt in self.seen)
        found = await super().collect_trajectory(*values)
        if attempt <= len(self.errors) and (error := self.errors[attempt - 1]) is not None:
            raise error(values[0].id, f"failure {attempt}")
        return found


def test_a_failure_is_tried_again_under_the_same_name_and_seed() -> None:
    agent = Fails(GenerationError, EpisodeTimeoutError)
    policy = RolloutPolicy(retries=RetryPolicy(3, wait=AT_ONCE), seed=5)
    results = asyncio.run(collect(agent, prompts(2), policy=policy))
    assert [(result.error, result.attempts) for result in results] == [(None, 3)] * 2
    assert all(len(result.trajectories) == 1 for result in results)
    first = [prompt for prompt in agent.seen if prompt.id == "q0@0"]
    assert len(first) == 3
    assert first == [Prompt("q0@0", [0, 1], 0, derive_seed(5, "q0@0"))] * 3


def test_a_prompt_with_a_seed_of_its_own_gives_its_episodes_others() -> None:
    agent = Fails()
    asyncio.run(collect(agent, [Prompt("a", [1]), Prompt("b", [1], seed=3)], group_size=2))
    assert {prompt.id: prompt.seed for prompt in agent.seen} == {
        "a@0": derive_seed(0, "a@0"),
        "a@1": derive_seed(0, "a@1"),
        "b@0": derive_seed(3, "b@0"),
        "b@1": derive_seed(3, "b@1"),
    }


def test_the_last_failure_is_the_result_once_attempts_run_out() -> None:
    agent = Fails(GenerationError, EpisodeTimeoutError, GenerationError)
    (result,) = asyncio.run(collect(agent, prompts(1), policy=retrying(2)))
    assert isinstance(result.error, EpisodeTimeoutError)
    assert (result.attempts, result.error.reason) == (2, "failure 2")


@pytest.mark.parametrize("kind", [EpisodeError, RequestRefusedError])
def test_what_would_fail_again_is_not_tried_again(kind: type[EpisodeError]) -> None:
    (result,) = asyncio.run(collect(Fails(kind), prompts(1), policy=retrying(9)))
    assert (result.attempts, type(result.error)) == (1, kind)
    policy = retrying(9, causes=["agent", "refused"])
    (result,) = asyncio.run(collect(Fails(kind), prompts(1), policy=policy))
    assert (result.attempts, result.error) == (2, None)


def test_a_failed_episode_leaves_its_slot_to_others_while_it_waits() -> None:
    class FirstFails(TwoTurns):
        fails = True

        async def collect_trajectory(self, *values: Any) -> list[Trajectory]:
            if values[0].id == "q0@0" and self.fails:
                self.fails = False
                raise GenerationError("q0@0", "lost")
            return await super().collect_trajectory(*values)

    policy = RolloutPolicy(retries=RetryPolicy(2, wait=BackOff(0.2)))
    results = asyncio.run(collect(FirstFails(), prompts(2), concurrency=1, policy=policy))
    assert [result.qid for result in results] == ["q1@0", "q0@0"]


def test_episodes_that_wait_to_be_tried_again_stop_new_ones() -> None:
    policy = RolloutPolicy(retries=RetryPolicy(2, wait=BackOff(60.0, 60.0)))

    async def body() -> int:
        async with EchoEngine() as engine:
            run = runner(engine, Fails(GenerationError), concurrency=3, policy=policy)
            async with aclosing(run.run(prompts(100))) as results:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(results), 0.2)
            return len(engine.opened)

    assert asyncio.run(body()) == 6


def test_back_off_doubles_up_to_its_bound_and_is_the_same_again() -> None:
    wait = BackOff(1.0, 5.0)
    for attempts, most in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (2000, 5.0)):
        seconds = [wait.seconds(f"q{k}", attempts) for k in range(50)]
        assert most / 2 <= min(seconds) < 0.6 * most
        assert 0.9 * most < max(seconds) <= most
        assert seconds == [wait.seconds(f"q{k}", attempts) for k in range(50)]


@pytest.mark.parametrize("handling", ["obeys", "goes on", "raises another"])
def test_an_episode_that_hangs_is_ended_by_the_clock(handling: str) -> None:
    class Hangs(TwoTurns):
        async def collect_trajectory(self, *values: Any) -> list[Trajectory]:
            if values[0].id == "q0@0":
                try:
                    await asyncio.sleep(10)
                except asyncio.CancelledError:
                    if handling == "obeys":
                        raise
                    if handling == "raises another":
                        raise ValueError("interrupted") from None
                    return []
            return await super().collect_trajectory(*values)

    policy = RolloutPolicy(episode_timeout_s=0.05)
    results = {r.qid: r for r in asyncio.run(collect(Hangs(), prompts(3), policy=policy))}
    error = results["q0@0"].error
    assert isinstance(error, EpisodeTimeoutError)
    assert error.reason == "not finished within 0.05 s"
    assert [results[qid].error for qid in ("q1@0", "q2@0")] == [None, None]


class Raises:
    """An environment that raises."""

    async def reset(self) -> None:
        return None

    async def step(self, action: Any) -> Any:
        raise LookupError("no such answer")


@pytest.mark.parametrize(
    ("handling", "kind"),
    [
        ("none", EnvironmentFailedError),
        ("wraps", EnvironmentFailedError),
        ("groups", EnvironmentFailedError),
        ("forgets", EpisodeError),
    ],
)
def test_a_failure_of_the_environment_is_told_from_the_agents(
    handling: str, kind: type[EpisodeError]
) -> None:
    class Steps:
        async def collect_trajectory(self, prompt: Any, env: Any, *queues: Any) -> Any:
            assert env.__class__.__name__ == "RecordingEnvironment"
            if handling == "groups":
                async with asyncio.TaskGroup() as group:
                    group.create_task(env.step("x"))
            try:
                await env.step("x")
            except LookupError as error:
                if handling == "wraps":
                    raise ValueError("no verdict") from error
                if handling == "none":
                    raise
            raise ValueError("another matter")

    async def body() -> EpisodeError | None:
        async with EchoEngine() as engine:
            run = RolloutRunner(engine, Steps(), Raises())
            (result,) = [result async for result in run.run(prompts(1))]
            return result.error

    assert type(asyncio.run(body())) is kind


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
        ("text", "TypeError: the agent must return a list of trajectories, got str"),
        ([None], "TypeError: expected a Trajectory, got NoneType"),
        ([Trajectory("t", [])], "trajectory 't': must have at least one turn"),
        ([Trajectory("t", ["turn"])], "trajectory 't', turn 0: expected a Turn, got str"),  # type: ignore[list-item]
        (bad(completion_ids=[2]), "'t', turn 1: completion_logprobs must have one entry per"),
        (bad(completion_logprobs=[-1, float("nan")]), "turn 1: .* must be finite float32, got nan"),
        (bad(completion_ids=[2, -3]), "turn 1: completion_ids must be 0 or more, got -3"),
        (bad(completion_ids=[2, 0.5]), "TypeError: .* completion_ids must be integers"),
        (bad(prompt_ids=[]), "turn 1: prompt_ids must not be empty"),
        (bad(reward=float("inf")), "turn 1: reward must be finite"),
        (bad(truncated="no"), "turn 1: truncated must be a bool"),
        (bad(version_start=2, version_end=1), "turn 1: versions must not run backwards"),
        ([Trajectory("t", [Turn(**GOOD)], turn_discount=float("nan"))], "turn_discount must be"),
        (bad(prompt_ids=[1] * 60_000 + [-1]), "turn 1: prompt_ids must be 0 or more, got -1"),
        (
            bad(prompt_ids=np.r_[np.zeros(2_000_000, np.int32), np.int32(-1)]),
            "turn 1: prompt_ids must be 0 or more, got -1",
        ),
    ],
)
def test_what_a_buffer_would_refuse_is_a_failed_episode(returned: Any, reason: str) -> None:
    class Returns(TwoTurns):
        async def collect_trajectory(self, *values: Any) -> Any:
            return returned if values[0].id == "q0@0" else await super().collect_trajectory(*values)

    results = {r.qid: r for r in asyncio.run(collect(Returns(), prompts(2)))}
    assert results["q1@0"].error is None
    error = results["q0@0"].error
    assert type(error) is EpisodeError
    assert error.cause == "agent"
    with pytest.raises(EpisodeError, match=f"episode 'q0@0': .*{reason}"):
        raise error
    assert results["q0@0"].trajectories == ()


def test_an_exception_may_be_broken_or_endless() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise KeyError("none")

    async def fail(prompt: Prompt) -> None:
        raise Broken if prompt.id == "q0@0" else ValueError("x" * 100_000)

    results = {r.qid: r for r in asyncio.run(collect(TwoTurns(before=fail), prompts(2)))}
    assert str(results["q0@0"].error) == "episode 'q0@0': Broken without a text"
    assert 1000 < len(str(results["q1@0"].error)) < 1100


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RetryPolicy(0), "max_attempts must be at least 1, got 0"),
        (lambda: RetryPolicy(2, causes=["luck"]), r"causes must be among .* got \['luck'\]"),
        (lambda: BackOff(-1.0), "initial_s must be 0 or more"),
        (lambda: BackOff(max_s=float("nan")), "max_s must be 0 or more"),
        (lambda: RolloutPolicy(episode_timeout_s=0.0), "episode_timeout_s must be positive"),
    ],
)
def test_rules_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(TypeError, match="causes must be several, got 'stale'"):
        RetryPolicy(2, causes="stale")
