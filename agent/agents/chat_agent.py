"""Base of agents that talk turn by turn with a chat model."""

from __future__ import annotations

import asyncio
import math
import os
from abc import ABC, abstractmethod
from typing import Any

from trajpack.agent.agents.chat_messages import ChatMessages
from trajpack.agent.agents.conversation import Completion, Conversation, ConversationLimits
from trajpack.agent.models.causal_model import load_tokenizer
from trajpack.agent.protocols import Environment, Observation, Prompt, Reply
from trajpack.packing.types import Trajectory


class ChatAgent(ABC):
    """Base of agents whose conversations a chat template renders.

    A turn's prompt is the last turn's prompt, its completion as it was sampled, and the messages
    since. One agent serves any number of episodes at once.

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
        """Sampling parameters."""
        is_folder = isinstance(tokenizer, str | os.PathLike)
        self.tokenizer = load_tokenizer(tokenizer) if is_folder else tokenizer
        """Tokenizer that encodes and decodes."""
        self.messages = ChatMessages(self.tokenizer)
        """Encoder of the messages of others."""
        self.limits = ConversationLimits() if limits is None else limits
        """Limits of each conversation."""
        self.turn_discount = turn_discount
        """Discount from one turn to the next."""
        if not math.isfinite(turn_discount):
            raise ValueError(f"turn_discount must be finite, got {turn_discount}")
        self.limits.check_sampling(gconfig)

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
        """
        conversation = Conversation(prompt.id, env, obs_queue, act_queue)
        await self.converse(conversation, prompt)
        conversation.require_turn(self.limits, self.gconfig)
        return [conversation.trajectory(prompt, self.turn_discount)]

    @abstractmethod
    async def converse(self, conversation: Conversation, prompt: Prompt) -> None:
        """Hold the conversation."""

    def fits(self, num_tokens: int) -> bool:
        """Return whether a prompt of this length leaves room for a completion."""
        return self.limits.fit(num_tokens, self.gconfig)

    async def listen(self, conversation: Conversation) -> tuple[Completion, str]:
        """Request the next completion; return it and its text without special tokens.

        Raises:
            EpisodeError: If no reply comes, or none that can be decoded.
        """
        timeout = self.limits.generation_timeout
        return await conversation.listen(self.gconfig, self.tokenizer, timeout)
