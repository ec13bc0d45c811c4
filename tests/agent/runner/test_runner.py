from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, NamedTuple

import pytest

from tests.agent.runner.runner_cases import (
    EchoEngine,
    NoEnvironment,
    TwoTurns,
    prompts,
    roll,
    runner,
    serve,
    take,
)
from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.runner import Progress, RolloutRunner


@pytest.mark.parametrize("group", [None, "mine"])
def test_every_sample_comes_back_with_its_trajectory(group: str | None) -> None:
    results = roll(TwoTurns(group=group), 3, group_size=4)
    qids = sorted(result.qid for result in results)
    assert qids == [f"q{k}@{sample}" for k in range(3) for sample in range(4)]
    for result in results:
        assert result.error is None
        (trajectory,) = result.trajectories
        assert trajectory.id == result.qid == f"{result.prompt.id}@{result.sample}"
        assert trajectory.group == (group or result.prompt.id)
        last = result.prompt.input_ids[-1]
        assert list(trajectory.turns[0].completion_ids) == [last, last + 1]


def test_results_come_as_they_finish_of_prompts_that_come_by_and_by() -> None:
    async def slowly() -> AsyncIterator[Prompt]:
        for prompt in prompts(3):
            await asyncio.sleep(0)
            yield prompt

    wait_s = {"q0@0": 0.06, "q1@0": 0.03, "q2@0": 0.0}
    results = roll(TwoTurns(before=lambda prompt: asyncio.sleep(wait_s[prompt.id])), slowly())
    assert [result.prompt.id for result in results] == ["q2", "q1", "q0"]
    assert roll(TwoTurns(), []) == []
    with pytest.raises(TypeError, match="prompts must be Prompts, got str"):
        roll(TwoTurns(), ["What is 1 + 1?"])


def test_concurrency_is_bounded_and_prompts_are_taken_lazily() -> None:
    taken: list[str] = []
    progress: list[Progress] = []
    agent = TwoTurns(before=lambda _: asyncio.sleep(0.001))

    def lazily() -> Iterator[Prompt]:
        for prompt in prompts(40):
            taken.append(prompt.id)
            assert len(taken) - (progress[-1].num_finished if progress else 0) <= 6
            yield prompt

    results = roll(agent, lazily(), concurrency=3, on_progress=progress.append)
    assert len(results) == len(taken) == 40
    assert agent.most_active == 3


def test_episodes_wait_for_a_slow_reader() -> None:
    async def body(engine: EchoEngine) -> int:
        async with aclosing(runner(engine, TwoTurns(), concurrency=3).run(prompts(100))) as results:
            await anext(results)
            await asyncio.sleep(0.1)
            return len(engine.opened)

    # One taken, three that wait to be taken, three more that hold their slots.
    assert serve(body) <= 7


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"concurrency": 0}, ValueError, "concurrency must be at least 1, got 0"),
        ({"concurrency": 1.5}, TypeError, "concurrency must be an integer"),
        ({"group_size": 0}, ValueError, "group_size must be at least 1, got 0"),
        ({"group_size": "2"}, TypeError, "group_size must be an integer"),
        ({"policy": None}, TypeError, "policy must be a RolloutPolicy, got NoneType"),
        ({"finished": "q0@0"}, TypeError, "finished must be several names, got 'q0@0'"),
    ],
)
def test_wrong_options_are_refused(options: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        runner(EchoEngine(), TwoTurns(), **options)


class SyncEngine(EchoEngine):
    def generate(self, request: Any) -> Any:
        return request


class SyncEnvironment(NoEnvironment):
    def step(self, action: Any) -> Any:
        return None, 1.0, True, False, {}


class Asks(TwoTurns):
    async def run(self, prompt: Any, env: Any, generate: Any) -> Any:
        await env.step(("x", ["y"]))


class Rollout(NamedTuple):
    engine: Any = EchoEngine()
    agent: Any = TwoTurns()
    environment: Any = NoEnvironment()


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (Rollout(engine=print), r"engine must have .*; wrap it: FunctionEngine\(function\)"),
        (Rollout(engine=EchoEngine), r"engine must be an object, got the class EchoEngine"),
        (Rollout(agent=TwoTurns), r"got the class TwoTurns; make one: TwoTurns\(\.\.\.\)"),
        (
            Rollout(environment=NoEnvironment),
            "environment must be .* class NoEnvironment; make one",
        ),
        (
            Rollout(SyncEngine()),
            "generate of the engine must be `async def`, got GenerationRequest",
        ),
        (Rollout(agent=lambda *_: ()), "run of the agent must be `async def`, got tuple from it"),
        (
            Rollout(agent=Asks(), environment=SyncEnvironment()),
            "a method of the environment must be `async def`, got tuple from it",
        ),
    ],
)
def test_what_is_no_object_or_no_coroutine_is_named(rollout: Rollout, message: str) -> None:
    async def body(_: Any) -> None:
        (result,) = await take(RolloutRunner(*rollout).run(prompts(1)))
        raise result.error

    with pytest.raises((TypeError, EpisodeError), match=message):
        serve(body)


def test_episodes_that_were_finished_before_are_not_begun() -> None:
    results = roll(TwoTurns(), 3, group_size=2, finished={"q0@1", "q2@0", "q2@1"})
    assert sorted(result.qid for result in results) == ["q0@0", "q1@0", "q1@1"]
    for finished in (["q0@0", "q1@0"], (f"q{k}@0" for k in range(2)), {"q0@0": 1, "q1@0": 2}):
        assert roll(TwoTurns(), 2, finished=finished) == []
