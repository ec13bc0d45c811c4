"""Servers that mean harm, or are broken: each answer is an error with the server's name."""

import asyncio
import base64
import json
import logging
import time
from typing import Any

import pytest

from tests.agent.servers.loopback import (
    Answer,
    Asked,
    Loopback,
    ask,
    drawing,
    encode,
    generate,
    options,
    raw_server,
    say_sglang,
    say_vllm,
    serving,
    sglang_body,
    vllm_body,
)
from trajpack.agent.errors import (
    GenerationError,
    MalformedResponseError,
    RequestRefusedError,
    ServerUnavailableError,
)
from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.options import TimeLimits
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine

BASIC = base64.b64encode(b"me:passw0rd-secret").decode()
DEEP = b'{"choices": ' + b"[" * 30_000 + b"]" * 30_000 + b"}"


def with_logprob(text: str) -> bytes:
    return encode(vllm_body([4, 5])).replace(b"-0.5", text.encode(), 1)


def sglang(**changes: Any) -> bytes:
    body = sglang_body([4, 5])
    body["meta_info"] |= changes
    return encode(body)


VLLM_BODIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "expected JSON"),
    "html": (b"<html>no</html>", "expected JSON"),
    "no object": (b"[]", "expected `object`, got `array`"),
    "deep nesting": (b'{"text": ' + DEEP + b"}", "recursion"),
    "a deep error": (b'{"error": ' + b"[" * 900 + b"]" * 900 + b"}", "[[["),
    "cut": (encode(vllm_body([4, 5]))[:-9], "expected JSON"),
    "no text": (b"\xff\xfe\x00" * 9, "expected JSON"),
    "NaN": (with_logprob("NaN"), "expected JSON"),
    "Infinity": (with_logprob("-Infinity"), "expected JSON"),
    "beyond float": (with_logprob("-1e400"), "out of range"),
    "null": (with_logprob("null"), "got `null` - at"),
    "placeholder": (with_logprob("-9999.0"), "above -9999"),
    "logits": (with_logprob("3.5"), "is 3.5, above 0"),
    "a text": (with_logprob('"-0.5"'), "got `str` - at"),
    "no logprobs": (encode({"choices": [{"token_ids": [1], "finish_reason": "stop"}]}), "logprobs"),
    "fewer logprobs": (encode(vllm_body([4, 5])).replace(b"[4, 5]", b"[4, 5, 6]"), "3 log-prob"),
    "id beyond the vocabulary": (encode(vllm_body([4, 1000])), "ids below 1000"),
    "negative id": (encode(vllm_body([4, -5])), "must be 0 or more"),
    "huge id": (encode(vllm_body([4, 2**70])), "token_ids"),
    "long number": (b'{"choices": [' + b"9" * 5000 + b"]}", "vLLM response"),
    "fraction": (
        encode(vllm_body([4, 5])).replace(b"[4, 5]", b"[4, 5.5]"),
        "expected `int`, got `float`",
    ),
    "more tokens than asked": (encode(vllm_body(range(1, 10))), "at most 8 tokens"),
    "no token": (encode(vllm_body([])), "no token was sampled"),
    "odd finish": (encode(vllm_body([4], finish="\x1b[2Jbye")), r"got '\x1b[2Jbye'"),
    "two samples": (encode({"choices": vllm_body([4])["choices"] * 2}), "one sample"),
    "an error": (b'{"error": {"message": "a\\nb\\u001b[2J"}}', r"a\nb\x1b[2J"),
    "another prompt": (encode(vllm_body([4]) | {"prompt_token_ids": [1, 2]}), "another prompt"),
}
SGLANG_BODIES: dict[str, tuple[bytes, str]] = {
    "deep nesting": (DEEP, "recursion"),
    "NaN": (
        sglang(output_token_logprobs=[[float("nan"), 4, None], [-1, 5, None]]),
        "expected JSON",
    ),
    "null": (sglang(output_token_logprobs=[[None, 4, None], [-1, 5, None]]), "got `null`"),
    "no pair": (sglang(output_token_logprobs=[[-1], [-1, 5, None]]), "at least length 2"),
    "no list": (sglang(output_token_logprobs=[{}, [-1, 5, None]]), "got `object`"),
    "other ids": (sglang(output_token_logprobs=[[-1, 4], [-1, 6]]), "another at index 1"),
    "fewer": (sglang(output_token_logprobs=[[-1, 4]]), "2 entries"),
    "no stop token": (sglang(finish_reason={"type": "stop", "matched": 6}), "the stop token 6"),
    "none of the stops": (
        sglang(finish_reason={"type": "stop", "matched": [6, 7]}),
        "the stop token 6, 7 at the end in output_ids, got 5",
    ),
    "stops that are none": (
        sglang(finish_reason={"type": "stop", "matched": [5, "x"]}),
        "expected `int`, got `str` - at `$.meta_info.finish_reason.matched[1]`",
    ),
    "a model gone mad": (
        sglang(finish_reason={"type": "stop", "matched": "NaN happened"}),
        "a stop token that matched in finish_reason, got 'NaN happened'",
    ),
    "unfinished": (sglang(finish_reason=None), "got `null` - at `$.meta_info.finish_reason`"),
    "beyond the vocabulary": (encode(sglang_body([4, 1000])), "ids below 1000"),
    "an error": (b'{"error": {"message": "no"}}', "the error {'message': 'no'}"),
}
CASES = [
    pytest.param(engine_type, body, reason, id=f"{engine_type.__name__}: {name}")
    for engine_type, bodies in ((VLLMEngine, VLLM_BODIES), (SGLangEngine, SGLANG_BODIES))
    for name, (body, reason) in bodies.items()
]


