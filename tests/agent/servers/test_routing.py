"""Failing servers: retries, rotation, outages."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from tests.agent.servers.loopback import (
    Answer,
    Asked,
    Loopback,
    always,
    ask,
    drawing,
    generate,
    never,
    options,
    say_sglang,
    say_vllm,
    serving,
    until,
)
from trajpack.agent.errors import (
    GenerationError,
    RequestRefusedError,
    ServerUnavailableError,
    SetupError,
)
from trajpack.agent.seeding import derive_seed
from trajpack.agent.servers.options import RetryLimits, TimeLimits
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine

DIES_IN_MID_BODY = Answer(raw=b'HTTP/1.1 200 OK\r\ncontent-length: 5000\r\n\r\n{"choices": [')
DIES_SPEECHLESS = Answer(raw=b"")


def first(answers: list[Answer]) -> Callable[[Asked], Awaitable[Answer]]:
    """Give these answers to draws, then good ones."""
    waiting = iter(answers)

    async def draw(asked: Asked) -> Answer:
        return next(waiting, None) or await say_vllm(asked)

    return drawing(draw)


@pytest.mark.parametrize(
    "failure",
    [
        Answer(429, b"slow down"),
        Answer(500, b"oh"),
        Answer(502, b"bad gateway"),
        Answer(503, {"error": "overloaded"}),
        Answer(504),
        DIES_IN_MID_BODY,
        DIES_SPEECHLESS,
    ],
    ids=["429", "500", "502", "503", "504", "mid body", "speechless"],
)
async def test_what_may_be_retried_is(failure: Answer) -> None:
    async with serving(VLLMEngine, first([failure, failure])) as ((server,), engine):
        output = await generate(engine)
        assert output.output_ids.tolist() == [4, 5]
        assert len(server.draws) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_what_may_not_be_retried_is_not(status: int) -> None:
    answer = Answer(status, {"error": {"message": "no\nsuch \x1b[31m thing" + "x" * 9000}})
    async with serving(SGLangEngine, always(answer, say_sglang)) as ((server,), engine):
        reply = await ask(engine)
        assert isinstance(reply, RequestRefusedError)
        assert f"127.0.0.1:{server.port}: /generate: status {status}: " in str(reply)
        assert str(reply).isprintable()
        assert len(str(reply)) < 1000
        assert len(server.draws) == 1
        if status == 400:  # a wrong request is not the server's fault
            for k in range(5):
                assert isinstance(await ask(engine, f"{k}@0"), GenerationError)
            assert len(server.draws) == 6
            assert engine._servers[0].is_healthy


async def test_retries_come_to_an_end() -> None:
    calm = options(retries=RetryLimits(4, 0.001, rest_s=0.01))
    async with serving(VLLMEngine, always(Answer(503, b"busy")), options=calm) as (
        (server,),
        engine,
    ):
        reply = await ask(engine)
        assert isinstance(reply, ServerUnavailableError)
        assert reply.cause == "unavailable"
        assert "/inference/v1/generate: status 503: busy" in str(reply)
        assert len(server.draws) == 4


async def test_a_server_that_is_too_slow_is_left_for_another() -> None:
    hasty = options(time_limits=TimeLimits(request_s=0.2))
    async with (
        Loopback(drawing(lambda _: asyncio.sleep(99), say_sglang)) as slow,  # type: ignore[arg-type,return-value]
        Loopback(say_sglang) as quick,
        SGLangEngine([slow.url, quick.url], options=hasty) as engine,
    ):
        output = await generate(engine)
        assert output.output_ids.tolist() == [4, 5]
        assert slow.hung_up == slow.draws
        assert all(server.is_healthy for server in engine._servers)


async def test_requests_go_where_the_fewest_are_in_flight() -> None:
    async with serving(VLLMEngine, say_vllm, 3) as (servers, engine):
        for _ in range(4):
            await asyncio.gather(*(generate(engine, f"q{k}@0") for k in range(9)))
        assert all(len(server.draws) == 12 for server in servers)


async def test_those_that_asked_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajpack.agent.servers.engine.MAX_EPISODES", 2)
    async with serving(VLLMEngine, say_vllm, options=options(seed=0)) as ((server,), engine):
        for qid in ("a", "b", "a", "c", "a", "b"):
            await generate(engine, qid)
        seeds = [asked.payload["sampling_params"]["seed"] for asked in server.draws]
        numbers = [("a", 0), ("b", 0), ("a", 1), ("c", 0), ("a", 2), ("b", 0)]
        assert seeds == [derive_seed(0, *names) for names in numbers]


async def test_counts_come_back_to_nothing_whatever_happens() -> None:
    failures = itertools.cycle(
        [Answer(503), DIES_SPEECHLESS, Answer(400), Answer(200, b"{"), None, None]
    )

    async def draw(asked: Asked) -> Answer:
        await asyncio.sleep(0.001)
        return next(failures) or await say_vllm(asked)

    async with serving(VLLMEngine, drawing(draw), 2) as (_, engine):
        tasks = [asyncio.create_task(ask(engine, str(k))) for k in range(40)]
        await asyncio.sleep(0.02)
        for task in tasks[1::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [server.num_in_flight for server in engine._servers] == [0, 0]
        assert engine._calls == set()


def test_the_requests_of_a_dead_server_move_and_it_returns_when_it_is_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        dead = Loopback(say_vllm)
        await dead.__aenter__()
        async with (
            Loopback(say_vllm) as alive,
            VLLMEngine([dead.url, alive.url], options=options()) as engine,
        ):
            await generate(engine)
            assert (len(dead.draws), len(alive.draws)) == (1, 0)
            await dead.__aexit__()
            for _ in range(2):
                assert (await generate(engine)).output_ids.tolist() == [4, 5]
            assert len(alive.draws) == 2
            async with dead:
                await dead.wait_for_more()  # its health is asked for
                while len(dead.draws) == 1:
                    await generate(engine)
        assert f"out of rotation: 127.0.0.1:{dead.port}: " in caplog.text

    asyncio.run(body())
    assert "stamina.retry_scheduled" in caplog.text


async def test_an_outage_ends_in_an_error_that_names_the_server() -> None:
    server = Loopback(say_vllm)
    await server.__aenter__()
    limits = TimeLimits(outage_s=0.1)
    async with VLLMEngine(server.url, options=options(time_limits=limits)) as engine:
        await server.__aexit__()
        reply = await ask(engine)
        assert isinstance(reply, ServerUnavailableError)
        assert f"no server is healthy after 0.1 s: 127.0.0.1:{server.port}: /" in str(reply)
        assert "ClientConnectorError" in str(reply)


@pytest.mark.parametrize("status", [503, 401])
async def test_a_start_without_a_healthy_server_fails_and_leaves_nothing(status: int) -> None:
    async def unwell(asked: Asked) -> Answer:
        return Answer(status, b"not now")

    late = options(time_limits=TimeLimits(start_s=0.1))
    words = f"healthy after 0.1 s: .*/health: status {status}: not now"
    with pytest.raises(SetupError, match=words):
        async with serving(SGLangEngine, unwell, 2, options=late):
            pass
    assert asyncio.all_tasks() == {asyncio.current_task()}


SLOW_REST = RetryLimits(wait_initial_s=0.001, rest_s=60)


@pytest.mark.parametrize(
    "answer",
    [Answer(302), Answer(401), Answer(403), Answer(raw=b"SSH-2.0-x\r\n\r\n"), Answer(200, b"{")],
    ids=["302", "401", "403", "no HTTP", "no JSON"],
)
async def test_a_server_that_fails_quickly_does_not_attract_everybody(answer: Answer) -> None:
    async with (
        Loopback(always(answer)) as bad,
        Loopback(say_sglang) as good,
        SGLangEngine([bad.url, good.url], options=options(retries=SLOW_REST)) as engine,
    ):
        replies = [await ask(engine, f"{k}@0") for k in range(8)]
        assert (len(bad.draws), len(good.draws)) == (3, 5)
    assert sum(isinstance(reply, GenerationError) for reply in replies) == 3


async def test_a_death_counts_once_however_many_requests_it_ends() -> None:
    async with serving(VLLMEngine, drawing(never)) as ((server,), engine):
        asked = [asyncio.create_task(ask(engine, f"{k}@0")) for k in range(20)]
        await server.wait_for_draws(20)
        await server.__aexit__()
        (one,) = engine._servers
        await until(lambda: not (one.is_healthy or one.num_in_flight))
        assert one.num_failures == 1
        server.say = say_vllm
        async with server:
            assert not [r for r in await asyncio.gather(*asked) if isinstance(r, Exception)]
        assert one.num_failures == 0
