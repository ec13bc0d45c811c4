"""An engine that answers at once, an agent that asks twice, and short ways to run them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from trajpack.agent.protocols import (
    Environment,
    Generate,
    GenerationOutput,
    GenerationRequest,
    Prompt,
)
from trajpack.agent.runner.runner import EpisodeResult, GroupResult, RolloutRunner
from trajpack.packing.types import Trajectory

_T = TypeVar("_T")


class EchoEngine:
    """Answers each prompt with its last token and the one after it."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.open: list[str] = []
        """Episodes whose requests are in flight."""
        self.opened: list[str] = []
        """Episodes of first requests: those have two tokens at most."""

    async def __aenter__(self) -> EchoEngine:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        qid, ids, _ = request
        if len(ids) <= 2:
            self.opened.append(qid)
        self.open.append(qid)
        try:
            await self.wait(request)
        finally:
            self.open.remove(qid)
        output, version = [ids[-1], ids[-1] + 1], self.version
        return GenerationOutput(qid, ids, output, [-1.0, -2.0], False, version, version)

    async def wait(self, request: GenerationRequest) -> None:
        await asyncio.sleep(0)


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

    async def run(self, prompt: Prompt, env: Environment, generate: Generate) -> list[Trajectory]:
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        try:
            if self.before is not None:
                await self.before(prompt)
            turns, ids = [], list(prompt.input_ids)
            for reward in (1.0, -0.5):
                turn = await generate(ids, self.sampling)
                turns.append(replace(turn, reward=reward))
                ids = [*ids, *turn.completion_ids]
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
            assert entered.open == []
            assert len(asyncio.all_tasks()) == 1
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
