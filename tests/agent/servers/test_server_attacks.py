"""Servers that answer as no server should: each answer is one error, and costs little."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import ssl
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h11
import pytest

from tests.agent.servers.hostile_answers import BEHAVIOURS, TINY, Hostile, Serve
from tests.agent.servers.loopback import ask, encode, generate, options, raw_server, vllm_body
from trajpack.agent.errors import GenerationError, MalformedResponseError, SetupError
from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.options import RetryLimits, TimeLimits
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine

SEED = 14
MOST_EVENTS = 1500
"""What the parser may make of an answer before other tasks run; 5 microseconds each."""
LIMITS = TimeLimits(request_s=20, generation_s=30, outage_s=2, start_s=5, control_s=5)


@pytest.fixture
def events_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Events of the parser in each turn of the event loop, by the number of the turn."""
    counted: Counter[int] = Counter()
    next_event = h11.Connection.next_event

    def counting(connection: h11.Connection) -> Any:
        counted[counted[-1]] += 1
        return next_event(connection)

    monkeypatch.setattr(h11.Connection, "next_event", counting)
    return counted


async def count_turns(counted: Counter[int]) -> None:
    while True:
        counted[-1] += 1
        await asyncio.sleep(0)


@pytest.mark.parametrize("engine_type", [VLLMEngine, SGLangEngine])
@pytest.mark.parametrize("name", TINY)
def test_an_answer_that_is_more_work_than_it_is_worth_is_refused(
    name: str, engine_type: Any, events_at_a_time: Counter[int]
) -> None:
    serve, reason = TINY[name]

    async def body() -> None:
        changed = options(time_limits=LIMITS)
        async with Hostile(serve) as server, engine_type(server.url, options=changed) as engine:
            turns = asyncio.create_task(count_turns(events_at_a_time))
            reply = await ask(engine)
            turns.cancel()
            assert isinstance(reply, MalformedResponseError), reply
            assert reason in str(reply)
            assert server.num_draws == 1

    asyncio.run(body())
    del events_at_a_time[-1]
    assert 0 < max(events_at_a_time.values()) < MOST_EVENTS


def test_a_server_that_greets_in_tiny_pieces_is_refused() -> None:
    """Health, and whatever else a server is asked, is read in the same way."""
    serve, reason = TINY["interim answers 100"]

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await serve(writer)

    async def body() -> None:
        async with raw_server(greet) as url:
            with pytest.raises(SetupError, match=reason):
                async with VLLMEngine(url, options=options(time_limits=LIMITS)):
                    pass

    asyncio.run(body())


def test_a_long_answer_in_reasonable_pieces_is_taken() -> None:
    """Chunks of 200 bytes, and a head of 8 KB: what proxies make of a good answer."""
    answer = encode(vllm_body(range(20_000), [-1.5] * 20_000, "length"))
    headers = b"".join(b"x-cookie-%d: %s\r\n" % (k, b"y" * 80) for k in range(80))

    async def serve(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n" + headers)
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        for start in range(0, len(answer), 200):
            piece = answer[start : start + 200]
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        writer.write(b"0\r\nx: y\r\n\r\n")
        await writer.drain()

    async def body() -> None:
        async with Hostile(serve) as server, VLLMEngine(server.url, options=options()) as engine:
            output = await generate(engine, sampling=SamplingParams(20_000))
            assert len(output.output_ids) == 20_000

    asyncio.run(body())


def test_pieces_are_counted_behind_tls_too(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes a certificate, is not installed")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", key, "-out", certificate, "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    serve, reason = TINY["chunks of a byte"]

    async def body() -> None:
        changed = options(time_limits=LIMITS, ca_file=certificate)
        async with (
            Hostile(serve, 2, tls) as server,
            VLLMEngine(server.url, options=changed) as engine,
        ):
            for k in range(2):
                await generate(engine, f"{k}@0")
            reply = await ask(engine)
            assert isinstance(reply, MalformedResponseError), reply
            assert reason in str(reply)

    asyncio.run(body())


async def one_reply(serve: Serve, engine_type: Any, *, num_good: int, request_s: float) -> Any:
    """Return the reply to a request that is not answered well, after ``num_good`` that are."""
    limits = TimeLimits(2, request_s, 60, outage_s=5, start_s=20, control_s=5)
    retries = RetryLimits(max_attempts=2, wait_initial_s=0.001, wait_max_s=0.01, rest_s=0.01)
    changed = options(vocab_size=1000, time_limits=limits, retries=retries)
    async with (
        Hostile(serve, num_good) as server,
        engine_type(server.url, options=changed) as engine,
    ):
        for k in range(num_good):
            await generate(engine, f"{k}@0")
        return await ask(engine)  # which takes one reply, and sees that there is no other


@pytest.mark.attack
def test_each_answer_that_is_none_is_one_error(tries: Callable[[int], int]) -> None:
    assert len(BEHAVIOURS) >= 83
    cases = [
        (name, engine_type, num_good)
        for name in BEHAVIOURS
        for engine_type in (VLLMEngine, SGLangEngine)
        for num_good in (0, 1)
    ]
    assert len(cases) >= 341
    chosen = random.Random(SEED).sample(cases, tries(len(cases)))
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), resident_bytes()
    for case in chosen:
        name, engine_type, num_good = case
        waits = name.startswith(("silence", "a slow drip"))
        reply = asyncio.run(
            one_reply(
                BEHAVIOURS[name], engine_type, num_good=num_good, request_s=0.1 if waits else 30
            )
        )
        assert isinstance(reply, GenerationError), (case, reply)
        text = str(reply)
        assert "127.0.0.1:" in text, case
        assert text.isprintable(), case
        assert len(text) < 1000, case
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before[0]
    assert resident_bytes() - before[1] < 128 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
