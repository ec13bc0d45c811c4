"""Base of agents that are one coroutine, which asks the engine with `generate`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from trajpack.agent.agents.conversation import Conversation
from trajpack.agent.protocols import Environment, Observation, Prompt, Reply
from trajpack.packing.conversion import as_ids
from trajpack.packing.types import Trajectory, Turn


class _Episode(NamedTuple):
    """The running episode, as `EpisodeAgent.generate` reads it."""

    agent: EpisodeAgent
    conversation: Conversation
    lock: asyncio.Lock


_episode: ContextVar[_Episode] = ContextVar("trajpack_episode")


class EpisodeAgent(ABC):
    """Base of agents that write an episode as one coroutine, `run`.

    `run` asks the engine with ``await self.generate(token_ids)``, builds the next prompt as it
    likes, and returns trajectories of the turns that it got. One agent serves any number of
    episodes at once: keep the state of an episode in local variables of `run`.

    Args:
        gconfig: Sampling parameters, handed to the engine unchanged.
        generation_timeout: Seconds to wait for a reply at most; ``None`` waits without a limit.

    Raises:
        ValueError: If the timeout is not positive.

    Example:
        >>> from dataclasses import replace
        >>> from trajpack.agent import FunctionEngine, RolloutRunner, SamplingParams
        >>> class CountingAgent(EpisodeAgent):
        ...     async def run(self, prompt, env):
        ...         turn = await self.generate(prompt.input_ids)
        ...         return [Trajectory(prompt.id, [replace(turn, reward=1.0)])]
        >>> async def next_number(prompt_ids, sampling):
        ...     return [prompt_ids[-1] + 1], [-0.5], False
        >>> async def rollout():
        ...     agent = CountingAgent(SamplingParams(max_new_tokens=1))
        ...     async with FunctionEngine(next_number) as engine:
        ...         runner = RolloutRunner(engine, agent, None)
        ...         return [result async for result in runner.run([Prompt("a", [1, 2])])]
        >>> [result] = asyncio.run(rollout())
        >>> result.turns[0].completion_ids, result.turns[0].reward
        (array([3], dtype=int32), 1.0)
    """

    def __init__(self, gconfig: Any, *, generation_timeout: float | None = None) -> None:
        if generation_timeout is not None and not generation_timeout > 0:
            raise ValueError(f"generation_timeout must be positive, got {generation_timeout}")
        self.gconfig = gconfig
        self.generation_timeout = generation_timeout

    @abstractmethod
    async def run(self, prompt: Prompt, env: Environment) -> list[Trajectory]:
        """Run one episode and return its trajectories.

        Args:
            prompt: Opening. Its id names the episode.
            env: Environment of the runner; an agent that judges its answers itself ignores it.

        Tasks that it starts must have ended, or be cancelled, when it returns.
        """

    async def generate(self, token_ids: Sequence[int], gconfig: Any = None) -> Turn:
        """Return the engine's completion of a prompt as a turn, with reward 0.

        The turn is frozen: ``dataclasses.replace(turn, reward=1.0)`` gives it a reward. Calls of
        one episode are served one after the other, also those of several tasks. A call after one
        that was cancelled or late waits for the reply of that one first.

        Args:
            token_ids: Token ids of everything that the engine is to see.
            gconfig: Sampling parameters of this call; ``None`` takes those of the agent.

        Raises:
            EpisodeError: If a reply is late or does not answer the request, or these are no token
                ids.
            GenerationError: If the engine could not generate.
            RuntimeError: Outside of an episode of this agent.
        """
        episode = _episode.get(None)
        if episode is None or episode.agent is not self:
            raise RuntimeError("generate can be called within run of the same agent only")
        conversation = episode.conversation
        with conversation.guard("the prompt was refused"):
            prompt_ids = as_ids("token_ids", token_ids).tolist()
        if not prompt_ids:
            raise conversation.error("the prompt has no tokens")
        async with episode.lock:
            conversation.token_ids = prompt_ids
            given = self.gconfig if gconfig is None else gconfig
            exchange = await conversation.ask(given, self.generation_timeout)
            conversation.exchanges.append(exchange)  # counts the turns in errors
        return exchange.turn(as_ids("token_ids", prompt_ids))

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[Observation],
        act_queue: asyncio.Queue[Reply],
    ) -> list[Trajectory]:
        """Run one episode for a runner, see `Agent`."""
        conversation = Conversation(prompt.id, env, obs_queue, act_queue)
        token = _episode.set(_Episode(self, conversation, asyncio.Lock()))
        try:
            return await self.run(prompt, env)
        finally:
            _episode.reset(token)
