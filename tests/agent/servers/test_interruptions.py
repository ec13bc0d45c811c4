"""Generations that a server ends early, and what its tokens are said to be sampled by."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tests.agent.servers.loopback import (
    Answer,
    Asked,
    ask,
    drawing,
    generate,
    options,
    say_sglang,
    serving,
    sglang_body,
    vllm_body,
)
from trajpack.agent.errors import MalformedResponseError, ServerUnavailableError
from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.options import RetryLimits
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine
from trajpack.packing.types import VersionSpan

ABORT = {"type": "abort", "message": "the weights are about to change"}


def in_turn(*answers: Any) -> Callable[[Asked], Awaitable[Answer]]:
    """Give these bodies to draws, one after the other."""
    waiting = iter(answers)

    async def draw(asked: Asked) -> Answer:
        return Answer(body=next(waiting))

    return draw


def test_an_interrupted_generation_goes_on_where_it_was() -> None:
    draw = in_turn(
        sglang_body([10, 11], ABORT, [("1", 0, 2)]),
        sglang_body([], ABORT, [("2", 0, 0)]),
        sglang_body([12], ABORT, [("2", 0, 1)]),
        sglang_body([13, 14], versions=[("2", 0, 1), ("3", 1, 2)]),
    )

    async def body() -> None:
        arguments: dict[str, Any] = {"version": 1, "options": options(seed=5)}
        say = drawing(draw, say_sglang)
        async with serving(SGLangEngine, say, **arguments) as ((server,), engine):
            output = await generate(engine, prompt=[1, 2], sampling=SamplingParams(9))
            sent = [asked.payload for asked in server.draws]
        np.testing.assert_array_equal(output.output_ids, [10, 11, 12, 13, 14])
        assert len(output.output_logprobs) == 5
        assert output.version_spans == (
            VersionSpan(1, 0, 2),
            VersionSpan(2, 2, 4),
            VersionSpan(3, 4, 5),
        )
        assert (output.version_start, output.version_end, output.no_eos) == (1, 3, False)
        assert output.prompt_ids == [1, 2]
        assert [one["input_ids"] for one in sent] == [
            [1, 2],
            [1, 2, 10, 11],
            [1, 2, 10, 11],
            [1, 2, 10, 11, 12],
        ]
        params = [one["sampling_params"] for one in sent]
        assert [one["max_new_tokens"] for one in params] == [9, 7, 7, 6]
        seeds = [one["sampling_seed"] for one in params]
        assert len(set(seeds)) == 3
        assert seeds[1] == seeds[2]

    asyncio.run(body())


def test_an_interruption_at_the_last_token_needs_no_other_request() -> None:
    async def body() -> None:
        draw = in_turn(vllm_body([4, 5], finish="abort"))
        async with serving(VLLMEngine, drawing(draw)) as (_, engine):
            output = await generate(engine, sampling=SamplingParams(2))
        assert output.output_ids.tolist() == [4, 5]
        assert output.no_eos

    asyncio.run(body())


def test_interruptions_without_a_token_come_to_an_end() -> None:
    async def draw(asked: Asked) -> Answer:
        return Answer(body=vllm_body([], finish="abort"))

    async def body() -> None:
        few = options(
            retries=RetryLimits(wait_initial_s=0.001, wait_max_s=0.01, max_idle_resumes=3)
        )
        async with serving(VLLMEngine, drawing(draw), options=few) as ((server,), engine):
            reply = await ask(engine)
            assert isinstance(reply, ServerUnavailableError)
            assert f":{server.port}: interrupted 4 times in a row" in str(reply)
            assert len(server.draws) == 4

    asyncio.run(body())


def test_a_generation_does_not_go_on_with_older_weights() -> None:
    draw = in_turn(
        vllm_body([4], finish="abort", versions=[("8", 0, 1)]),
        vllm_body([99, 98], versions=[("7", 0, 2)]),
        vllm_body([5], versions=[("8", 0, 1)]),
    )

    async def body() -> None:
        async with serving(VLLMEngine, drawing(draw), version=8) as (_, engine):
            output = await generate(engine)
        assert output.output_ids.tolist() == [4, 5]
        assert (output.version_start, output.version_end) == (8, 8)

    asyncio.run(body())


@pytest.mark.parametrize(
    "spans",
    [
        [("1", 0, 1)],
        [("1", 0, 2), ("1", 1, 3)],
        [("1", 0, 4)],
        [("1", 1, 3)],
        [("2", 0, 1), ("1", 1, 3)],
        [("99999999999", 0, 3)],
        [("1" * 5000, 0, 3)],
        [("1", 0, 5), ("1", 5, 3)],
        [],
    ],
)
def test_spans_that_make_no_sense_are_refused(spans: Any) -> None:
    async def draw(asked: Asked) -> Answer:
        return Answer(body=vllm_body([4, 5, 6], versions=spans))

    async def body() -> None:
        async with serving(VLLMEngine, drawing(draw)) as (_, engine):
            reply = await ask(engine)
            assert isinstance(reply, MalformedResponseError)
            assert "weight_versions" in str(reply)

    asyncio.run(body())
