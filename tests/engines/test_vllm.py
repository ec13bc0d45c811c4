"""`VLLMEngine` against a real vLLM server: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.engines import server_episodes as episodes
from tests.engines.server_episodes import NEAR
from tests.engines.vllm_server import RunningServer, TinyModel
from trajpack.agent.errors import RequestRefusedError
from trajpack.agent.protocols import GenerationOutput, GenerationRequest, SamplingParams
from trajpack.agent.servers.options import ServerOptions
from trajpack.agent.servers.vllm import VLLMEngine

PROMPTS = [[5, 6, 7], list(range(40, 80)), [11] * 100, [3]]
both_endpoints = pytest.mark.parametrize("endpoint", ["generate", "completions"])


def engine_at(server: RunningServer, endpoint: str, **options: Any) -> VLLMEngine:
    """Return an engine that has found out which endpoint the server has."""
    engine = VLLMEngine(server.url, **options)
    engine._servers[0].has_fallen_back = endpoint == "completions"
    return engine


@both_endpoints
def test_logprobs_are_those_of_a_full_forward_pass(
    server: RunningServer, tiny: TinyModel, figure: Callable[[str], None], endpoint: Any
) -> None:
    async def collect() -> list[GenerationOutput]:
        async with engine_at(server, endpoint) as engine:
            return await episodes.sample_many(engine, PROMPTS * 4, SamplingParams(24))

    outputs = asyncio.run(collect())
    worst = max(episodes.distance(tiny, output) for output in outputs)
    num_tokens = sum(len(output.output_ids) for output in outputs)
    figure(f"{endpoint}: {num_tokens} tokens, within {worst:.1e} of a full forward pass")
    assert worst < NEAR
    for prompt, output in zip(PROMPTS * 4, outputs, strict=True):
        assert list(output.prompt_ids) == prompt
        assert output.no_eos == (output.output_ids[-1] != tiny.tokenizer.eos_token_id)
        assert len(output.output_ids) == 24 or not output.no_eos


@both_endpoints
def test_a_stop_token_ends_the_completion_and_belongs_to_it(
    server: RunningServer, tiny: TinyModel, endpoint: Any
) -> None:
    stops = tuple(range(0, len(tiny.tokenizer), 4))

    async def collect() -> list[GenerationOutput]:
        async with engine_at(server, endpoint) as engine:
            return await episodes.sample_many(
                engine, PROMPTS, SamplingParams(200, stop_token_ids=stops)
            )

    for output in asyncio.run(collect()):
        *before, last = output.output_ids
        assert last in stops or last == tiny.tokenizer.eos_token_id
        assert not set(before) & set(stops)
        assert not output.no_eos
        assert episodes.distance(tiny, output) < NEAR


@both_endpoints
def test_a_text_ends_the_completion_with_the_token_that_completes_it(
    server: RunningServer, tiny: TinyModel, endpoint: Any
) -> None:
    async def collect() -> list[GenerationOutput]:
        options = ServerOptions(seed=3)
        async with engine_at(server, endpoint, options=options) as engine:
            sampling = SamplingParams(200, stop=("e", "t"))
            return await episodes.sample_many(engine, PROMPTS, sampling)

    for output in asyncio.run(collect()):
        *before, last = output.output_ids
        text = tiny.tokenizer.decode([*before, last])
        if output.stop_reason == "stop" and last != tiny.tokenizer.eos_token_id:
            assert not set("et") & set(tiny.tokenizer.decode(before))
            assert set("et") & set(text)
            assert not output.no_eos
        assert episodes.distance(tiny, output) < NEAR


def test_what_raw_logprobs_do_not_fit_is_refused(server: RunningServer, tiny: TinyModel) -> None:
    async def collect(sampling: SamplingParams, *, allow: bool) -> GenerationOutput:
        options = ServerOptions(allow_other_logprobs=allow)
        async with VLLMEngine(server.url, options=options) as engine:
            return await episodes.sample(engine, PROMPTS[0], sampling)

    with pytest.raises(RequestRefusedError, match=r"temperature 0\.25"):
        asyncio.run(collect(SamplingParams(temperature=0.25), allow=False))
    output = asyncio.run(collect(SamplingParams(temperature=0.25), allow=True))
    assert episodes.distance(tiny, output) < NEAR
    assert episodes.distance(tiny, output, temperature=0.25) > 0.1  # the two are not close
    asyncio.run(collect(SamplingParams(), allow=False))


@both_endpoints
def test_what_can_never_be_honoured_is_refused(server: RunningServer, endpoint: Any) -> None:
    async def collect(prompt: list[int]) -> Any:
        async with engine_at(server, endpoint) as engine:
            return await episodes.sample(engine, prompt, SamplingParams())

    for prompt, words in (([5, 21_999], "out of vocabulary"), ([5] * 600, "512")):
        with pytest.raises(RequestRefusedError, match=words):
            asyncio.run(collect(prompt))


def test_the_same_seed_draws_the_same_tokens(server: RunningServer) -> None:
    async def collect(seed: int) -> list[int]:
        async with VLLMEngine(server.url, options=ServerOptions(seed=seed)) as engine:
            request = GenerationRequest("q@0", PROMPTS[0], SamplingParams(32))
            return list((await engine.generate(request)).output_ids)

    assert asyncio.run(collect(1)) == asyncio.run(collect(1))
    assert asyncio.run(collect(1)) != asyncio.run(collect(2))


@both_endpoints
def test_a_cancelled_call_frees_the_server(
    server: RunningServer, figure: Callable[[str], None], endpoint: Any
) -> None:
    async def close() -> float:
        async with engine_at(server, endpoint) as engine:
            async with episodes.long_ones(engine, server, 12):
                assert server.metric("vllm:num_requests_running") > 0
            # the engine goes on: it is the closed episodes that ended the work
            return await episodes.until(lambda: not server.metric("vllm:num_requests_running"))

    def count_ended() -> float:
        return sum(
            server.metric("vllm:request_success_total", f'finished_reason="{reason}"')
            for reason in ("stop", "length")
        )

    before = count_ended()
    took_s = asyncio.run(close())
    num_ended = count_ended() - before
    figure(
        f"{endpoint}: 12 long completions under way, closed; the server free after {took_s:.2f} s, "
        f"{num_ended:g} of them had come to their end"
    )
    assert num_ended < 12  # all of them, had the server gone on
