"""Base of agents that ask the engine with a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from trajpack.agent.protocols import Environment, Generate, Prompt
from trajpack.packing.types import Trajectory, Turn

_running: ContextVar[tuple[EpisodeAgent, Generate]] = ContextVar("trajpack_episode")


class EpisodeAgent(ABC):
    """Base of agents that write an episode as one coroutine, `run`, and ask with `generate`.

    One agent serves any number of episodes at once: keep their state in local variables of `run`.

    Args:
        gconfig: Sampling parameters of requests that name none; None takes those of the runner.

    Example:
        >>> import asyncio
        >>> from dataclasses import replace
        >>> from trajpack.agent import FunctionEngine, RolloutRunner
        >>> class CountingAgent(EpisodeAgent):
        ...     async def run(self, prompt, env):
        ...         turn = await self.generate(prompt.input_ids)
        ...         return [Trajectory(prompt.id, [replace(turn, reward=1.0)])]
        >>> async def next_number(prompt_ids, sampling):
        ...     return [prompt_ids[-1] + 1], [-0.5], False
        >>> async def rollout():
        ...     async with FunctionEngine(next_number) as engine:
        ...         runner = RolloutRunner(engine, CountingAgent(), None)
        ...         return [result async for result in runner.run([Prompt("a", [1, 2])])]
        >>> [result] = asyncio.run(rollout())
        >>> result.turns[0].completion_ids, result.turns[0].reward
        (array([3], dtype=int32), 1.0)
    """

    def __init__(self, gconfig: Any = None) -> None:
        self.gconfig = gconfig

    @abstractmethod
    async def run(self, prompt: Prompt, env: Environment) -> list[Trajectory]:
        """Run one episode and return its trajectories, see `Agent.run`."""

    async def generate(self, token_ids: Sequence[int], sampling: Any = None) -> Turn:
        """Return the engine's completion as a turn with reward 0, within `run`; see `Generate`.

        The turn is frozen: ``dataclasses.replace(turn, reward=1.0)`` gives it a reward.
        """
        agent, generate = _running.get((None, None))
        if generate is None or agent is not self:
            raise RuntimeError("generate can be called within run of the same agent only")
        return await generate(token_ids, self.gconfig if sampling is None else sampling)

    async def __call__(
        self, prompt: Prompt, env: Environment, generate: Generate
    ) -> list[Trajectory]:
        """Run one episode for a runner."""
        token = _running.set((self, generate))
        try:
            return await self.run(prompt, env)
        finally:
            _running.reset(token)
