"""Servers that are broken: each answer is one error with the server's name."""

import asyncio
import base64
import gc
import itertools
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.agent.servers.loopback import (
    Answer,
    Asked,
    Loopback,
    always,
    ask,
    drawing,
    encode,
    generate,
    options,
    say_sglang,
    say_vllm,
    serving,
    vllm_body,
)
from trajpack.agent.errors import (
    GenerationError,
    MalformedResponseError,
    RequestRefusedError,
)
from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.options import RetryLimits
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine

GOOD = encode(vllm_body([4, 5]))


def head(*lines: str, body: bytes = b"") -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode() + body


BODIES: list[tuple[Any, bytes, str]] = [
    (VLLMEngine, b"<html>", "expected JSON"),
    (VLLMEngine, b'{"text": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", "recursion"),
    (VLLMEngine, b'{"error": {"message": "no\\u001b"}}\x1b', r'{"message": "no\u001b"}}\x1b'),
    (VLLMEngine, encode(vllm_body([])), "no token was sampled"),
    (SGLangEngine, b"", "expected JSON"),
    (SGLangEngine, b'{"error": {"message": "no"}}', 'in {"error": {"message": "no"}}'),
]
EXCHANGES: list[tuple[Answer, str]] = [
    (Answer(302, headers={"location": "http://127.0.0.1:9/"}), "status 302"),
    (Answer(204), "status 204"),
    (Answer(raw=b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "/inference/v1/generate: no HTTP: "),
    (Answer(raw=head("content-length: -5", body=b"{}")), "Content-Length"),
]


async def reply_to(answer: Answer, engine_type: Any = VLLMEngine) -> tuple[Any, Loopback]:
    say = always(answer, say_vllm if engine_type is VLLMEngine else say_sglang)
    changed = options(vocab_size=1000, retries=RetryLimits(2, 0.001, rest_s=0.01))
    async with serving(engine_type, say, options=changed) as ((server,), engine):
        reply = await ask(engine)
    assert isinstance(reply, GenerationError), reply
    assert f"127.0.0.1:{server.port}: " in str(reply)
    assert str(reply).isprintable()
    assert len(str(reply)) < 1000
    return reply, server


@pytest.mark.parametrize(
    ("engine_type", "answer", "words"),
    [
        *((engine_type, Answer(body=body), words) for engine_type, body, words in BODIES),
        *((VLLMEngine, answer, words) for answer, words in EXCHANGES),
    ],
    ids=range(len(BODIES) + len(EXCHANGES)),
)
async def test_what_is_no_answer_is_asked_for_once(
    engine_type: Any, answer: Answer, words: str
) -> None:
    reply, server = await reply_to(answer, engine_type)
    assert isinstance(reply, MalformedResponseError)
    assert words in str(reply)
    assert len(server.draws) == 1


BROKEN: list[Answer] = [
    *(Answer(status, GOOD) for status in (101, 206, 304, 400, 404, 429, 500, 999)),
    *(Answer(raw=raw) for raw in (b"", bytes(4096), b"HTTP/1.1 200 OK\r\ncontent-le")),
    Answer(raw=head("content-length: 5", "content-length: 7", body=b"12345")),
    Answer(raw=head("content-length: 5000", body=GOOD)),
    Answer(raw=head("transfer-encoding: chunked", body=b"5000\r\n12345")),
    Answer(400, b"a\r\nERROR forged\n\x1b[2J"),
]


def test_broken_answers_are_errors_and_leave_no_file_open() -> None:
    asyncio.run(reply_to(BROKEN[0]))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for engine_type in (VLLMEngine, SGLangEngine):
        for answer in BROKEN:
            asyncio.run(reply_to(answer, engine_type))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_long_answer_in_pieces_is_taken() -> None:
    """Chunks of 200 bytes, and a body that is parsed beside the event loop."""
    whole = encode(vllm_body(range(20_000), [-1.5] * 20_000, "length"))
    pieces = [whole[start : start + 200] for start in range(0, len(whole), 200)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    answer = Answer(raw=head("transfer-encoding: chunked", body=body))
    async with serving(VLLMEngine, always(answer)) as (_, engine):
        output = await generate(engine, sampling=SamplingParams(20_000))
        assert len(output.output_ids) == 20_000


@pytest.mark.parametrize(
    ("status", "error", "reason"),
    [
        (200, MalformedResponseError, "longer than 70000 bytes"),
        (400, RequestRefusedError, "status 400"),
    ],
)
async def test_an_endless_body_is_not_taken(status: int, error: type, reason: str) -> None:
    poured = itertools.count()

    def pour() -> Iterator[bytes]:
        yield b"HTTP/1.1 %d OK\r\ntransfer-encoding: chunked\r\n\r\n" % status
        for _ in poured:
            yield b"10000\r\n" + b"[" * 0x10000 + b"\r\n"

    say, small = always(Answer(raw=pour())), options(max_response_bytes=70_000)
    async with serving(VLLMEngine, say, options=small) as (_, engine):
        reply = await ask(engine)
    assert isinstance(reply, error), reply
    assert reason in str(reply)
    assert next(poured) < 128  # what the kernel keeps on its way


@pytest.mark.parametrize("status", [401, 503, 200])
async def test_secrets_are_in_no_message(status: int, caplog: pytest.LogCaptureFixture) -> None:
    token, password = "t0ken-secret", "passw0rd-secret"
    basic = "Basic " + base64.b64encode(f"me:{password}".encode()).decode()
    errors: list[str] = []

    async def draw(asked: Asked) -> Answer:
        assert asked.headers["authorization"] in (f"Bearer {token}", basic)
        return Answer(status, {"error": "no"})

    caplog.set_level(logging.DEBUG)
    async with Loopback(drawing(draw)) as server:
        address = server.url.replace("//", f"//me:{password}@")
        for changes in ({"token": token}, {}):
            changed = options(**changes)
            async with VLLMEngine(address, options=changed) as engine:
                reply = await ask(engine)
            assert isinstance(reply, GenerationError)
            shown = [reply, reply.__cause__, reply.__context__, changed, engine]
            errors.extend(part for one in shown for part in (str(one), repr(one)))
        assert len({asked.headers["authorization"] for asked in server.draws}) == 2
    errors.append(caplog.text)
    errors += [str(vars(record)) for record in caplog.records]
    for secret in (token, password, basic.removeprefix("Basic ")):
        assert not any(secret in one for one in errors), secret
