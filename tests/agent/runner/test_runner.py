from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import pytest

from tests.agent.runner.runner_cases import EchoEngine, TwoTurns, collect, prompts, runner
from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import Prompt, SamplingParams
from trajpack.agent.runner.runner import EpisodeResult, Progress


def test_every_prompt_comes_back_with_its_trajectory() -> None:
    results = asyncio.run(collect(TwoTurns(), prompts(5)))
    assert sorted(result.prompt.id for result in results) == [f"q{k}" for k in range(5)]
    for result in results:
        assert result.error is None
        (trajectory,) = result.trajectories
        assert trajectory.id == result.qid == f"{result.prompt.id}@0"
        assert trajectory.group == result.prompt.id
        assert trajectory.turns[0].completion_ids == [
            result.prompt.input_ids[-1],
            result.prompt.input_ids[-1] + 1,
        ]


def test_samples_of_a_prompt_are_own_episodes_of_one_group() -> None:
    results = asyncio.run(collect(TwoTurns(), prompts(3), group_size=4))
    qids = sorted(result.qid for result in results)
    assert qids == [f"q{k}@{sample}" for k in range(3) for sample in range(4)]
    assert all(result.trajectories[0].group == result.prompt.id for result in results)
    assert all(result.trajectories[0].id == result.qid for result in results)


def test_a_group_named_by_the_agent_stays() -> None:
    results = asyncio.run(collect(TwoTurns(group="mine"), prompts(2)))
    assert [result.trajectories[0].group for result in results] == ["mine", "mine"]


def test_no_prompts_give_no_results() -> None:
    assert asyncio.run(collect(TwoTurns(), [])) == []


def test_prompts_may_come_asynchronously() -> None:
    async def slowly() -> AsyncIterator[Prompt]:
        for prompt in prompts(4):
            await asyncio.sleep(0)
            yield prompt

    assert len(asyncio.run(collect(TwoTurns(), slowly()))) == 4


def test_results_come_as_they_finish() -> None:
    async def wait(prompt: Prompt) -> None:
        await asyncio.sleep({"q0@0": 0.06, "q1@0": 0.03, "q2@0": 0.0}[prompt.id])

    results = asyncio.run(collect(TwoTurns(before=wait), prompts(3)))
    assert [result.prompt.id for result in results] == ["q2", "q1", "q0"]


def test_concurrency_is_bounded_and_prompts_are_taken_lazily() -> None:
    taken: list[str] = []
    agent = TwoTurns(before=lambda _: asyncio.sleep(0.001))

    def lazily() -> Iterator[Prompt]:
        for prompt in prompts(40):
            taken.append(prompt.id)
            assert len(taken) - finished() <= 4
            yield prompt

    def finished() -> int:
        return progress[-1].num_finished if progress else 0

    progress: list[Progress] = []
    results = asyncio.run(collect(agent, lazily(), concurrency=3, on_progress=progress.append))
    assert len(results) == len(taken) == 40
    assert agent.most_active == 3


def test_episodes_wait_for_a_slow_reader() -> None:
    async def body() -> int:
        async with EchoEngine() as engine:
            results = runner(engine, TwoTurns(), concurrency=3).run(prompts(100))
            async with aclosing(results):
                await anext(results)
                await asyncio.sleep(0.1)
                return len(engine.opened)

    # One taken, three that wait to be taken, three more that hold their slots.
    assert asyncio.run(body()) <= 7


def test_a_runner_can_run_again_and_at_the_same_time() -> None:
    async def body() -> list[int]:
        async with EchoEngine() as engine:
            one = runner(engine, TwoTurns(before=lambda _: asyncio.sleep(0.001)))

            async def count(asked: list[Prompt]) -> int:
                return len([r async for r in one.run(asked) if r.error is None])

            both = await asyncio.gather(count(prompts(6)[:3]), count(prompts(6)[3:]))
            return [*both, await count(prompts(6))]

    assert asyncio.run(body()) == [3, 3, 6]


@pytest.mark.parametrize("option", ["concurrency", "group_size"])
def test_counts_below_one_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        runner(EchoEngine(), TwoTurns(), **{option: 0})


def test_the_real_engine_serves_a_run_from_start_to_end() -> None:
    model, tokenizer = build_tiny_model()
    asked = [Prompt(f"q{k}", tokenizer(f"What is {k} + 30?")["input_ids"]) for k in range(6)]
    agent = TwoTurns(sampling=SamplingParams(max_new_tokens=12))

    async def body() -> list[EpisodeResult]:
        async with TransformersEngine(model, num_blocks=64, page_size=16) as engine:
            too_long = Prompt("too long", [1] * 2000)
            run = runner(engine, agent, concurrency=5, group_size=2).run([*asked, too_long])
            return [result async for result in run]

    results = asyncio.run(body())
    failed = {result.qid: str(result.error) for result in results if result.error is not None}
    assert sorted(failed) == ["too long@0", "too long@1"]
    assert all("cache of 1024 tokens" in reason for reason in failed.values())
    for result in results:
        for trajectory in result.trajectories:
            first, second = trajectory.turns
            assert list(second.prompt_ids) == [*first.prompt_ids, *first.completion_ids]


def test_episodes_that_were_finished_before_are_not_begun() -> None:
    results = asyncio.run(
        collect(TwoTurns(), prompts(3), group_size=2, finished={"q0@1", "q2@0", "q2@1"})
    )
    assert sorted(result.qid for result in results) == ["q0@0", "q1@0", "q1@1"]
    assert asyncio.run(collect(TwoTurns(), prompts(2), finished=["q0@0", "q1@0"])) == []


def test_what_is_no_prompt_ends_the_run() -> None:
    with pytest.raises(TypeError, match="prompts must be Prompts, got str"):
        asyncio.run(collect(TwoTurns(), ["What is 1 + 1?"]))
