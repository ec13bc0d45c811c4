"""Weights that change: interrupted generations, spans, versions, pauses, servers left behind."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.agent.servers.loopback import (
    Answer,
    Asked,
    Loopback,
    drawing,
    generate,
    options,
    say_sglang,
    say_vllm,
    serving,
    sglang_body,
)
from trajpack.agent.servers.control import WeightUpdateError
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine


def listening(
    say: Callable[[Asked], Awaitable[Answer]], *paths: str
) -> Callable[[Asked], Awaitable[Answer]]:
    async def both(asked: Asked) -> Answer:
        path = asked.path.partition("?")[0]
        return Answer(body={"success": True}) if path in paths else await say(asked)

    return both


def test_a_version_is_declared_and_told() -> None:
    say = listening(say_sglang, "/update_weight_version")

    async def body() -> None:
        async with serving(SGLangEngine, say, 2, version=3) as (servers, engine):
            await engine.set_version(4)
            assert engine.version == 4
            for server in servers:
                assert server.asked[-1].payload == {
                    "new_version": "4",
                    "abort_all_requests": False,
                }
            with pytest.raises(ValueError, match=r"version must be in \[4, "):
                await engine.set_version(3)
            assert engine.version == 4
        with pytest.raises(RuntimeError, match="set_version: the engine is not running"):
            await engine.set_version(5)

    asyncio.run(body())


def test_a_version_may_be_declared_where_nobody_listens() -> None:
    async def body() -> None:
        async with serving(VLLMEngine, say_vllm) as (_, engine):
            await engine.set_version(7)
            assert engine.version == 7
            assert (await generate(engine)).version_end == 7

    asyncio.run(body())


def test_a_request_in_flight_counts_as_the_version_it_was_sent_at() -> None:
    async def body() -> None:
        gate = asyncio.Event()

        async def draw(asked: Asked) -> Answer:
            await gate.wait()
            return await say_vllm(asked)

        async with serving(VLLMEngine, drawing(draw)) as ((server,), engine):
            asked = asyncio.create_task(generate(engine))
            await server.wait_for_draws(1)
            await engine.set_version(1)
            gate.set()
            output = await asked
            assert (output.version_start, output.version_end) == (0, 0)

    asyncio.run(body())


def test_weights_come_from_disk_to_every_server() -> None:
    say = listening(say_sglang, "/update_weights_from_disk")

    async def body() -> None:
        async with serving(SGLangEngine, say, 2) as (servers, engine):
            await engine.update_weights_from_disk("/weights/1", 1)
            assert engine.version == 1
            for server in servers:
                payload = server.asked[-1].payload
                assert payload == {"model_path": "/weights/1", "weight_version": "1"}
            with pytest.raises(ValueError, match="version must be in"):
                await engine.update_weights_from_disk("/weights/1", 1)

    asyncio.run(body())


def test_a_server_that_did_not_get_the_weights_gets_no_requests() -> None:
    takes = False

    async def stubborn(asked: Asked) -> Answer:
        if asked.path == "/update_weights_from_disk":
            return Answer(body={"success": takes, "message": "no such\nfolder"})
        return await say(asked)

    async def draw(asked: Asked) -> Answer:
        return Answer(body=sglang_body([7], versions=[("2", 0, 1)]))

    say = drawing(draw, say_sglang)

    async def body() -> None:
        nonlocal takes
        async with (
            Loopback(stubborn) as bad,
            Loopback(listening(say, "/update_weights_from_disk")) as good,
        ):
            async with SGLangEngine(bad.url, options=options()) as engine:
                with pytest.raises(WeightUpdateError, match=r"no server.*said: 'no such\\nfolder'"):
                    await engine.update_weights_from_disk("/weights/1", 1)
                assert engine.version == 0
                await generate(engine)
            async with SGLangEngine([bad.url, good.url], options=options()) as engine:
                await engine.update_weights_from_disk("/weights/1", 1)
                assert engine.version == 1
                await asyncio.sleep(0.05)  # time enough to be asked for its health
                await asyncio.gather(*(generate(engine, str(k)) for k in range(4)))
                assert (len(bad.draws), len(good.draws)) == (1, 4)
                takes = True
                await engine.update_weights_from_disk("/weights/2", 2)
                while len(bad.draws) == 1:
                    await asyncio.gather(*(generate(engine, str(k)) for k in range(4)))

    asyncio.run(body())


def test_a_server_that_forgot_its_version_was_started_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    forgetful = False

    async def draw(asked: Asked) -> Answer:
        name = "default" if forgetful else "5"
        return Answer(body=sglang_body([7], versions=[(name, 0, 1)]))

    say = listening(drawing(draw, say_sglang), "/update_weight_version")

    async def body() -> None:
        nonlocal forgetful
        async with serving(SGLangEngine, say, 1, options=options()) as ((server,), engine):
            await engine.set_version(5)
            assert (await generate(engine)).version_end == 5
            forgetful = True
            waiting = asyncio.create_task(generate(engine))
            await server.wait_for_draws(2)
            await asyncio.sleep(0.05)
            assert "it seems to have been started anew" in caplog.text
            assert len(server.draws) == 2  # it answers, and is asked for nothing
            forgetful = False
            await engine.set_version(6)  # after the weights were brought there again
            assert (await waiting).output_ids.tolist() == [7]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("engine_type", "say", "interrupt", "orders"),
    [
        (SGLangEngine, say_sglang, True, ["/pause_generation", "/continue_generation"]),
        (SGLangEngine, say_sglang, False, ["/pause_generation", "/continue_generation"]),
        (VLLMEngine, say_vllm, True, ["/pause?mode=abort", "/resume"]),
        (VLLMEngine, say_vllm, False, ["/pause?mode=keep", "/resume"]),
    ],
)
def test_a_pause_stops_servers_and_requests(
    engine_type: Any, say: Any, interrupt: bool, orders: list[str]
) -> None:
    heard = listening(say, *(order.partition("?")[0] for order in orders))

    async def body() -> None:
        async with serving(engine_type, heard) as ((server,), engine):
            await engine.pause(interrupt=interrupt)
            waiting = asyncio.create_task(generate(engine))
            await asyncio.sleep(0.05)
            assert server.draws == []
            await engine.resume()
            await waiting
            assert [path for path in server.paths() if path in orders] == orders
            if engine_type is SGLangEngine:
                mode = {True: "abort", False: "in_place"}[interrupt]
                assert server.asked[-3].payload == {"mode": mode}

    asyncio.run(body())


def test_a_pause_that_fails_holds_nothing_up() -> None:
    async def body() -> None:
        async with serving(VLLMEngine, say_vllm) as (_, engine):
            with pytest.raises(WeightUpdateError, match="status 404 on /pause"):
                await engine.pause()
            await generate(engine)

    asyncio.run(body())
