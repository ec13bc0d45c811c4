"""Servers that answer as no server should: each answer is one error, and costs little."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agent.servers.hostile_answers import BEHAVIOURS, Hostile, Serve, sending
from tests.agent.servers.loopback import ask, encode, generate, options, vllm_body
from trajpack.agent.errors import GenerationError
from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.options import RetryLimits, TimeLimits
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine

SEED = 14
LIMITS = TimeLimits(request_s=20, generation_s=30, outage_s=2, start_s=5, control_s=5)


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


def test_a_server_with_a_certificate_of_its_own_is_asked(tmp_path: Path) -> None:
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

    async def body() -> None:
        changed = options(time_limits=LIMITS, ca_file=certificate)
        async with (
            Hostile(sending(b""), 1, tls) as server,
            VLLMEngine(server.url, options=changed) as engine,
        ):
            await generate(engine)

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
    cases = [
        (name, engine_type, num_good)
        for name in BEHAVIOURS
        for engine_type in (VLLMEngine, SGLangEngine)
        for num_good in (0, 1)
    ]
    assert len(cases) >= 250
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
