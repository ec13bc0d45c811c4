"""Weight updates, pauses, restarted servers, and the semantics of log-probabilities."""

import asyncio
from typing import Any

import pytest

from tests.agent.servers.loopback import (
    Answer,
    Asked,
    Loopback,
    Say,
    always,
    ask,
    drawing,
    gated,
    generate,
    options,
    say_sglang,
    say_vllm,
    serving,
    sglang_body,
    until,
    vllm_body,
)
from trajpack.agent.errors import RequestRefusedError
from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.client import ExchangeError
from trajpack.agent.servers.control import WeightUpdateError
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine

UPDATE = "/update_weights_from_disk"
OK = Answer(body={"success": True})
NEW = always(sglang_body([7], versions=[("1", 0, 1)]), say_sglang)


def listening(say: Say, *paths: str, answer: Answer = OK) -> Say:
    async def both(asked: Asked) -> Answer:
        return answer if asked.path.partition("?")[0] in paths else await say(asked)

    return both


async def test_weights_and_their_version_come_to_every_server() -> None:
    say = listening(say_sglang, "/update_weight_version", UPDATE)
    async with serving(SGLangEngine, say, 2, version=3) as (servers, engine):
        await engine.set_version(4)
        assert engine.version == 4
        told = {"new_version": "4", "abort_all_requests": False}
        assert [server.asked[-1].payload for server in servers] == [told] * 2
        await engine.update_weights_from_disk("/weights/5", 5)
        assert engine.version == 5
        told = {"model_path": "/weights/5", "weight_version": "5"}
        assert [server.asked[-1].payload for server in servers] == [told] * 2
        for update in (engine.set_version(4), engine.update_weights_from_disk("/weights/5", 5)):
            with pytest.raises(ValueError, match="version must be in"):
                await update
        assert engine.version == 5
    with pytest.raises(RuntimeError, match="the context of this SGLangEngine has ended"):
        await engine.set_version(6)


async def test_a_request_in_flight_counts_as_the_version_it_was_sent_at() -> None:
    gate = asyncio.Event()
    async with serving(VLLMEngine, gated(gate, say_vllm)) as ((server,), engine):
        asked = asyncio.create_task(generate(engine))
        await server.wait_for_draws(1)
        await engine.set_version(1)
        gate.set()
        output = await asked
        assert (output.version_start, output.version_end) == (0, 0)


async def test_a_server_that_did_not_get_the_weights_gets_no_requests() -> None:
    say = always(sglang_body([7], versions=[("2", 0, 1)]), say_sglang)
    refusal = Answer(body={"success": False, "message": "no such\nfolder"})
    async with (
        Loopback(listening(say, UPDATE, answer=refusal)) as bad,
        Loopback(listening(say, UPDATE)) as good,
    ):
        async with SGLangEngine(bad.url, options=options()) as engine:
            with pytest.raises(WeightUpdateError, match=r"no server.*it said .*no such\\nfolder"):
                await engine.update_weights_from_disk("/weights/1", 1)
            assert engine.version == 0
            await generate(engine)
        async with SGLangEngine([bad.url, good.url], options=options()) as engine:
            await engine.update_weights_from_disk("/weights/1", 1)
            assert engine.version == 1
            await asyncio.sleep(0.05)  # time enough to be asked for its health
            await asyncio.gather(*(generate(engine, str(k)) for k in range(4)))
            assert (len(bad.draws), len(good.draws)) == (1, 4)
            refusal.body = OK.body
            await engine.update_weights_from_disk("/weights/2", 2)
            while len(bad.draws) == 1:
                await asyncio.gather(
                    *(generate(engine, f"{len(good.draws)} {k}") for k in range(2))
                )


