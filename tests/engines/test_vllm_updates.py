"""Weights that change, pauses, and a whole rollout, on a real vLLM server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from tests.engines import server_episodes as episodes
from tests.engines.server_episodes import NEAR
from tests.engines.vllm_server import MAX_MODEL_LEN, RunningServer, TinyModel
from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.environments.math_verify import MathVerifyEnvironment
from trajpack.agent.environments.questions import reasoning_gym_questions
from trajpack.agent.protocols import GenerationOutput, Prompt, SamplingParams
from trajpack.agent.runner.runner import EpisodeResult, RolloutRunner
from trajpack.agent.servers.client import HTTPRequest
from trajpack.agent.servers.options import ServerOptions
from trajpack.agent.servers.vllm import VLLMEngine
from trajpack.packing.buffer.buffer import TrajectoryBuffer


def spans(output: GenerationOutput) -> list[tuple[int, int, int]]:
    """Return the versions of an output as spans, in whatever way it tells them."""
    if output.version_spans is None:
        return [(output.version_start, 0, len(output.output_ids))]
    return [(version, start, end) for version, start, end in output.version_spans]


def test_each_token_has_the_version_that_sampled_it(
    server: RunningServer, tiny: TinyModel, figure: Callable[[str], None]
) -> None:
    async def collect() -> list[GenerationOutput]:
        async with VLLMEngine(server.url, version=6) as engine:
            during: list[GenerationOutput] = []
            while not any(len(spans(output)) == 2 for output in during) and engine.version < 12:
                await engine.set_version(engine.version + 1)
                async with episodes.long_ones(engine, server, 8) as begun:
                    # on a busy machine they may all have ended before this arrives
                    await engine.set_version(engine.version + 1)
                    during = list(await asyncio.gather(*begun))
            return [*during, await episodes.sample(engine, [5], SamplingParams())]

    *during, after = asyncio.run(collect())
    new = after.version_end
    assert spans(after) == [(new, 0, len(after.output_ids))]
    figure(f"versions of completions in flight: {[spans(output) for output in during]}")
    assert any(len(spans(output)) == 2 for output in during)
    for output in during:
        assert [version for version, _, _ in spans(output)] in (
            [new - 1],
            [new - 1, new],
            [new],
        )
        assert (output.version_start, output.version_end) == (
            spans(output)[0][0],
            spans(output)[-1][0],
        )
        assert episodes.distance(tiny, output) < NEAR  # the label changed, the weights did not


def test_a_server_that_has_forgotten_its_version_is_found_out(server: RunningServer) -> None:
    async def collect() -> None:
        async with VLLMEngine(server.url, version=9) as engine:
            await engine.set_version(10)
            (one,) = engine._servers
            await engine._greet(one)
            forget = HTTPRequest("/update_weight_version", {"new_version": "default"})
            await engine._send(one, forget, 60)
            await engine._greet(one)
            assert one.is_behind
            assert "its weights are not the engine's" in one.error
            await engine.set_version(11)
            await engine._greet(one)

    asyncio.run(collect())


def test_what_a_pause_interrupts_is_resumed_without_loss(
    server: RunningServer, tiny: TinyModel, figure: Callable[[str], None]
) -> None:
    async def collect() -> list[GenerationOutput]:
        async with (
            VLLMEngine(server.url, version=12) as engine,
            episodes.long_ones(engine, server, 8) as begun,
        ):
            await engine.pause(interrupt=True)
            await episodes.until(lambda: not server.metric("vllm:num_requests_running"))
            await engine.set_version(13)
            await engine.resume()
            return list(await asyncio.gather(*begun))

    aborted = server.metric("vllm:request_success_total", 'finished_reason="abort"')
    outputs = asyncio.run(collect())
    aborted = server.metric("vllm:request_success_total", 'finished_reason="abort"') - aborted
    figure(f"{aborted:g} of 8 interrupted, then resumed: {[spans(output) for output in outputs]}")
    # what was interrupted before its first token has one version, too
    assert 1 <= sum(len(spans(output)) == 2 for output in outputs) <= aborted
    for output in outputs:
        assert list(output.prompt_ids) == [7, 8, 9]
        assert len(output.output_ids) == 450 or not output.no_eos
        assert episodes.distance(tiny, output) < NEAR  # a lost or doubled token would show


def test_a_pause_that_keeps_requests_does_not_disturb_them(
    server: RunningServer, tiny: TinyModel
) -> None:
    async def collect() -> list[GenerationOutput]:
        async with (
            VLLMEngine(server.url, version=13) as engine,
            episodes.long_ones(engine, server, 4) as begun,
        ):
            await engine.pause()
            late = asyncio.create_task(episodes.sample(engine, [5], SamplingParams()))
            still = server.metric("vllm:generation_tokens_total")
            await asyncio.sleep(0.3)  # time in which tokens would come
            assert server.metric("vllm:generation_tokens_total") == still
            assert not late.done()
            await engine.resume()
            return [*await asyncio.gather(*begun), await late]

    for output in asyncio.run(collect()):
        assert episodes.distance(tiny, output) < NEAR


def test_a_rollout_of_several_turns_packs(
    server: RunningServer, tiny: TinyModel, figure: Callable[[str], None]
) -> None:
    questions = reasoning_gym_questions(size=6, seed=0)
    agent = MathMultiTurnAgent(
        SamplingParams(max_new_tokens=24),
        tiny.tokenizer,
        None,
        num_turns=3,
        max_total_tokens=MAX_MODEL_LEN,
    )
    prompts = [
        Prompt(
            question.id,
            tiny.tokenizer.apply_chat_template(
                question.messages, add_generation_prompt=True, return_dict=False
            ),
        )
        for question in questions
    ]

    async def collect() -> list[EpisodeResult]:
        options = ServerOptions(vocab_size=len(tiny.tokenizer), max_request_tokens=MAX_MODEL_LEN)
        async with (
            MathVerifyEnvironment(questions) as environment,
            VLLMEngine(server.url, options=options, version=13) as engine,
        ):
            runner = RolloutRunner(engine, agent, environment, group_size=4)
            return [result async for result in runner.run(prompts)]

    results = asyncio.run(collect())
    assert len(results) == 24
    assert not [result.error for result in results if result.error]
    buffer = TrajectoryBuffer()
    buffer.extend([trajectory for result in results for trajectory in result.trajectories])
    batch = buffer.pack()
    worst, num_turns = 0.0, 0
    for trajectory in batch.unpack():
        for turn in trajectory.turns:
            expected = tiny.logprobs(turn.prompt_ids, turn.completion_ids)
            worst = max(worst, np.abs(np.asarray(turn.completion_logprobs) - expected).max())
            num_turns += 1
    figure(
        f"rollout: 24 episodes, {num_turns} turns, {batch.loss_mask.sum().item()} sampled tokens, "
        f"packed; within {worst:.1e} of full forward passes"
    )
    assert num_turns == 72
    assert worst < NEAR
    assert set(batch.policy_versions[batch.loss_mask].tolist()) == {13}
