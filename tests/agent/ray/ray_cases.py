"""Builders of the cluster tests: a scripted engine, an agent that notes each start, a cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trajpack.agent.protocols import (
    Environment,
    Generate,
    GenerationOutput,
    GenerationRequest,
    Prompt,
)
from trajpack.agent.ray.cluster import local_cluster
from trajpack.packing.types import Trajectory

ROOT = Path(__file__).parents[3]


class ScriptedEngine:
    """Samples one token: the number that its weights are; the version is that of the weights."""

    def __init__(self, delay_s: float, load_s: float = 0.0) -> None:
        self._load_s = load_s
        self.version = 0
        self.number = 100
        self._delay_s = delay_s

    async def update_weights(self, state_dict: dict[str, torch.Tensor], version: int) -> None:
        if int(state_dict.get("victim", 0)) == os.getpid():
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(self._load_s)
        self.number = int(state_dict["number"]) if "number" in state_dict else 100 + version
        self.version = version

    async def __aenter__(self) -> ScriptedEngine:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        await asyncio.sleep(self._delay_s)
        qid, ids, _ = request
        sampled, version = [self.number, self.version], self.version
        return GenerationOutput(qid, ids, sampled, [-0.5, -0.25], False, version, version)


class RightAnswers:
    async def reset(self) -> None:
        return None

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return None, 1.0, True, False, {}


@dataclass(frozen=True)
class NotingAgent:
    """Has two turns, and writes ``qid pid`` to a file before the first."""

    notes: Path
    num_turns: int = 2

    async def run(self, prompt: Prompt, env: Environment, generate: Generate) -> list[Trajectory]:
        with self.notes.open("a") as file:
            file.write(f"{prompt.id} {os.getpid()}\n")
        if prompt.id.startswith("bad"):
            raise KeyError("no such thing")
        if prompt.id.startswith("endless"):
            await self._wait_for_ever(prompt.id)
        turns, ids = [], list(prompt.input_ids)
        for _ in range(self.num_turns):
            turn = await generate(ids)
            turns.append(replace(turn, reward=float(zlib.crc32(prompt.id.encode()) % 3)))
            ids = [*ids, *turn.completion_ids, 7]
        return [Trajectory(prompt.id, turns)]

    async def _wait_for_ever(self, qid: str) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            with self.notes.open("a") as file:
                file.write(f"{qid} 0\n")


@dataclass(frozen=True)
class MakeScripted:
    """The factory of a worker: scripted engine, noting agent."""

    notes: Path
    delay_s: float = 0.01
    stillborn: Path | None = None
    load_s: float = 0.0

    @asynccontextmanager
    async def __call__(self, number: int) -> AsyncIterator[tuple[Any, Any, Any]]:
        if self.stillborn is not None and not self.stillborn.exists():
            self.stillborn.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        async with ScriptedEngine(self.delay_s, self.load_s) as engine:
            yield engine, NotingAgent(self.notes), RightAnswers()

    def started(self) -> list[tuple[str, int]]:
        """Return which episode began in which process, in order."""
        lines = (line.split() for line in self.notes.read_text().splitlines())
        return [(qid, int(pid)) for qid, pid in lines]


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"q{k}", [k + 1, k + 2], task_id=k) for k in range(count)]


@contextmanager
def running_cluster() -> Iterator[None]:
    """Run a cluster of this machine whose workers can import the tests; nothing of it stays."""
    # Ray starts a process for each core at once; what runs here asks for parts of one.
    with ExitStack() as cluster:
        with pytest.MonkeyPatch.context() as patch:  # its processes keep what they begin with
            patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'src'}")
            patch.setenv("RAY_worker_niceness", "0")  # else other tests leave it no processor
            cluster.enter_context(local_cluster(num_cpus=2, object_store_bytes=200 << 20))
        yield
