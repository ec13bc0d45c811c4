"""Connections: certificates, lifetime, and responses sent twice."""

import asyncio
import json
import re
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.agent.servers.loopback import (
    Answer,
    Asked,
    Loopback,
    drawing,
    encode,
    generate,
    options,
    raw_server,
    say_vllm,
    serving,
    sglang_body,
    until,
    vllm_body,
)
from trajpack.agent.errors import SetupError
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine


def test_certificates_that_are_not_there_are_named(tmp_path: Path) -> None:
    async def body(ca_file: Path) -> None:
        with pytest.raises(SetupError, match=f"no certificates in ca_file '{ca_file}'"):
            await VLLMEngine(
                "https://127.0.0.1:1", options=options(ca_file=str(ca_file))
            ).__aenter__()

    asyncio.run(body(tmp_path / "none.pem"))
    (tmp_path / "empty.pem").write_text("nothing")
    asyncio.run(body(tmp_path / "empty.pem"))


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
        changed = options(ca_file=certificate)
        async with Loopback(say_vllm, tls) as server, VLLMEngine(server.url, options=changed) as it:
            await generate(it)

    asyncio.run(body())


def test_connections_that_a_rush_has_left_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajpack.agent.servers.client._KEEP_ALIVE_S", 0.2)
    everybody = asyncio.Barrier(12)

    async def draw(asked: Asked) -> Answer:
        if asked.payload["token_ids"] == [1]:
            await everybody.wait()
        return await say_vllm(asked)

    async def body() -> None:
        async with serving(VLLMEngine, drawing(draw)) as ((server,), engine):
            await asyncio.gather(*(generate(engine, f"{k}@0", [1]) for k in range(12)))
            assert len(server._writers) >= 12
            await asyncio.sleep(0.25)
            for k in range(8):
                await generate(engine, f"{k}@1")
            await until(lambda: len(server._writers) == 1)

    asyncio.run(body())


@pytest.mark.parametrize("engine_type", [VLLMEngine, SGLangEngine])
@pytest.mark.parametrize("num_too_many", [1, 2])
def test_an_answer_that_comes_twice_answers_nobody_else(
    engine_type: Any, num_too_many: int
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            asked = json.loads(await reader.readexactly(int(length[1]))) if length else {}
            ids = asked.get("token_ids") or asked.get("input_ids")
            if ids is None:
                answer: Any = {}
            elif engine_type is VLLMEngine:
                answer = vllm_body([ids[-1] + 1])
            else:
                answer = sglang_body([ids[-1] + 1])
            content = encode(answer)
            whole = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(content) + content
            # at once, so that what is too much waits in the client
            writer.write(whole * (1 + num_too_many * (ids is not None)))
            await writer.drain()

    async def body() -> None:
        async with raw_server(serve) as url, engine_type(url, options=options()) as engine:
            for k in range(40, 60):
                output = await generate(engine, f"{k}@0", [k])
                assert output.output_ids.tolist() == [k + 1]

    asyncio.run(body())
