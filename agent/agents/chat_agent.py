"""The loop of turns that all agents share, and the base of those that use a chat template."""

from __future__ import annotations

import asyncio
import math
import os
from abc import ABC, abstractmethod
from typing import Any

from trajpack.agent.agents.chat_messages import ChatMessages
from trajpack.agent.agents.conversation import (
    Conversation,
    ConversationLimits,
    Exchange,
    sampling_option,
)
from trajpack.agent.models.causal_model import load_tokenizer
from trajpack.agent.protocols import Environment, Observation, Prompt, Reply
from trajpack.packing.conversion import as_integer
from trajpack.packing.types import Trajectory


class ConversationAgent(ABC):
    """Base of agents that request a completion, respond to it, and go on until an end or a limit.

    A turn's prompt is the last turn's prompt, its completion as it was sampled, and the observation
    since. One agent serves any number of episodes at once.

    Attributes:
        gconfig: Sampling parameters, handed to the engine unchanged.
        tokenizer: Tokenizer that encodes and decodes.
        limits: Limits of each conversation.
        turn_discount: Discount from one turn to the next, stored in the trajectory.
    """

    gconfig: Any
    tokenizer: Any
    limits: ConversationLimits
    turn_discount: float

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[Observation],
        act_queue: asyncio.Queue[Reply],
    ) -> list[Trajectory]:
        """Run one episode and return its one trajectory.

        Args:
            prompt: Opening; its id is the episode's ``qid`` and the trajectory's id.
            env: Takes ``(qid, [text])`` and returns a list of one number as its reward.
            obs_queue: Queue of requests, ``(qid, token_ids, gconfig)`` for each turn.
            act_queue: Queue of replies, one for each request.

        Raises:
            EpisodeError: If the environment fails, a reply is late or does not answer its request,
                or ``max_total_tokens`` leaves no room for a first turn.
            GenerationError: As the engine put it on ``act_queue``.
            asyncio.CancelledError: If cancelled; the message names the episode.
        """
        conversation = Conversation(prompt.id, env, obs_queue, act_queue)
        try:
            await conversation.begin(prompt.input_ids)
            try:
                observation: list[int] | None = await self.open(conversation, prompt)
                while observation is not None and self.has_room(conversation, observation):
                    conversation.token_ids += observation
                    exchange = await conversation.ask(self.gconfig, self.limits.generation_timeout)
                    with conversation.guard("its text could not be decoded"):
                        exchange.text = self.decode(exchange.ids.tolist(), skip_special_tokens=True)
                    observation = await self.respond(conversation, exchange)
                    conversation.keep(exchange)
            finally:
                await self.close(conversation)
            if not conversation.exchanges:
                raise conversation.error(
                    f"a prompt of {len(conversation.token_ids)} tokens and a completion of up to "
                    f"{self._max_new_tokens()} exceed max_total_tokens="
                    f"{self.limits.max_total_tokens}"
                )
            await self.log(conversation)
        except asyncio.CancelledError as error:
            message = f"episode {prompt.id!r}: cancelled in turn {len(conversation.exchanges)}"
            raise asyncio.CancelledError(message) from error
        return [conversation.trajectory(prompt, self.turn_discount)]

    async def open(self, conversation: Conversation, prompt: Prompt) -> list[int]:
        """Return the tokens that follow the prompt in the first turn; by default there are none."""
        return []

    @abstractmethod
    async def respond(self, conversation: Conversation, exchange: Exchange) -> list[int] | None:
        """Judge a completion: set its reward and its success.

        Returns:
            Tokens of the observation that follows it; None ends the episode.
        """

    async def close(self, conversation: Conversation) -> None:  # noqa: B027 - a hook
        """Release what `open` took, also if the episode failed."""

    async def log(self, conversation: Conversation) -> None:  # noqa: B027 - a hook
        """Log an episode that has not failed."""

    def has_room(
        self, conversation: Conversation, more: list[int], last: Exchange | None = None
    ) -> bool:
        """Return whether another turn may be requested, after the turn ``last`` and more tokens."""
        num_turns, num_tokens = len(conversation.exchanges), len(conversation.token_ids) + len(more)
        if last is not None:
            num_turns, num_tokens = num_turns + 1, num_tokens + len(last.ids)
        limit = self.limits.max_total_tokens
        return num_turns < self.limits.max_turns and (
            limit is None or num_tokens + self._max_new_tokens() <= limit
        )

    def check_limits(self) -> None:
        """Raise unless the discount is finite and a limit on tokens has all that it needs.

        Raises:
            ValueError: If ``gconfig`` has no ``max_new_tokens``, or the discount is not finite.
            TypeError: If ``gconfig.max_new_tokens`` is not an integer.
        """
        if not math.isfinite(self.turn_discount):
            raise ValueError(f"turn_discount must be finite, got {self.turn_discount}")
        if self.limits.max_total_tokens is not None:
            asked = sampling_option(self.gconfig, "max_new_tokens", None)
            if asked is None:
                raise ValueError("max_total_tokens needs a gconfig with max_new_tokens")
            as_integer("gconfig.max_new_tokens", asked)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens, with its spaces as they are.

        Raises:
            TypeError: If the tokenizer returns no str.
        """
        text = self.tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        if not isinstance(text, str):
            raise TypeError(f"the tokenizer decodes to {type(text).__name__}, not str")
        return text

    def _max_new_tokens(self) -> int:
        return int(sampling_option(self.gconfig, "max_new_tokens", None))


class ChatAgent(ConversationAgent):
    """Base of agents whose observations are messages of a chat template.

    Args:
        gconfig: Sampling parameters, handed to the engine unchanged.
        tokenizer: A Hugging Face tokenizer with a chat template, or the local folder of one.
        limits: Limits of each conversation; None takes the default ones.
        turn_discount: Discount from one turn to the next, stored in the trajectory.

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
        is_folder = isinstance(tokenizer, str | os.PathLike)
        self.tokenizer = load_tokenizer(tokenizer) if is_folder else tokenizer
        self.messages = ChatMessages(self.tokenizer)
        """Encoder of the messages of others."""
        self.limits = ConversationLimits() if limits is None else limits
        self.turn_discount = turn_discount
        self.check_limits()
