"""An engine that answers at once, an agent that asks twice, and short ways to run them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trajpack.agent.errors import GenerationError
from trajpack.agent.protocols import Environment, GenerationOutput, Observation, Prompt, Reply
from trajpack.agent.runner.runner import EpisodeResult, GroupResult, RolloutRunner
from trajpack.packing.types import Trajectory, Turn

_T = TypeVar("_T")


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


def all_but_first(seconds: float) -> TwoTurns:
    """Return an agent whose episodes wait before they ask, but for the first."""
    return TwoTurns(before=lambda prompt: asyncio.sleep(0 if prompt.id == "q0@0" else seconds))


def failing(*qids: str, error: BaseException | None = None) -> TwoTurns:
    """Return an agent whose episodes of these names fail; all, if none is named."""

    async def fail(prompt: Prompt) -> None:
        if not qids or prompt.id in qids:
            raise error or ValueError("no")

    return TwoTurns(before=fail)


def runner(engine: Any, agent: Any, **options: Any) -> RolloutRunner:
    return RolloutRunner(engine, agent, options.pop("environment", NoEnvironment()), **options)


def serve(body: Callable[[Any], Awaitable[_T]], engine: Any = None) -> _T:
    """Return the result of ``body(engine)``, which must leave no episode and no task behind."""

    async def served() -> _T:
        async with engine or EchoEngine() as entered, asyncio.timeout(60):
            result = await body(entered)
            assert entered.open == {}
            assert len(asyncio.all_tasks()) == 2  # the engine's and this
            return result

    return asyncio.run(served())


def roll(agent: Any, asked: Any, *, engine: Any = None, **options: Any) -> list[EpisodeResult]:
    """Return the results of a run; ``asked`` are prompts, or their number."""
    return serve(lambda engine: take(runner(engine, agent, **options).run(some(asked))), engine)


def roll_groups(agent: Any, asked: Any, *, engine: Any = None, **options: Any) -> list[GroupResult]:
    groups = lambda engine: runner(engine, agent, **options).run_groups(some(asked))  # noqa: E731
    return serve(lambda engine: take(groups(engine)), engine)


def some(asked: Any) -> Any:
    return prompts(asked) if isinstance(asked, int) else asked


async def take(results: AsyncIterator[_T], count: int | None = None) -> list[_T]:
    """Return the next ``count`` results, or all."""
    if count is None:
        return [result async for result in results]
    async with asyncio.timeout(60):
        return [await anext(results) for _ in range(count)]


def counted(asked: list[Prompt], taken: list[str]) -> Iterator[Prompt]:
    """Yield prompts, and note the names of those that were taken."""
    for prompt in asked:
        taken.append(prompt.id)
        yield prompt


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)
