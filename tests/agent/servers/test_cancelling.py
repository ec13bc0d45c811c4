"""Closing an episode frees the server, and nothing is left behind."""

import asyncio
from typing import Any

import pytest

from tests.agent.servers.loopback import (
    Answer,
    Asked,
    drawing,
    generate,
    options,
    say_sglang,
    say_vllm,
    serving,
)
from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine


async def never(asked: Asked) -> Answer:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize(
    ("engine_type", "say", "path", "payload"),
    [
        (SGLangEngine, say_sglang, "/abort_request", {"rid": "{}"}),
        (VLLMEngine, say_vllm, "/inference/v1/abort_requests", None),
    ],
)
def test_closing_an_episode_frees_its_server(
    engine_type: Any, say: Any, path: str, payload: Any
) -> None:
    async def body() -> None:
        async with serving(engine_type, drawing(never, say)) as ((server,), engine):
            replies = engine.open_episode("gone")
            engine.obs_queue.put_nowait(("gone", [1], SamplingParams(4)))
            await server.wait_for_draws(1)
            engine.close_episode("gone")
            engine.close_episode("gone")
            await asyncio.wait_for(server.noticed.wait(), 5)
            (draw,) = server.draws
            assert server.hung_up == [draw]
            while server.asked[-1].path != path:
                await server.wait_for_more()
            if engine_type is SGLangEngine:
                assert server.asked[-1].payload == {"rid": draw.payload["rid"]}
            else:
                names = [f"generate-tokens-{draw.payload['request_id']}"]
                assert server.asked[-1].payload == {"request_ids": names}
            assert replies.empty()
            assert engine._in_flight == set()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(body())


def test_closing_one_episode_leaves_others_alone() -> None:
    gate = asyncio.Event()

    async def draw(asked: Asked) -> Answer:
        await gate.wait()
        return await say_vllm(asked)

    async def body() -> None:
        async with serving(VLLMEngine, drawing(draw)) as ((server,), engine):
            engine.open_episode("gone")
            engine.obs_queue.put_nowait(("gone", [1], SamplingParams(4)))
            stays = asyncio.create_task(generate(engine, "stays"))
            await server.wait_for_draws(2)
            engine.close_episode("gone")
            # the same name may be used again at once, and gets no reply of the first
            replies = engine.open_episode("gone")
            gate.set()
            assert (await stays).output_ids.tolist() == [4, 5]
            assert replies.empty()
            with pytest.raises(ValueError, match="'gone' is open"):
                engine.open_episode("gone")

    asyncio.run(body())


def test_a_cancelled_request_gives_its_turn_to_the_next() -> None:
    async def draw(asked: Asked) -> Answer:
        return await (never(asked) if asked.payload["token_ids"] == [1] else say_vllm(asked))

    async def body() -> None:
        one = options(max_connections=1)
        async with serving(VLLMEngine, drawing(draw), options=one) as ((server,), engine):
            engine.open_episode("first")
            engine.obs_queue.put_nowait(("first", [1], SamplingParams(4)))
            await server.wait_for_draws(1)
            second = asyncio.create_task(generate(engine, "second"))
            third = asyncio.create_task(generate(engine, "third"))
            await asyncio.sleep(0.02)
            assert len(server.draws) == 1
            engine.close_episode("first")
            await asyncio.gather(second, third)

    asyncio.run(body())


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.03])
def test_cancellation_at_any_time_leaves_nothing(delay: float) -> None:
    async def inner() -> None:
        async with serving(SGLangEngine, drawing(never, say_sglang)) as (_, engine):
            await generate(engine)

    async def body() -> None:
        task = asyncio.create_task(inner())
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(body())