async def test_a_server_that_forgot_its_version_was_started_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    forgetful = False

    async def draw(asked: Asked) -> Answer:
        name = "default" if forgetful else "5"
        return Answer(body=sglang_body([7], versions=[(name, 0, 1)]))

    say = listening(drawing(draw, say_sglang), "/update_weight_version")
    async with serving(SGLangEngine, say, 1, options=options()) as ((server,), engine):
        await engine.set_version(5)
        assert (await generate(engine)).version_end == 5
        forgetful = True
        waiting = asyncio.create_task(generate(engine))
        await server.wait_for_draws(2)
        await asyncio.sleep(0.05)
        assert "it seems to have been restarted" in caplog.text
        assert len(server.draws) == 2  # it answers, and is asked for nothing
        forgetful = False
        await engine.set_version(6)  # after the weights were brought there again
        assert (await waiting).output_ids.tolist() == [7]


@pytest.mark.parametrize(
    ("engine_type", "say", "interrupt", "orders"),
    [
        (SGLangEngine, say_sglang, True, ["/pause_generation", "/continue_generation"]),
        (SGLangEngine, say_sglang, False, ["/pause_generation", "/continue_generation"]),
        (VLLMEngine, say_vllm, True, ["/pause?mode=abort", "/resume"]),
        (VLLMEngine, say_vllm, False, ["/pause?mode=keep", "/resume"]),
    ],
)
async def test_a_pause_stops_servers_and_requests(
    engine_type: Any, say: Any, interrupt: bool, orders: list[str]
) -> None:
    heard = listening(say, *(order.partition("?")[0] for order in orders))
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


async def test_a_pause_that_fails_holds_nothing_up() -> None:
    async with serving(VLLMEngine, say_vllm) as (_, engine):
        with pytest.raises(WeightUpdateError, match=r"/pause.*: status 404"):
            await engine.pause()
        await generate(engine)


ORDERS = ("/pause", "/resume", "/pause_generation", "/continue_generation")
obey = listening(say_vllm, *ORDERS, "/update_weight_version")
"""Do as a well server does that is told to pause and to go on."""


def the_server(engine: Any) -> Any:
    (server,) = engine._servers
    return server


async def test_what_waits_for_its_turn_is_not_sent_during_a_pause() -> None:
    gate = asyncio.Event()
    one = options(max_connections=1)
    async with serving(VLLMEngine, gated(gate, obey), options=one) as ((server,), engine):
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


async def test_what_waits_for_its_turn_leaves_a_server_that_an_update_passed_by() -> None:
    gate = asyncio.Event()

    old = listening(gated(gate, say_sglang), UPDATE, answer=Answer(400))
    one = options(max_connections=1)
    async with (
        Loopback(old) as behind,
        Loopback(listening(NEW, UPDATE)) as ahead,
        SGLangEngine([behind.url, ahead.url], options=one) as engine,
    ):
        asked = [asyncio.create_task(generate(engine, str(k), [1])) for k in range(3)]
        await until(lambda: engine._servers[0].num_in_flight == 2)
        await behind.wait_for_draws(1)
        await engine.update_weights_from_disk("w", 1)
        gate.set()
        versions = [output.version_end for output in await asyncio.gather(*asked)]
        assert (len(behind.draws), len(ahead.draws)) == (1, 2)
        assert versions == [0, 1, 1]


@pytest.mark.parametrize("status", [503, 302, 400])
async def test_a_server_that_was_away_at_the_resume_is_told_when_it_is_back(status: int) -> None:
    is_away = False

    async def say(asked: Asked) -> Answer:
        return Answer(status) if is_away else await obey(asked)

    async with serving(VLLMEngine, say) as ((server,), engine):
        await engine.pause()
        is_away = True
        with pytest.raises(WeightUpdateError, match=rf"did not resume: .*/resume: status {status}"):
            await engine.resume()
        asked = asyncio.create_task(generate(engine))
        await server.wait_for_more()
        is_away = False
        await asked
        resumed = [asked.path for asked in server.asked].index("/inference/v1/generate")
        assert server.asked[resumed - 1].path == "/resume"


