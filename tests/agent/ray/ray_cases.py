"""What tests run on a cluster: a scripted engine, and an agent that notes what it begins."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trajpack.agent.protocols import Environment, GenerationOutput, Observation, Prompt, Reply
from trajpack.agent.ray.cluster import local_cluster
from trajpack.agent.ray.training.rank_trainer import PackedRankTrainer, StepRules
from trajpack.packing.types import Trajectory, Turn

ROOT = Path(__file__).parents[3]


class ScriptedEngine:
    """Samples one token: the number that its weights are; the version is that of the weights."""

    def __init__(self, delay_s: float, load_s: float = 0.0) -> None:
        self._load_s = load_s
        self.version = 0
        self.number = 100
        self.obs_queue: asyncio.Queue[Observation] = asyncio.Queue()
        self._open: dict[str, asyncio.Queue[Reply]] = {}
        self._delay_s = delay_s

    def open_episode(self, qid: str) -> asyncio.Queue[Reply]:
        return self._open.setdefault(qid, asyncio.Queue())

    def close_episode(self, qid: str) -> None:
        self._open.pop(qid, None)

    async def update_weights(self, state_dict: dict[str, torch.Tensor], version: int) -> None:
        if int(state_dict.get("victim", 0)) == os.getpid():
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(self._load_s)
        self.number = int(state_dict["number"]) if "number" in state_dict else 100 + version
        self.version = version

    async def __aenter__(self) -> ScriptedEngine:
        self._task = asyncio.create_task(self._answer())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _answer(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            qid, ids, _ = await self.obs_queue.get()
            loop.call_later(self._delay_s, self._reply, qid, ids)

    def _reply(self, qid: str, ids: list[int]) -> None:
        if qid in self._open:
            sampled = [self.number, self.version]
            self._open[qid].put_nowait(
                GenerationOutput(
                    qid, ids, sampled, [-0.5, -0.25], False, self.version, self.version
                )
            )


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

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[Observation],
        act_queue: asyncio.Queue[Reply],
    ) -> list[Trajectory]:
        with self.notes.open("a") as file:
            file.write(f"{prompt.id} {os.getpid()}\n")
        if prompt.id.startswith("bad"):
            raise KeyError("no such thing")
        if prompt.id.startswith("endless"):
            await self._wait_for_ever(prompt.id)
        turns, ids = [], list(prompt.input_ids)
        for _ in range(self.num_turns):
            await obs_queue.put((prompt.id, ids, None))
            reply = await act_queue.get()
            assert isinstance(reply, GenerationOutput)
            turns.append(
                Turn(
                    ids,
                    reply.output_ids,
                    reply.output_logprobs,
                    float(zlib.crc32(prompt.id.encode()) % 3),
                    version_start=reply.version_start,
                    version_end=reply.version_end,
                )
            )
            ids = [*ids, *reply.output_ids, 7]
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


class TinyModel(torch.nn.Module):
    """Logits from a token and its position alone: enough to have gradients."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("tokens", "positions", "head"):
            values = torch.randn(128, 128, generator=generator) * 0.1
            setattr(self, name, torch.nn.Parameter(values))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> Any:
        hidden = torch.tanh(self.tokens[input_ids] + self.positions[position_ids])
        return SimpleNamespace(logits=hidden @ self.head)


class Momentum:
    """Gradient descent with momentum; what torch has takes seconds to import in each process."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        self.velocities = [torch.zeros_like(value) for value in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for value, velocity in zip(self.parameters, self.velocities, strict=True):
            velocity.mul_(0.9).add_(value.grad)
            value.sub_(velocity, alpha=0.5)

    def zero_grad(self) -> None:
        for value in self.parameters:
            value.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"velocities": self.velocities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.velocities = [velocity.clone() for velocity in state["velocities"]]


def make_trainer() -> PackedRankTrainer:
    model = TinyModel()
    optimizer: Any = Momentum(model.parameters())
    return PackedRankTrainer(model, optimizer, StepRules(capacity=32))


class HangingTrainer(PackedRankTrainer):
    """Comes to the last rank's fifth step, and once no further, while the others wait for it."""

    hung: Path
    """Says so with the number of its process."""

    def step(
        self, trajectories: Sequence[Trajectory], rank: int, num_ranks: int
    ) -> dict[str, float]:
        if rank == num_ranks - 1 and self._num_steps == 4 and not self.hung.exists():
            self.hung.write_text(str(os.getpid()))
            time.sleep(600)
        return super().step(trajectories, rank, num_ranks)


def make_hanging_trainer(hung: Path) -> PackedRankTrainer:
    model = TinyModel()
    optimizer: Any = Momentum(model.parameters())
    trainer = HangingTrainer(model, optimizer, StepRules(capacity=32))
    trainer.hung = hung
    return trainer


def random_paths(seed: int, count: int = 12) -> list[Trajectory]:
    """Conversations of two turns in groups of three."""
    draw = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        return torch.randint(0, 128, (length,), generator=draw).tolist()

    paths = []
    for k in range(count):
        prompt, first, more, second = ids(3 + k % 4), ids(4), ids(2), ids(1 + k % 5)
        turns = [
            Turn(prompt, first, [-4.8] * 4, float(k % 2)),
            Turn([*prompt, *first, *more], second, [-4.9] * len(second), float(k % 3)),
        ]
        paths.append(Trajectory(f"t{seed}.{k}", turns, group=f"g{seed}.{k // 3}"))
    return paths


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"q{k}", [k + 1, k + 2], task_id=k) for k in range(count)]


@contextmanager
def running_cluster() -> Iterator[None]:
    """Run a cluster of this machine whose workers can import the tests; nothing of it stays."""
    # Ray starts a process for each core at once; what runs here asks for parts of one.
    with ExitStack() as cluster:
        with pytest.MonkeyPatch.context() as patch:  # its processes keep what they begin with
            patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'src'}")
            cluster.enter_context(local_cluster(num_cpus=2, object_store_bytes=200 << 20))
        yield
        begun = processes_of_ray()
    deadline = time.monotonic() + 10
    while begun & living().keys() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not begun & living().keys(), "Ray has left processes behind"


def living() -> dict[int, tuple[int, str]]:
    """Return all processes of this machine: the parent of each, and its command."""
    command = ["ps", "-ww", "-eo", "pid=,ppid=,stat=,args="]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = [line.split(maxsplit=3) for line in listed.stdout.splitlines()]
    return {int(row[0]): (int(row[1]), row[3]) for row in rows if row[2][0] != "Z"}


def processes_of_ray() -> set[int]:
    """Return the processes of the cluster that this process has begun."""
    found = living()
    begun = {
        pid
        for pid, (parent, args) in found.items()
        if parent == os.getpid() and ("/raylet" in args or "/gcs_server" in args)
    }
    assert begun
    while more := {pid for pid, (parent, _) in found.items() if parent in begun} - begun:
        begun |= more
    return begun
