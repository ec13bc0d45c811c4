"""`EpisodeAgent`: `generate` within `run`, its errors, and episodes at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from trajpack.agent import (
    EpisodeAgent,
    EpisodeError,
    EpisodeResult,
    FunctionEngine,
    GenerationError,
    Prompt,
    RolloutRunner,
    SamplingParams,
)
from trajpack.packing.types import Trajectory, Turn

Run = Callable[[EpisodeAgent, Prompt], Awaitable[list[Turn]]]


class Written(EpisodeAgent):
    """An agent whose episode is a function of a test."""

    def __init__(self, body: Run) -> None:
        super().__init__(SamplingParams(max_new_tokens=2))
        self.body = body

    async def run(self, prompt: Prompt, env: Any) -> list[Trajectory]:
        return [Trajectory(prompt.id, await self.body(self, prompt))]


async def count(prompt_ids: Any, sampling: Any) -> Any:
    """Continue with the next numbers, as many as were asked for."""
    await asyncio.sleep(0)
    last, size = prompt_ids[-1], sampling.max_new_tokens
    return [last + 1 + k for k in range(size)], [-0.5] * size, size > 2


def rolled_out(
    agent: EpisodeAgent, function: Any = count, *, num_prompts: int = 1
) -> list[EpisodeResult]:
    async def rollout() -> list[EpisodeResult]:
        async with FunctionEngine(function, version=4) as engine:
            runner = RolloutRunner(engine, agent, None)  # type: ignore[arg-type]
            prompts = [Prompt(f"q{k}", [10 * k, 10 * k + 1]) for k in range(num_prompts)]
            return [result async for result in runner.run(prompts)]

    return asyncio.run(rollout())


def failure_of(agent: EpisodeAgent, function: Any = count) -> Any:
    (result,) = rolled_out(agent, function)
    assert result.error is not None
    return result.error


def test_completions_are_turns_and_the_prompt_is_the_agents() -> None:
    async def body(agent: EpisodeAgent, prompt: Prompt) -> list[Turn]:
        first = await agent.generate(prompt.input_ids)
        second = await agent.generate([99], SamplingParams(max_new_tokens=3))
        return [first, replace(second, reward=1.0)]

    results = rolled_out(Written(body), num_prompts=3)
    assert [result.error for result in results] == [None] * 3
    for result in results:
        first, second = result.turns
        begin = first.prompt_ids[0]  # type: ignore[index]
        assert list(first.prompt_ids) == [begin, begin + 1]
        assert list(first.completion_ids) == [begin + 2, begin + 3]
        assert (first.reward, first.truncated, first.version_start) == (0.0, False, 4)
        assert (list(second.prompt_ids), second.reward, second.truncated) == ([99], 1.0, True)


def test_calls_of_several_tasks_get_their_own_completions() -> None:
    async def body(agent: EpisodeAgent, prompt: Prompt) -> list[Turn]:
        return list(await asyncio.gather(*(agent.generate([k]) for k in range(5))))

    (result,) = rolled_out(Written(body))
    pairs = [(list(turn.prompt_ids), list(turn.completion_ids)) for turn in result.turns]
    assert pairs == [([k], [k + 1, k + 2]) for k in range(5)]


def test_errors_of_the_engine_and_of_prompts_are_raised_in_run() -> None:
    seen: list[Exception] = []

    async def refuse(prompt_ids: Any, sampling: Any) -> Any:
        raise GenerationError("", "too long")

    async def body(agent: EpisodeAgent, prompt: Prompt) -> list[Turn]:
        for ids in ([], [-1], prompt.input_ids):
            try:
                await agent.generate(ids)
            except (EpisodeError, GenerationError) as error:
                seen.append(error)
        raise seen[-1]

    failure_of(Written(body), refuse)
    assert [type(error) for error in seen] == [EpisodeError, EpisodeError, GenerationError]
    assert "the prompt has no tokens" in str(seen[0])
    assert "token_ids must be 0 or more, got -1" in str(seen[1])


def test_generate_belongs_to_an_episode_of_its_agent() -> None:
    async def body(agent: EpisodeAgent, prompt: Prompt) -> list[Turn]:
        return [await Written(body).generate(prompt.input_ids)]

    message = "generate can be called within run of the same agent only"
    with pytest.raises(RuntimeError, match=message):
        asyncio.run(Written(body).generate([1]))
    assert message in str(failure_of(Written(body)))
