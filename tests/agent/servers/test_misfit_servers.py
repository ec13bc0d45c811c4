"""Servers that answer quickly and wrongly, or repeat secrets: they rest, and nothing is told."""

import asyncio
import base64
import logging
from typing import Any

import pytest

from tests.agent.servers.loopback import (
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
    until,
    vllm_body,
)
from trajpack.agent.errors import GenerationError, SetupError
from trajpack.agent.servers.client import RetryableError
from trajpack.agent.servers.options import RetryLimits
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine

SLOW_REST = RetryLimits(wait_initial_s=0.001, rest_s=60, max_failures=2)


def always(answer: Answer) -> Any:
    async def draw(asked: Asked) -> Answer:
        return answer

    return drawing(draw)


@pytest.mark.parametrize(
    "answer",
    [Answer(302), Answer(401), Answer(403), Answer(raw=b"SSH-2.0-x\r\n\r\n"), Answer(200, b"{")],
    ids=["302", "401", "403", "no HTTP", "no JSON"],
)
def test_a_server_that_fails_quickly_does_not_attract_everybody(answer: Answer) -> None:
    async def body() -> list[Any]:
        async with (
            Loopback(always(answer)) as bad,
            Loopback(say_sglang) as good,
            SGLangEngine([bad.url, good.url], options=options(retries=SLOW_REST)) as engine,
        ):
            replies = [await ask(engine, f"{k}@0") for k in range(8)]
            assert (len(bad.draws), len(good.draws)) == (2, 6)
            return replies

    replies = asyncio.run(body())
    assert [isinstance(reply, GenerationError) for reply in replies] == [True] * 2 + [False] * 6


def test_a_request_that_is_wrong_is_not_the_servers_fault() -> None:
    async def body() -> None:
        async with serving(SGLangEngine, always(Answer(400))) as ((server,), engine):
            for k in range(6):
                assert isinstance(await ask(engine, f"{k}@0"), GenerationError)
            assert len(server.draws) == 6
            assert engine._control is not None
            assert engine._control.router.servers[0].is_healthy

    asyncio.run(body())


def test_the_second_attempt_is_made_on_another_server() -> None:
    async def body() -> None:
        async with (
            Loopback(always(Answer(503))) as bad,
            Loopback(say_vllm) as good,
            VLLMEngine([bad.url, good.url], options=options()) as engine,
        ):
            await generate(engine)
            assert (len(bad.draws), len(good.draws)) == (1, 1)

    asyncio.run(body())


def test_a_death_counts_once_however_many_requests_it_ends() -> None:
    async def never(asked: Asked) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    async def body() -> None:
        async with serving(VLLMEngine, drawing(never)) as ((server,), engine):
            asked = [asyncio.create_task(ask(engine, f"{k}@0")) for k in range(20)]
            await server.wait_for_draws(20)
            await server.__aexit__()
            assert engine._control is not None
            (one,) = engine._control.router.servers
            await until(lambda: not (one.is_healthy or one.num_in_flight))
            assert one.num_failures == 1
            server.say = say_vllm
            async with server:
                assert not [r for r in await asyncio.gather(*asked) if isinstance(r, Exception)]
            assert one.num_failures == 0

    asyncio.run(body())


def test_those_that_were_sent_away_together_come_back_one_by_one() -> None:
    async def waits_of() -> set[bool | float]:
        changed = options(retries=RetryLimits(4, 1.0, 3.0))
        async with serving(VLLMEngine, say_vllm, options=changed) as (_, engine):
            assert engine._control is not None
            pause = engine._retry_delay
            return {pause(RetryableError("", wait_s=9)) for _ in range(9)}

    waits = asyncio.run(waits_of())
    assert len(waits) > 3
    assert all(3 <= wait <= 4 for wait in waits)


@pytest.mark.parametrize("token", ["token", "stop", "5", "0", "choices", "-0.5"])
def test_a_token_may_be_a_word_or_a_number_that_an_answer_has(token: str) -> None:
    async def body() -> None:
        for engine_type, say in ((VLLMEngine, say_vllm), (SGLangEngine, say_sglang)):
            async with serving(engine_type, say, options=options(token=token)) as (_, engine):
                assert (await generate(engine)).output_ids.tolist() == [4, 5]

    asyncio.run(body())


SECRET = "t0ken-secret"
ESCAPED = "".join(f"\\u{ord(char):04x}" for char in SECRET)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(400, b"x" * 295 + SECRET.encode()),
        Answer(200, vllm_body([4], finish=SECRET)),
        Answer(200, vllm_body([4], finish="y" * 75 + SECRET)),
        Answer(200, {"error": SECRET}),
        Answer(200, f'{{"error": "{ESCAPED}"}}'.encode()),
        Answer(503, f'{{"error": "{SECRET}"}}'.encode()),
        Answer(raw=f"Authorization: Bearer {SECRET}\r\n\r\n".encode()),
    ],
)
@pytest.mark.parametrize("is_password", [False, True, None])
def test_what_repeats_a_secret_is_not_shown(
    answer: Answer, is_password: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> GenerationError:
        async with Loopback(always(answer)) as server:
            changed = options(token=SECRET if is_password is False else None)
            user = {True: f"//me:{SECRET}@", None: f"//{SECRET}@", False: "//"}[is_password]
            url = server.url.replace("//", user)
            async with VLLMEngine(url, options=changed) as engine:
                reply = await ask(engine)
        assert isinstance(reply, GenerationError)
        assert f"127.0.0.1:{server.port}: " in str(reply)
        return reply

    with caplog.at_level(logging.INFO):
        reply = asyncio.run(body())
    shown = [str(reply), repr(reply), *(str(vars(line)) for line in caplog.records)]
    for part in (SECRET[:6], base64.b64encode(SECRET.encode()).decode()[:6]):
        assert not [text for text in shown if part in text]
    assert "it repeats a secret" in str(reply)


def test_a_version_that_is_a_secret_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    is_told = False

    async def say(asked: Asked) -> Answer:
        nonlocal is_told
        if asked.path == "/update_weight_version":
            is_told = True
            return Answer(body={"success": True})
        if asked.path == "/model_info":
            return Answer(body={"weight_version": SECRET})
        if asked.is_draw:
            return Answer(body=sglang_body([4], versions=[(SECRET if is_told else "1", 0, 1)]))
        return await say_sglang(asked)

    async def body() -> None:
        async with serving(SGLangEngine, say, options=options(token=SECRET)) as (_, engine):
            await engine.set_version(3)
            asked = asyncio.create_task(ask(engine))
            assert engine._control is not None
            (server,) = engine._control.router.servers
            await until(lambda: server.is_behind)
            asked.cancel()

    with caplog.at_level(logging.INFO):
        asyncio.run(body())
    assert "told of version 3, it says: it repeats a secret" in caplog.text
    assert not [line for line in caplog.records if SECRET[:6] in str(vars(line))]


def test_a_token_that_is_not_taken_is_noticed_at_the_start() -> None:
    async def guarded(asked: Asked) -> Answer:
        return Answer() if asked.path == "/health" else Answer(401, {"error": "Unauthorized"})

    async def body() -> None:
        with pytest.raises(SetupError, match=r"127\.0\.0\.1:\d+: status 401 on /v1/models"):
            async with serving(VLLMEngine, guarded):
                pass

    asyncio.run(body())
