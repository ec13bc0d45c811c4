"""A real vLLM server on the CPU, and a model small enough for it.

`make test-engines` installs the server in a virtual environment of its own: it needs another torch
and another transformers than the library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from trajpack.agent.models.tiny_model import build_tiny_model

PYTHON = Path(sys.prefix, "engines", "vllm", "bin", "python")
MAX_MODEL_LEN = 512
_START_S = 240.0
_STOP_S = 20.0
_SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


@dataclass(frozen=True)
class TinyModel:
    """A model that the server can run, here and in a folder."""

    folder: Path
    model: Any
    tokenizer: Any

    def logprobs(
        self, prompt: Any, completion: Any, temperature: float = 1.0, top_k: int = 0
    ) -> Any:
        """Return the log-probability of each completion token, by one full forward pass."""
        ids = [int(token) for token in [*prompt, *completion]]
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0].double()
        logits = logits[len(prompt) - 1 : -1] / temperature
        if top_k:
            lowest = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < lowest, -torch.inf)
        sampled = torch.tensor(ids[len(prompt) :])[:, None]
        return logits.log_softmax(-1).gather(1, sampled)[:, 0].numpy()


def write_tiny_model(folder: Path) -> TinyModel:
    """Save a tiny Qwen3 whose heads are wide enough for the server's attention on a CPU."""
    from transformers import Qwen3ForCausalLM

    small, tokenizer = build_tiny_model(seed=0)
    config = small.config
    config.head_dim, config.max_position_embeddings = 32, MAX_MODEL_LEN
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return TinyModel(folder, model, tokenizer)


class RunningServer:
    """A server that answers."""

    def __init__(self, url: str, log: Path) -> None:
        self.url, self.log = url, log

    def get(self, path: str) -> bytes:
        """Return the body that the server answers with."""
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return bytes(response.read())

    def metric(self, name: str, label: str = "") -> float:
        """Return a figure of the server, summed over those of its lines that have a label."""
        lines = self.get("/metrics").decode().splitlines()
        lines = [line for line in lines if line.startswith(f"{name}{{") and label in line]
        assert lines, f"{name} with {label!r} is not among the server's metrics"
        return sum(float(line.split()[-1]) for line in lines)


@contextlib.contextmanager
def vllm_server(model: TinyModel, log: Path, *arguments: str) -> Iterator[RunningServer]:
    """Run a server while the context lasts; nothing of it is left afterwards."""
    if not PYTHON.exists():
        pytest.skip(f"vLLM is not in {PYTHON.parents[1]}: `make test-engines` puts it there")
    port = _free_port()
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model.folder), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | _SETTINGS,
            start_new_session=True,  # a group of its own: it starts other processes
        )
    try:
        server = RunningServer(f"http://127.0.0.1:{port}", log)
        _wait_until_well(server, process)
        yield server
    finally:
        _stop(process)


def _wait_until_well(server: RunningServer, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            server.get("/health")
            return
        time.sleep(0.25)  # there is nothing else to wait on
    end = server.log.read_text(errors="replace")[-3000:]
    pytest.fail(f"the server did not start (status {process.poll()}):\n{end}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and all that it started."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
