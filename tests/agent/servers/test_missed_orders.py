"""Servers that were away when an order was given, and requests that waited while it was."""

import asyncio
from typing import Any

import pytest

from tests.agent.servers.loopback import (
    Answer,
    Asked,
    Loopback,
    generate,
    options,
    say_sglang,
    say_vllm,
    serving,
    sglang_body,
    until,
    vllm_body,
)
from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.control import WeightUpdateError
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine

ORDERS = ("/pause", "/resume", "/pause_generation", "/continue_generation")


async def obey(asked: Asked) -> Answer:
    """Do as a well server does that is told to pause and to go on."""
    is_order = asked.path.partition("?")[0] in (*ORDERS, "/update_weight_version")
    return Answer(body={"success": True}) if is_order else await say_vllm(asked)


def the_server(engine: Any) -> Any:
    (server,) = engine._control.router.servers
    return server


def test_what_waits_for_its_turn_is_not_sent_during_a_pause() -> None:
    gate = asyncio.Event()

    async def say(asked: Asked) -> Answer:
        if asked.is_draw:
            await gate.wait()
        return await obey(asked)

    async def body() -> None:
        async with serving(VLLMEngine, say, options=options(max_connections=1)) as (
            (server,),
            engine,
        ):
            first = asyncio.create_task(generate(engine, "first"))
            await server.wait_for_draws(1)
            second = asyncio.create_task(generate(engine, "second"))
            await until(lambda: the_server(engine).num_in_flight == 2)
            await engine.pause()
            gate.set()
            await first
            await asyncio.sleep(0.02)  # time enough to send what must not be sent
            assert len(server.draws) == 1
            await engine.set_version(7)
            await engine.resume()
            assert (await second).version_end == 7

    asyncio.run(body())


def test_what_waits_for_its_turn_leaves_a_server_that_an_update_passed_by() -> None:
    gate = asyncio.Event()

    async def old(asked: Asked) -> Answer:
        if asked.is_draw:
            await gate.wait()
        is_update = asked.path == "/update_weights_from_disk"
        return Answer(400) if is_update else await say_sglang(asked)

    async def new(asked: Asked) -> Answer:
        if asked.is_draw:
            return Answer(body=sglang_body([7], versions=[("1", 0, 1)]))
        is_update = asked.path == "/update_weights_from_disk"
        return Answer(body={"success": True}) if is_update else await say_sglang(asked)

    async def body() -> None:
        one = options(max_connections=1)
        async with (
            Loopback(old) as behind,
            Loopback(new) as ahead,
            SGLangEngine([behind.url, ahead.url], options=one) as engine,
        ):
            assert engine._control is not None
            server = engine._control.router.servers[0]
            # both go to the first: the second is the same episode's
            replies = engine.open_episode("a@0")
            for _ in range(2):
                engine.obs_queue.put_nowait(("a@0", [1], SamplingParams(4)))
            await until(lambda: server.num_in_flight == 2)
            await behind.wait_for_draws(1)
            await engine.update_weights_from_disk("w", 1)
            gate.set()
            versions = [(await asyncio.wait_for(replies.get(), 10)).version_end for _ in range(2)]
            assert (len(behind.draws), len(ahead.draws)) == (1, 1)
            assert sorted(versions) == [0, 1]

    asyncio.run(body())


@pytest.mark.parametrize("status", [503, 302, 400])
def test_a_server_that_was_away_at_the_resume_is_told_when_it_is_back(status: int) -> None:
    is_away = False

    async def say(asked: Asked) -> Answer:
        return Answer(status) if is_away else await obey(asked)

    async def body() -> None:
        nonlocal is_away
        async with serving(VLLMEngine, say) as ((server,), engine):
            await engine.pause()
            is_away = True
            with pytest.raises(
                WeightUpdateError, match=rf"did not resume: .*status {status} o[nf] /resume"
            ):
                await engine.resume()
            asked = asyncio.create_task(generate(engine))
            await server.wait_for_more()
            is_away = False
            await asked
            assert not the_server(engine).is_paused
            resumed = [asked.path for asked in server.asked].index("/inference/v1/generate")
            assert server.asked[resumed - 3].path == "/resume"

    asyncio.run(body())


def test_a_server_that_rested_at_the_resume_is_told_when_it_is_well() -> None:
    async def body() -> None:
        async with serving(SGLangEngine, say_paused_sglang) as ((server,), engine):
            await engine.pause()
            engine._control.router.mark_unhealthy(the_server(engine), "for a moment", 60)
            await engine.resume()
            assert "/continue_generation" not in server.paths()
            engine._control.router._probes[the_server(engine)].cancel()
            await asyncio.sleep(0)
            engine._control.router.mark_unhealthy(the_server(engine), "and back")
            await generate(engine)
            assert server.paths()[-2:] == ["/continue_generation", "/generate"]

    asyncio.run(body())