async def reply_to(
    answer: Answer, engine_type: Any = VLLMEngine, **changes: Any
) -> tuple[Any, Loopback]:
    async def draw(asked: Asked) -> Answer:
        return answer

    say = drawing(draw, say_vllm if engine_type is VLLMEngine else say_sglang)
    changed = options(vocab_size=1000, **changes)
    async with serving(engine_type, say, options=changed) as ((server,), engine):
        return await ask(engine), server


@pytest.mark.parametrize(("engine_type", "body", "reason"), CASES)
def test_a_body_that_is_no_answer(engine_type: Any, body: bytes, reason: str) -> None:
    reply, server = asyncio.run(reply_to(Answer(body=body), engine_type))
    assert isinstance(reply, MalformedResponseError), reply
    assert f"127.0.0.1:{server.port}: " in str(reply)
    assert reason in str(reply)
    assert str(reply).isprintable()
    assert len(str(reply)) < 1000
    assert len(server.draws) == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(302, headers={"location": "http://127.0.0.1:9/"}), "status 302"),
        (Answer(raw=b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "no HTTP on /inference/v1/generate: "),
        (Answer(raw=b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000), "Got more than 8190 bytes"),
        (
            Answer(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 999999999999999\r\n\r\n"),
            "longer",
        ),
        (Answer(raw=b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n{}"), "Content-Length"),
        (Answer(204), "status 204"),
    ],
)
def test_http_that_is_no_answer(answer: Answer, reason: str) -> None:
    reply, server = asyncio.run(reply_to(answer))
    assert isinstance(reply, MalformedResponseError), reply
    assert reason in str(reply)
    assert f"127.0.0.1:{server.port}: " in str(reply)
    assert len(server.draws) == 1


async def pour(reader: Any, writer: asyncio.StreamWriter, status: int, poured: list[int]) -> None:
    """Answer health; then pour a body out for as long as anybody takes it."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"POST"):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        return await writer.drain()
    writer.write(b"HTTP/1.1 %d OK\r\ntransfer-encoding: chunked\r\n\r\n" % status)
    while True:
        writer.write(b"10000\r\n" + b"[" * 0x10000 + b"\r\n")
        poured[0] += 0x10000
        await writer.drain()


@pytest.mark.parametrize(
    ("status", "error", "reason"),
    [
        (200, MalformedResponseError, "longer than 73764 bytes"),
        (400, RequestRefusedError, "status 400"),
    ],
)
def test_an_endless_body_is_not_taken(status: int, error: type, reason: str) -> None:
    async def body() -> None:
        poured = [0]
        pouring = raw_server(lambda reader, writer: pour(reader, writer, status, poured))
        async with pouring as url, VLLMEngine(url, options=options()) as engine:
            reply = await ask(engine)
        assert isinstance(reply, error), reply
        assert reason in str(reply)
        assert poured[0] < 8 * 2**20  # what the kernel keeps on its way

    asyncio.run(body())


def test_a_body_that_drips_is_cut_off() -> None:
    async def drip(reader: Any, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n")
        if b"generate" not in head:
            writer.write(b" " * 900)
            return await writer.drain()
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.01)

    async def body() -> None:
        limits = TimeLimits(request_s=0.1, generation_s=1)
        changed = options(time_limits=limits)
        async with raw_server(drip) as url, VLLMEngine(url, options=changed) as engine:
            reply = await ask(engine)
        assert isinstance(reply, ServerUnavailableError)

    asyncio.run(body())


@pytest.mark.parametrize("status", [401, 503, 200])
def test_secrets_are_in_no_message(status: int, caplog: pytest.LogCaptureFixture) -> None:
    token, password = "t0ken-secret", "passw0rd-secret"
    errors: list[str] = []

    async def draw(asked: Asked) -> Answer:
        assert asked.headers["authorization"] in (
            f"Bearer {token}",
            f"Basic {BASIC}",
        )
        return Answer(status, {"error": "no"})

    async def body() -> None:
        async with Loopback(drawing(draw)) as server:
            address = server.url.replace("//", f"//me:{password}@")
            for changes in ({"token": token}, {}):
                changed = options(**changes)
                engine = VLLMEngine(address, options=changed)
                async with engine:
                    reply = await ask(engine)
                assert isinstance(reply, GenerationError)
                shown = [reply, reply.__cause__, reply.__context__, changed, engine]
                errors.extend(part for one in shown for part in (str(one), repr(one)))
            assert password.encode() not in json.dumps([a.headers for a in server.asked]).encode()

    with caplog.at_level(logging.DEBUG):
        asyncio.run(body())
    errors.append(caplog.text)
    errors += [str(vars(record)) for record in caplog.records]
    for secret in (token, password, BASIC):
        assert not any(secret in one for one in errors), secret


def test_a_large_answer_is_read_beside_the_event_loop() -> None:
    count = 131_072
    answer = Answer(body=encode(vllm_body(range(count), [-1.5] * count, "length")))

    async def draw(asked: Asked) -> Answer:
        return answer

    async def body() -> float:
        longest = 0.0
        async with serving(VLLMEngine, drawing(draw)) as (_, engine):
            asked = asyncio.create_task(generate(engine, sampling=SamplingParams(count)))
            while not asked.done():
                # what this thread has computed: the machine may be busy with others
                began = time.thread_time()
                await asyncio.sleep(0)
                longest = max(longest, time.thread_time() - began)
            assert len((await asked).output_ids) == count
        return longest

    assert any(asyncio.run(body()) < 0.02 for _ in range(3))
