"""What agents have in common that talk turn by turn: limits, listening, the trajectory."""

from __future__ import annotations

import asyncio
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trajpack.agent.agents.chat_messages import ChatMessages
from trajpack.agent.agents.episode import Completion, Episode
from trajpack.agent.models.causal_model import load_tokenizer
from trajpack.agent.protocols import Environment, Observation, Prompt, Reply
from trajpack.packing.conversion import as_integer
from trajpack.packing.types import Trajectory


@dataclass(frozen=True)
class ConversationLimits:
    """How long a conversation may become.

    Raises:
        ValueError: If one is out of range.
        TypeError: If a number of turns or tokens is not an integer.
    """

    max_turns: int = 8
    """Completions at most."""
    max_total_tokens: int | None = None
    """Tokens of the whole conversation at most. A turn whose prompt and ``gconfig.max_new_tokens``
    might exceed it is not asked."""
    generation_timeout: float | None = None
    """Seconds to wait for a reply at most."""

    def __post_init__(self) -> None:
        if as_integer("max_turns", self.max_turns) < 1:
            raise ValueError(f"max_turns must be at least 1, got {self.max_turns}")
        limit = self.max_total_tokens
        if limit is not None and as_integer("max_total_tokens", limit) < 1:
            raise ValueError(f"max_total_tokens must be positive, got {limit}")
        if self.generation_timeout is not None and not self.generation_timeout > 0:
            raise ValueError(f"generation_timeout must be positive, got {self.generation_timeout}")


class Utterance(NamedTuple):
    """What the model said in a turn."""

    completion: Completion
    """As tokens."""
    text: str
    """As text, without special tokens."""


class ChatAgent(ABC):
    """Holds one conversation at a time with a model that a chat template was made for.

    A turn's prompt is the last turn's prompt, its completion as it was sampled, and what others
    said since. One agent serves any number of episodes at once.

    Args:
        gconfig: How the engine is to sample, handed to it as it is.
        tokenizer: A Hugging Face tokenizer with a chat template, or the local folder of one.
        limits: Of each conversation; None takes the default ones.
        turn_discount: Discount from one turn to the next, handed on in the trajectory.

    Raises:
        ValueError: If an option is out of range; as `SetupError`, where the tokenizer's folder
            cannot be read.
    """

    def __init__(
        self,
        gconfig: Any,
        tokenizer: Any,
        *,
        limits: ConversationLimits | None = None,
        turn_discount: float = 1.0,
    ) -> None:
        self.gconfig = gconfig
        """How the engine is to sample."""
        is_folder = isinstance(tokenizer, str | os.PathLike)
        self.tokenizer = load_tokenizer(tokenizer) if is_folder else tokenizer
        """Encodes and decodes."""
        self.messages = ChatMessages(self.tokenizer)
        """Encodes what others say."""
        self.limits = ConversationLimits() if limits is None else limits
        """Of each conversation."""
        self.turn_discount = turn_discount
        """Discount from one turn to the next."""
        if not math.isfinite(turn_discount):
            raise ValueError(f"turn_discount must be finite, got {turn_discount}")
        self._max_new_tokens = 0
        if self.limits.max_total_tokens is not None:
            is_mapping = isinstance(gconfig, Mapping)
            name = "max_new_tokens"
            asked = gconfig.get(name) if is_mapping else getattr(gconfig, name, None)
            if asked is None:
                raise ValueError("max_total_tokens needs a gconfig with max_new_tokens")
            self._max_new_tokens = as_integer("gconfig.max_new_tokens", asked)

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[Observation],
        act_queue: asyncio.Queue[Reply],
    ) -> list[Trajectory]:
        """Run one episode and return its one trajectory.

        Args:
            prompt: The opening; its id is the episode's ``qid`` and the trajectory's id.
            env: Takes ``(qid, [text])`` and returns a list of one number as its reward.
            obs_queue: Where each turn puts ``(qid, token_ids, gconfig)``.
            act_queue: Where one reply to each comes, and nothing else.

        Raises:
            EpisodeError: If the environment fails, a reply is late or answers something else, or
                ``max_total_tokens`` leaves no room for a first turn.
            GenerationError: As the engine put it on ``act_queue``.
        """
        birth_time_ms = time.time_ns() // 1_000_000
        episode = await self.converse(prompt, env, obs_queue, act_queue)
        if not episode.exchanges:
            raise episode.error(
                f"a prompt of {len(episode.token_ids)} tokens and a completion of up to "
                f"{self._max_new_tokens} exceed max_total_tokens={self.limits.max_total_tokens}"
            )
        return [
            Trajectory(
                id=prompt.id,
                turns=episode.turns(),
                turn_discount=self.turn_discount,
                task_id=prompt.task_id,
                birth_time_ms=birth_time_ms,
            )
        ]

    @abstractmethod
    async def converse(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[Observation],
        act_queue: asyncio.Queue[Reply],
    ) -> Episode:
        """Hold the conversation, and return it."""

    def fits(self, num_tokens: int) -> bool:
        """Return whether a prompt of this length leaves room for a completion."""
        limit = self.limits.max_total_tokens
        return limit is None or num_tokens + self._max_new_tokens <= limit

    async def listen(self, episode: Episode) -> Utterance:
        """Have the conversation continued by the model.

        Raises:
            EpisodeError: If no reply comes, or none that can be decoded.
        """
        completion = await episode.ask(self.gconfig, self.limits.generation_timeout)
        with episode.guard("its text could not be decoded"):
            text = self.tokenizer.decode(
                completion.ids.tolist(),
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
            if not isinstance(text, str):
                raise TypeError(f"the tokenizer decodes to {type(text).__name__}, not str")
        return Utterance(completion, text)
