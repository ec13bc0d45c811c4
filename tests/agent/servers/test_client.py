"""Certificates of servers."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from tests.agent.servers.loopback import Loopback, generate, options, say_vllm
from trajpack.agent.errors import SetupError
from trajpack.agent.servers.vllm import VLLMEngine


@pytest.mark.parametrize("content", [None, "nothing"])
async def test_certificates_that_are_not_there_are_named(
    tmp_path: Path, content: str | None
) -> None:
    ca_file = tmp_path / "ca.pem"
    if content is not None:
        ca_file.write_text(content)
    with pytest.raises(SetupError, match=f"no certificates in ca_file '{ca_file}'"):
        await VLLMEngine("https://127.0.0.1:1", options=options(ca_file=str(ca_file))).__aenter__()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes a certificate, is not installed")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    return tmp_path / "cert.pem"


async def test_a_server_with_a_certificate_of_its_own_is_asked(certificate: Path) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, certificate.with_name("key.pem"))
    changed = options(ca_file=str(certificate))
    async with Loopback(say_vllm, tls) as server, VLLMEngine(server.url, options=changed) as it:
        await generate(it)