async def say_paused_sglang(asked: Asked) -> Answer:
    return Answer() if asked.path in ORDERS else await say_sglang(asked)


def test_an_update_that_passes_a_server_by_while_it_is_greeted_leaves_it_resting() -> None:
    gate = asyncio.Event()
    gate.set()

    async def slow(asked: Asked) -> Answer:
        if asked.path == "/update_weights_from_disk":
            return Answer(body={"success": False, "message": "busy"})
        if asked.path == "/health":
            await gate.wait()
        return await say_sglang(asked)

    async def good(asked: Asked) -> Answer:
        if asked.path == "/update_weights_from_disk":
            return Answer(body={"success": True})
        if asked.is_draw:
            return Answer(body=sglang_body([7], versions=[("1", 0, 1)]))
        return await say_sglang(asked)

    async def body() -> None:
        async with (
            Loopback(slow) as old,
            Loopback(good) as new,
            SGLangEngine([old.url, new.url], options=options()) as engine,
        ):
            assert engine._control is not None
            server = engine._control.router.servers[0]
            gate.clear()
            engine._control.router.mark_unhealthy(server, "for a moment")
            await old.wait_for_more()  # its health is asked for
            await engine.update_weights_from_disk("w", 1)
            gate.set()
            await asyncio.gather(*(generate(engine, str(k)) for k in range(6)))
            assert (len(old.draws), len(new.draws)) == (0, 6)
            assert not server.is_healthy

    asyncio.run(body())


@pytest.mark.parametrize(
    ("engine_type", "path"), [(VLLMEngine, "/weight_info"), (SGLangEngine, "/model_info")]
)
@pytest.mark.parametrize("name", ["default", "4"])
def test_a_server_started_anew_is_noticed_before_it_gets_a_request(
    engine_type: Any, path: str, name: str
) -> None:
    says = "4"

    async def say(asked: Asked) -> Answer:
        nonlocal says
        if asked.path == path:
            return Answer(body={"weight_version": says})
        if asked.path == "/update_weight_version":
            says = asked.payload["new_version"]
        if asked.path == "/generate":
            return Answer(body=sglang_body([7], versions=[(says, 0, 1)]))
        if asked.path == "/v1/completions":  # does not say which version it was
            body = vllm_body([7])
            body["choices"][0]["logprobs"] = {"token_logprobs": [-1.0]}
            return Answer(body=body)
        return await obey(asked) if asked.path != "/inference/v1/generate" else Answer(404)

    async def body() -> None:
        nonlocal says
        async with serving(engine_type, say, version=4) as ((server,), engine):
            await engine.set_version(5)
            await generate(engine)
            await server.__aexit__()
            num_draws = len(server.draws)
            waiting = asyncio.create_task(generate(engine))
            await until(lambda: not the_server(engine).is_healthy)
            says = name
            async with server:
                await until(lambda: the_server(engine).is_behind)
                assert len(server.draws) == num_draws
                await engine.set_version(6)
                assert (await waiting).output_ids.tolist() == [7]

    asyncio.run(body())


def test_a_connection_that_broke_is_no_new_start() -> None:
    async def say(asked: Asked) -> Answer:
        if asked.path == "/weight_info":
            return Answer(body={"weight_version": "5"})
        return await obey(asked)

    async def body() -> None:
        async with serving(VLLMEngine, say) as ((server,), engine):
            await engine.set_version(5)
            await server.__aexit__()
            waiting = asyncio.create_task(generate(engine))
            await until(lambda: not the_server(engine).is_healthy)
            async with server:
                await waiting
                assert "/weight_info" in server.paths()

    asyncio.run(body())


@pytest.mark.parametrize("answer", [Answer(503), Answer(429), Answer(raw=b""), Answer(302)])
def test_an_update_is_ordered_once(answer: Answer) -> None:
    path = "/update_weights_from_disk"

    async def say(asked: Asked) -> Answer:
        return answer if asked.path == path else await say_sglang(asked)

    async def body() -> None:
        async with serving(SGLangEngine, say) as ((server,), engine):
            with pytest.raises(WeightUpdateError, match="version 1 reached no server: 127"):
                await engine.update_weights_from_disk("w", 1)
            await asyncio.sleep(0.05)  # longer than any pause between attempts
            assert server.paths() == [path]
            assert engine.version == 0

    asyncio.run(body())


@pytest.mark.parametrize("message", [[[[1]]], None, {"a": 1}])
def test_a_failure_may_say_anything(message: Any) -> None:
    async def say(asked: Asked) -> Answer:
        if asked.path == "/update_weights_from_disk":
            return Answer(body={"success": False, "message": message})
        return await say_sglang(asked)

    async def body() -> None:
        async with serving(SGLangEngine, say) as (_, engine):
            with pytest.raises(WeightUpdateError, match="it said: 'success: false'"):
                await engine.update_weights_from_disk("w", 1)

    asyncio.run(body())
