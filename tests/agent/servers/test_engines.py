"""What both engines do when all is well, against real servers on the loopback interface."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.agent.servers.loopback import (
    NOTHING,
    Answer,
    Asked,
    Loopback,
    ask,
    drawing,
    generate,
    options,
    say_sglang,
    say_vllm,
    serving,
    sglang_body,
    vllm_body,
)
from trajpack.agent.errors import EngineEndedError, RequestRefusedError
from trajpack.agent.protocols import SamplingParams
from trajpack.agent.seeding import derive_seed
from trajpack.agent.servers.api import NEUTRAL
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine
from trajpack.packing.types import VersionSpan


def test_vllm_gets_token_ids_and_returns_a_checked_sample() -> None:
    async def body() -> None:
        async with (
            Loopback(say_vllm) as server,
            VLLMEngine(server.url, options=options()) as engine,
        ):
            output = await generate(engine, sampling=SamplingParams(16, top_p=1.0))
            (asked,) = server.draws
        assert output.prompt_ids == [1, 2, 3]
        np.testing.assert_array_equal(output.output_ids, [4, 5])
        np.testing.assert_array_equal(output.output_logprobs, np.float32([-0.5, -0.5]))
        assert (output.qid, output.no_eos, output.version_spans) == ("a@0", False, None)
        assert asked.path == "/inference/v1/generate"
        assert asked.payload.pop("request_id")
        assert asked.payload == {
            "model": "tiny",
            "token_ids": [1, 2, 3],
            "sampling_params": {
                "max_tokens": 16,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "logprobs": 0,
                **NEUTRAL,
            },
        }
        assert asked.headers["accept-encoding"] == "identity"

    asyncio.run(body())


def test_sglang_gets_token_ids_and_returns_a_checked_sample() -> None:
    async def body() -> None:
        async with Loopback(say_sglang) as server:
            async with SGLangEngine(server.url, options=options(), version=3) as engine:
                output = await generate(engine, sampling=SamplingParams(16, temperature=0.5))
            (asked,) = server.draws
        np.testing.assert_array_equal(output.output_ids, [4, 5])
        np.testing.assert_array_equal(output.output_logprobs, np.float32([-0.25, -0.25]))
        assert (output.no_eos, output.version_start, output.version_end) == (False, 3, 3)
        assert asked.payload["input_ids"] == [1, 2, 3]
        assert asked.payload["return_logprob"] is True
        assert asked.payload["sampling_params"] == {
            "max_new_tokens": 16,
            "temperature": 0.5,
            "top_p": 1.0,
            "top_k": -1,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            **NEUTRAL,
        }

    asyncio.run(body())


@pytest.mark.parametrize(("finish", "no_eos"), [("stop", False), ("length", True)])
def test_only_a_stop_is_an_end_of_sequence(finish: str, no_eos: bool) -> None:
    async def vllm(asked: Asked) -> Answer:
        return Answer(body=vllm_body([7], finish=finish))

    async def sglang(asked: Asked) -> Answer:
        kinds = {"stop": {"type": "stop", "matched": 7}, "length": {"type": "length", "length": 1}}
        return Answer(body=sglang_body([7], kinds[finish]))

    async def body() -> None:
        for engine_type, say in ((VLLMEngine, vllm), (SGLangEngine, sglang)):
            async with serving(engine_type, drawing(say)) as (_, engine):
                assert (await generate(engine)).no_eos is no_eos

    asyncio.run(body())


@pytest.mark.parametrize("status", [403, 404])
def test_vllm_falls_back_to_completions_once(status: int) -> None:
    async def completions(asked: Asked) -> Answer:
        if asked.path != "/v1/completions":
            return Answer(status, {"error": {"message": "not enabled"}})
        choice = {
            "finish_reason": "stop",
            "token_ids": [9],
            "prompt_token_ids": asked.payload["prompt"],
            "logprobs": {"token_logprobs": [-2.0]},
        }
        return Answer(body={"choices": [choice]})

    async def body() -> list[Asked]:
        async with Loopback(drawing(completions)) as server:
            async with VLLMEngine(server.url, options=options(seed=4)) as engine:
                await generate(engine)
                output = await generate(engine, "b@0", sampling=SamplingParams(5))
                np.testing.assert_array_equal(output.output_ids, [9])
            return server.draws

    draws = asyncio.run(body())
    assert [asked.path for asked in draws] == [
        "/inference/v1/generate",
        "/v1/completions",
        "/v1/completions",
    ]
    payload = draws[-1].payload
    assert payload["prompt"] == [1, 2, 3]
    assert (payload["max_tokens"], payload["logprobs"]) == (5, 0)
    assert payload["return_token_ids"] is True
    assert payload["seed"] == derive_seed(4, "b@0", 0)


def test_a_declared_endpoint_is_the_only_one() -> None:
    async def body() -> None:
        async with Loopback(drawing(lambda _: asyncio.sleep(0, NOTHING))) as server:
            for endpoint in ("generate", "completions"):
                async with VLLMEngine(server.url, options=options(), endpoint=endpoint) as engine:
                    assert isinstance(await ask(engine), RequestRefusedError)
        assert server.paths() == ["/inference/v1/generate", "/v1/completions"]

    asyncio.run(body())


def test_seeds_come_from_the_episode_and_the_number_of_the_request() -> None:
    async def seeds(seed: int | None) -> list[Any]:
        async with Loopback(say_sglang) as server:
            async with SGLangEngine(server.url, options=options(seed=seed)) as engine:
                replies = engine.open_episode("a@1")
                for _ in range(2):
                    engine.obs_queue.put_nowait(("a@1", [1], SamplingParams(4)))
                    await replies.get()
            return [asked.payload["sampling_params"].get("sampling_seed") for asked in server.draws]

    assert asyncio.run(seeds(7)) == [derive_seed(7, "a@1", 0), derive_seed(7, "a@1", 1)]
    assert asyncio.run(seeds(None)) == [None, None]


def test_spans_of_versions_become_numbers() -> None:
    spans = [("default", 0, 1), ("8", 1, 3), ("8", 3, 4), ("11", 4, 5)]

    async def vllm(asked: Asked) -> Answer:
        return Answer(body=vllm_body([4, 5, 6, 7, 8], versions=spans))

    async def body() -> None:
        async with serving(VLLMEngine, drawing(vllm), version=6) as (_, engine):
            output = await generate(engine)
        assert output.version_spans == (
            VersionSpan(6, 0, 1),
            VersionSpan(8, 1, 4),
            VersionSpan(11, 4, 5),
        )
        assert (output.version_start, output.version_end) == (6, 11)

    asyncio.run(body())


def test_sampling_may_be_any_object_and_is_refused_by_name() -> None:
    async def body() -> None:
        async with Loopback(say_sglang) as server:
            limited = options(vocab_size=100, max_request_tokens=20)
            async with SGLangEngine(server.url, options=limited) as engine:
                theirs = SimpleNamespace(max_new_tokens=4, greedy=True, stop_token_ids=[5])
                await generate(engine, sampling=theirs)
                sent = server.draws[0].payload["sampling_params"]
                assert (sent["temperature"], sent["stop_token_ids"]) == (0.0, [5])
                for prompt, sampling, reason in (
                    ([1], SimpleNamespace(max_new_tokens=4, n=2), "n=2"),
                    ([1], None, "max_new_tokens"),
                    ([], SamplingParams(4), "non-empty"),
                    ([100], SamplingParams(4), "token id 100 is out of vocabulary"),
                    ([1] * 17, SamplingParams(4), "exceed the 20 positions"),
                    ([1], SamplingParams(4, top_p=0.5), "top_p 0.5 and top_k 0"),
                ):
                    reply = await ask(engine, "a@0", prompt, sampling)
                    assert isinstance(reply, RequestRefusedError), reply
                    assert reason in str(reply)
                assert len(server.draws) == 1

    asyncio.run(body())


def test_each_observation_gets_one_reply_also_before_and_after() -> None:
    async def body() -> None:
        async with Loopback(say_vllm) as server:
            engine = VLLMEngine(server.url, options=options())
            replies = engine.open_episode("a@0")
            engine.obs_queue.put_nowait(("a@0", [1], SamplingParams(4)))
            for stray in (("ghost", [1], None), ("short",), None):
                engine.obs_queue.put_nowait(stray)  # type: ignore[arg-type]
            async with engine:
                assert (await asyncio.wait_for(replies.get(), 5)).output_ids.tolist() == [2, 3]
            await engine.obs_queue.put(("a@0", [1], SamplingParams(4)))
            error = replies.get_nowait()
            assert isinstance(error, EngineEndedError)
            assert str(error) == "episode 'a@0': the engine was shut down"
            assert replies.empty()
            with pytest.raises(RuntimeError, match="once"):
                await engine.__aenter__()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(body())


def test_leaving_answers_what_is_in_flight() -> None:
    async def never(asked: Asked) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    async def body() -> None:
        async with Loopback(drawing(never)) as server:
            async with VLLMEngine(server.url, options=options()) as engine:
                queues = [engine.open_episode(str(k)) for k in range(3)]
                for k in range(3):
                    engine.obs_queue.put_nowait((str(k), [1], SamplingParams(4)))
                await server.wait_for_draws(3)
            for queue in queues:
                assert isinstance(queue.get_nowait(), EngineEndedError)
                assert queue.empty()
            await asyncio.wait_for(server.noticed.wait(), 5)

    asyncio.run(body())


def test_addresses_are_checked() -> None:
    for urls, reason in (
        ([], "got none"),
        (["ftp://a"], "http://"),
        (["http://a?x=1"], "no query"),
        (["http://a:b"], "cannot be read"),
        (["http://a", "http://a/"], "named twice"),
    ):
        with pytest.raises(ValueError, match=reason):
            VLLMEngine(urls)
