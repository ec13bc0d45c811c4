"""An engine that answers at once, an agent that asks twice, and short ways to run them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trajpack.agent.errors import GenerationError
from trajpack.agent.protocols import Environment, GenerationOutput, Observation, Prompt, Reply
from trajpack.agent.runner.runner import EpisodeResult, GroupResult, RolloutRunner
from trajpack.packing.types import Trajectory, Turn


class EchoEngine:
    """Answers each prompt at once with its last token and the one after it."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.obs_queue: asyncio.Queue[Observation] = asyncio.Queue()
        self.open: dict[str, asyncio.Queue[Reply]] = {}
        self.opened: list[str] = []

    def open_episode(self, qid: str) -> asyncio.Queue[Reply]:
        if qid in self.open:
            raise ValueError(f"episode {qid!r} is open already")
        self.opened.append(qid)
        return self.open.setdefault(qid, asyncio.Queue())

    def close_episode(self, qid: str) -> None:
        self.open.pop(qid, None)

    async def __aenter__(self) -> EchoEngine:
        self._task = asyncio.create_task(self._answer())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _answer(self) -> None:
        while True:
            self.answer(await self.obs_queue.get())

    def answer(self, item: Observation) -> None:
        qid, ids, _ = item
        if qid in self.open:
            output, version = [ids[-1], ids[-1] + 1], self.version
            reply = GenerationOutput(qid, ids, output, [-1.0, -2.0], False, version, version)
            self.open[qid].put_nowait(reply)


class NoEnvironment:
    async def reset(self) -> None:
        return None

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return None, 1.0, True, False, {}


@dataclass
class TwoTurns:
    """Asks twice; the first turn is rewarded, the second is not."""

    sampling: Any = None
    group: str | None = None
    before: Callable[[Prompt], Any] | None = None
    active: int = 0
    most_active: int = 0
    cancelled: list[str] = field(default_factory=list)

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[Observation],
        act_queue: asyncio.Queue[Reply],
    ) -> list[Trajectory]:
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        try:
            if self.before is not None:
                await self.before(prompt)
            turns, ids = [], list(prompt.input_ids)
            for reward in (1.0, -0.5):
                await obs_queue.put((prompt.id, ids, self.sampling))
                reply = await act_queue.get()
                if isinstance(reply, GenerationError):
                    raise reply
                versions = {
                    "version_start": reply.version_start,
                    "version_end": reply.version_end,
                }
                turns.append(Turn(ids, reply.output_ids, reply.output_logprobs, reward, **versions))
                ids = [*ids, *reply.output_ids]
            return [Trajectory(prompt.id, turns, group=self.group)]
        except asyncio.CancelledError:
            self.cancelled.append(prompt.id)
            raise
        finally:
            self.active -= 1


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"q{k}", [k, k + 1], task_id=k) for k in range(count)]


def runner(engine: Any, agent: Any, **options: Any) -> RolloutRunner:
    return RolloutRunner(engine, agent, NoEnvironment(), **options)


async def collect(agent: Any, asked: Any, **options: Any) -> list[EpisodeResult]:
    async with EchoEngine() as engine:
        results = [result async for result in runner(engine, agent, **options).run(asked)]
        assert engine.open == {}
        return results


async def collect_groups(agent: Any, asked: Any, **options: Any) -> list[GroupResult]:
    async with EchoEngine() as engine:
        groups = [group async for group in runner(engine, agent, **options).run_groups(asked)]
        assert engine.open == {}
        return groups


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)
