"""One conversation of an agent with an engine and an environment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajpack.agent.errors import EnvironmentFailedError, RequestRefusedError
from trajpack.agent.protocols import Action, Environment, Generate, Prompt
from trajpack.packing.conversion import as_ids, as_integer, as_number, several
from trajpack.packing.types import Trajectory, Turn

_REWARDS = "the second value, the rewards, must be a list of one number"


@dataclass(frozen=True)
class ConversationLimits:
    """Limits on the length of a conversation. One that they end is truncated.

    Attributes:
        max_turns: Completions at most.
        max_total_tokens: Tokens of the whole conversation at most. The last request asks for what
            is left of them, where that is less than ``gconfig.max_new_tokens``.
    """

    max_turns: int = 8
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        if as_integer("max_turns", self.max_turns) < 1:
            raise ValueError(f"max_turns must be at least 1, got {self.max_turns}")
        limit = self.max_total_tokens
        if limit is not None and as_integer("max_total_tokens", limit) < 1:
            raise ValueError(f"max_total_tokens must be positive, got {limit}")


def sampling_option(gconfig: Any, name: str, default: Any) -> Any:
    """Return a sampling option, which is a key of a mapping or else an attribute."""
    if isinstance(gconfig, Mapping):
        return gconfig.get(name, default)
    return getattr(gconfig, name, default)


def with_max_new_tokens(gconfig: Any, most: int) -> Any:
    """Return sampling parameters that ask for at most so many tokens, otherwise unchanged."""
    asked = sampling_option(gconfig, "max_new_tokens", None)
    if asked is None:
        raise ValueError("max_total_tokens needs a gconfig with max_new_tokens")
    if as_integer("gconfig.max_new_tokens", asked) <= most:
        return gconfig
    if isinstance(gconfig, Mapping):
        return {**gconfig, "max_new_tokens": most}
    return replace(gconfig, max_new_tokens=most)


@dataclass(eq=False)
class Exchange:
    """One turn, and its judgement.

    Attributes:
        turn: The engine's completion.
        ids: Sampled tokens, an int32 array.
        text: Text of the completion, as the environment sees it.
        success: Whether the environment's number is above 0.
        reward: That number, or what the agent makes of it; not discounted.
    """

    turn: Turn
    ids: npt.NDArray[np.int32]
    text: str = ""
    success: bool = False
    reward: float = 0.0


@dataclass(eq=False)
class Conversation:
    """State of one episode.

    Attributes:
        prompt, env, generate: As an agent gets them.
        token_ids: Token ids so far. Tokens appended between turns are observation.
        exchanges: Turns so far.
        observation, terminated: The environment's last answer.
        truncated: The trajectory's ``truncated``.
        birth_time_ms: Unix time of the beginning, in milliseconds.
    """

    prompt: Prompt
    env: Environment
    generate: Generate
    token_ids: list[int]
    exchanges: list[Exchange] = field(default_factory=list)
    observation: Any = None
    terminated: bool = False
    truncated: bool | None = None
    birth_time_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)

    @property
    def qid(self) -> str:
        """Name of the episode."""
        return self.prompt.id

    async def ask(self, gconfig: Any, limits: ConversationLimits) -> Exchange | None:
        """Request the next turn and append it; None where a limit or a refusal leaves those so far.

        Raises:
            GenerationError: If the engine could not generate, or a limit leaves no first turn.
        """
        if len(self.exchanges) >= limits.max_turns:
            return None
        try:
            if limits.max_total_tokens is not None:
                room = limits.max_total_tokens - len(self.token_ids)
                if room <= 0:
                    limit = f"max_total_tokens={limits.max_total_tokens}"
                    raise RequestRefusedError(self.qid, f"its prompt leaves no room in {limit}")
                gconfig = with_max_new_tokens(gconfig, room)
            turn = await self.generate(self.token_ids, gconfig)
        except RequestRefusedError:
            if not self.exchanges:
                raise
            return None
        exchange = Exchange(turn, as_ids("completion_ids", turn.completion_ids))
        self.token_ids += exchange.ids.tolist()
        self.exchanges.append(exchange)
        return exchange

    async def judge(self, exchange: Exchange) -> bool:
        """Set a turn's reward to the environment's number; return whether that ends the episode.

        Where the environment says ``truncated``, so is the trajectory.

        Raises:
            EnvironmentFailedError: If it does not return exactly one finite number.
        """
        answer = await self.env.step(Action(self.qid, [exchange.text]))
        try:
            self.observation, successes, terminated, truncated, _ = answer
            scores = several(_REWARDS, successes)
            if len(scores) != 1:
                raise ValueError(f"expected one success, got {len(scores)}")
            exchange.reward = as_number("success", scores[0])
            self.terminated, is_cut = bool(terminated), bool(truncated)
        except Exception as error:
            reason = (
                f"turn {len(self.exchanges) - 1}: the environment's answer was refused: {error}"
            )
            raise EnvironmentFailedError(self.qid, reason) from error
        exchange.success = exchange.reward > 0
        self.truncated = is_cut or None
        return self.terminated or is_cut

    def trajectory(self, turn_discount: float) -> Trajectory:
        """Return the trajectory; its prompts are views of one array where they can be.

        Where it was cut off, so is its last turn, for trainers that know no flag of trajectories.
        """
        conversation = as_ids("token_ids", self.token_ids)
        turns = []
        for exchange in self.exchanges:
            ids = exchange.turn.prompt_ids
            view = conversation[: len(ids)]
            prompt_ids = view if np.array_equal(view, ids) else ids
            turns.append(replace(exchange.turn, prompt_ids=prompt_ids, reward=exchange.reward))
        if self.truncated:
            turns[-1] = replace(turns[-1], truncated=True)
        return Trajectory(
            id=self.prompt.id,
            turns=turns,
            turn_discount=turn_discount,
            task_id=self.prompt.task_id,
            birth_time_ms=self.birth_time_ms,
            truncated=self.truncated,
        )