async def test_an_update_that_passes_a_server_by_while_it_is_greeted_leaves_it_resting() -> None:
    gate = asyncio.Event()
    gate.set()

    async def slow(asked: Asked) -> Answer:
        if asked.path == "/health":
            await gate.wait()
        return await say_sglang(asked)

    refusing = listening(slow, UPDATE, answer=Answer(body={"success": False, "message": "busy"}))
    async with (
        Loopback(refusing) as old,
        Loopback(listening(NEW, UPDATE)) as new,
        SGLangEngine([old.url, new.url], options=options()) as engine,
    ):
        server = engine._servers[0]
        gate.clear()
        engine._rest(server, ExchangeError("for a moment"))
        await old.wait_for_more()  # its health is asked for
        await engine.update_weights_from_disk("w", 1)
        gate.set()
        await asyncio.gather(*(generate(engine, str(k)) for k in range(6)))
        assert (len(old.draws), len(new.draws)) == (0, 6)
        assert not server.is_healthy


@pytest.mark.parametrize(
    ("engine_type", "path"), [(VLLMEngine, "/weight_info"), (SGLangEngine, "/model_info")]
)
@pytest.mark.parametrize("name", ["default", "4"])
async def test_a_server_started_anew_is_noticed_before_it_gets_a_request(
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


async def test_a_connection_that_broke_is_no_new_start() -> None:
    say = listening(obey, "/weight_info", answer=Answer(body={"weight_version": "5"}))
    async with serving(VLLMEngine, say) as ((server,), engine):
        await engine.set_version(5)
        await server.__aexit__()
        waiting = asyncio.create_task(generate(engine))
        await until(lambda: not the_server(engine).is_healthy)
        async with server:
            await waiting
            assert "/weight_info" in server.paths()


@pytest.mark.parametrize(
    "answer", [Answer(503), Answer(429), Answer(raw=b""), Answer(302), Answer(400)]
)
async def test_an_update_is_ordered_once(answer: Answer) -> None:
    say = listening(say_sglang, UPDATE, answer=answer)
    async with serving(SGLangEngine, say) as ((server,), engine):
        with pytest.raises(WeightUpdateError, match="version 1 reached no server: 127"):
            await engine.update_weights_from_disk("w", 1)
        await asyncio.sleep(0.05)  # longer than any pause between attempts
        assert server.paths() == [UPDATE]
        assert engine.version == 0


HOT = SamplingParams(8, temperature=0.5)
GREEDY = SamplingParams(8, temperature=0.0)
TOP_P = SamplingParams(8, top_p=0.9)
TOP_K = SamplingParams(8, top_k=5)


@pytest.mark.parametrize(
    ("engine_type", "logprobs", "refused"),
    [
        (VLLMEngine, None, [HOT, GREEDY, TOP_P, TOP_K]),
        (VLLMEngine, "processed", []),
        (SGLangEngine, None, [TOP_P, TOP_K]),
        (SGLangEngine, "raw", [HOT, GREEDY, TOP_P, TOP_K]),
    ],
)
@pytest.mark.parametrize("is_allowed", [False, True])
async def test_what_does_not_fit_is_refused_unless_allowed(
    engine_type: Any, logprobs: Any, refused: list[SamplingParams], is_allowed: bool
) -> None:
    say = say_vllm if engine_type is VLLMEngine else say_sglang
    changed = options(logprobs=logprobs, allow_other_logprobs=is_allowed)
    async with serving(engine_type, say, options=changed) as ((server,), engine):
        for params in (HOT, GREEDY, TOP_P, TOP_K, SamplingParams(8)):
            before = len(server.draws)
            reply = await ask(engine, sampling=params)
            is_refused = params in refused and not is_allowed
            assert isinstance(reply, RequestRefusedError) == is_refused
            assert len(server.draws) == before + (not is_refused)
            assert ("the server's log-probabilities are those" in str(reply)) == is_refused
