"""Builders of the cluster tests: a scripted engine, an agent that notes each start, a cluster."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trajpack.agent.errors import EngineEndedError
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
    """Samples the number that its weights are, their version, and the tokens allowed."""

    def __init__(self, delay_s: float, load_s: float = 0.0) -> None:
        self.version = 0
        self._number = 100
        self._delay_s, self._load_s = delay_s, load_s

    async def update_weights(self, state_dict: dict[str, torch.Tensor], version: int) -> None:
        if int(state_dict.get("victim", 0)) == os.getpid():
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(self._load_s)
        self._number = int(state_dict["number"])
        self.version = version

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        if request.qid.startswith("deadly"):
            raise EngineEndedError(request.qid, "out of memory")
        await asyncio.sleep(self._delay_s)
        sampled = [self._number, self.version, request.sampling.max_new_tokens]
        return GenerationOutput(
            request.qid,
            request.token_ids,
            sampled,
            [-0.5, -0.25, -0.125],
            False,
            self.version,
            self.version,
            stop_reason="tool",
        )


@dataclass(frozen=True)
class NotingAgent:
    """Has two turns, and writes ``qid pid`` to a file before the first."""

    notes: Path

    async def run(self, prompt: Prompt, env: Environment, generate: Generate) -> list[Trajectory]:
        self._note(prompt.id, os.getpid())
        if prompt.task == "bad":
            raise KeyError("no such thing")
        if prompt.task == "endless":
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._note(prompt.id, 0)
        turns, ids = [], list(prompt.input_ids)
        for _ in range(2):
            turn = await generate(ids)
            turns.append(replace(turn, reward=reward_of(prompt.task)))
            ids = [*ids, *turn.completion_ids, 7]
        return [Trajectory(prompt.id, turns, truncated=True)]

    def _note(self, qid: str, pid: int) -> None:
        with self.notes.open("a") as file:
            file.write(f"{qid} {pid}\n")


def reward_of(task: str) -> float:
    return float(zlib.crc32(task.encode()) % 3)


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
        yield ScriptedEngine(self.delay_s, self.load_s), NotingAgent(self.notes), None

    def started(self) -> list[tuple[str, int]]:
        """Return which episode began in which process, in order."""
        lines = (line.split() for line in self.notes.read_text().splitlines())
        return [(qid, int(pid)) for qid, pid in lines]


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"q{k}", [k + 1, k + 2], task_id=k) for k in range(count)]


@contextmanager
def running_cluster() -> Iterator[Any]:
    """Run a cluster of this machine whose workers can import the tests; nothing of it stays."""
    # Ray starts a process for each core at once; what runs here asks for parts of one.
    with pytest.MonkeyPatch.context() as patch:  # its processes keep what they begin with
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'src'}")
        patch.setenv("RAY_worker_niceness", "0")  # else other tests leave it no processor
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        if "ray" not in sys.modules:  # Ray listens on all addresses
            patch.setenv("RAY_AUTH_MODE", "token")
            patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        from ray.cluster_utils import Cluster

        size = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=size)
        try:
            patch.setenv("RAY_ADDRESS", cluster.address)
            with local_cluster(num_cpus=0):
                yield cluster
        finally:
            cluster.shutdown()
