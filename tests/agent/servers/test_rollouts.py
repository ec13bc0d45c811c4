"""Whole rollouts through servers: conversations that grow, servers that die, packed in the end."""

import asyncio
from typing import Any

import pytest

import trajpack
from tests.agent.servers.loopback import (
    Answer,
    Asked,
    Loopback,
    drawing,
    options,
    say_sglang,
    say_vllm,
    sglang_body,
    vllm_body,
)
from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.environments.questions import ExactAnswerEnvironment, Question
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import Prompt, SamplingParams
from trajpack.agent.runner.runner import RolloutRunner
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine


@pytest.mark.parametrize("engine_type", [VLLMEngine, SGLangEngine])
def test_a_multi_turn_rollout_survives_a_server(engine_type: Any) -> None:
    _, tokenizer = build_tiny_model()
    answer = [*tokenizer.encode("5", add_special_tokens=False), tokenizer.eos_token_id]

    async def draw(asked: Asked) -> Answer:
        is_vllm = engine_type is VLLMEngine
        return Answer(body=vllm_body(answer) if is_vllm else sglang_body(answer))

    say = drawing(draw, say_vllm if engine_type is VLLMEngine else say_sglang)
    questions = [
        Question(f"q{k}", ({"role": "user", "content": "2 + 3"},), ("5",)) for k in range(6)
    ]
    agent = MathMultiTurnAgent(SamplingParams(8), tokenizer, None, num_turns=3)

    async def body() -> list[Any]:
        dies, stays = Loopback(say), Loopback(say)
        await dies.__aenter__()
        async with stays, engine_type([dies.url, stays.url], options=options()) as engine:
            environment = ExactAnswerEnvironment(questions)
            runner = RolloutRunner(engine, agent, environment, concurrency=4, group_size=2)
            prompts = [Prompt(question.id, [7, 8, 9 + k]) for k, question in enumerate(questions)]
            results = []
            async for result in runner.run(prompts):
                results.append(result)
                if len(results) == 3:
                    await dies.__aexit__()
            assert dies.draws
            assert stays.draws
            return results

    results = asyncio.run(body())
    assert [result.error for result in results] == [None] * 12
    trajectories = [trajectory for result in results for trajectory in result.trajectories]
    batch = trajpack.pack(trajectories)
    assert batch.unpack() == trajectories
    for trajectory in trajectories:
        assert len(trajectory.turns) == 3
        for turn in trajectory.turns:
            assert list(turn.completion_ids) == answer
            assert not turn.truncated
    first, second = trajectories[0].turns[:2]
    assert list(second.prompt_ids)[: len(first.prompt_ids)] == list(first.prompt_ids)
