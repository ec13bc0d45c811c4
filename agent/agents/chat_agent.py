"""The loop of turns that all agents share, and the base of those that use a chat template."""

from __future__ import annotations

import asyncio
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

from trajpack.agent.agents.chat_messages import ChatMessages
from trajpack.agent.agents.conversation import (
    Conversation,
    ConversationLimits,
    Exchange,
    with_max_new_tokens,
)
from trajpack.agent.errors import EpisodeError
from trajpack.agent.models.causal_model import load_tokenizer
from trajpack.agent.protocols import Environment, Generate, Prompt, SamplingParams
from trajpack.agent.runner.replies import checked_prompt, turn_of
from trajpack.packing.conversion import as_ids
from trajpack.packing.types import Trajectory, Turn


class ConversationAgent(ABC):
    """Base of agents that request a completion, respond to it, and go on until an end or a limit.

    A turn's prompt is the last turn's prompt, its completion as it was sampled, and the observation
    since. One agent serves any number of episodes at once.

    Attributes:
        gconfig: Sampling parameters. The last request asks for fewer tokens where
            ``max_total_tokens`` leaves fewer; otherwise they reach the engine unchanged.
        tokenizer: A Hugging Face tokenizer with a chat template, or the local folder of one.
        limits: Limits of each conversation; ``None`` are the default ones.
        turn_discount: Discount from one turn to the next, stored in the trajectory.
    """

    gconfig: Any
    tokenizer: Any
    limits: ConversationLimits
    turn_discount: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.turn_discount):
            raise ValueError(f"turn_discount must be finite, got {self.turn_discount}")
        self.limits = self.limits or ConversationLimits()
        if self.limits.max_total_tokens is not None:
            with_max_new_tokens(self.gconfig, 1)
        if isinstance(self.tokenizer, str | os.PathLike):
            self.tokenizer = load_tokenizer(self.tokenizer)

    async def run(self, prompt: Prompt, env: Environment, generate: Generate) -> list[Trajectory]:
        """Run one episode and return its one trajectory, which has the prompt's id.

        It is truncated if a limit ended it, or the engine refused a request after the first turn.
        The environment takes an `Action` of one text and returns a list of one number, the reward.

        Raises:
            EnvironmentFailedError: If the environment's answer is no reward.
            GenerationError: If the engine could not generate, or ``max_total_tokens`` leaves no
                room for a first turn.
        """
        token_ids = as_ids("prompt_ids", prompt.input_ids).tolist()
        conversation = Conversation(prompt, env, generate, token_ids)
        await env.reset()
        await self.converse(conversation, [])
        return [conversation.trajectory(self.turn_discount)]

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[Any],
        act_queue: asyncio.Queue[Any],
    ) -> list[Trajectory]:
        """Run one episode over queues, as AReaL does.

        ``obs_queue`` takes requests ``(prompt.id, token_ids, sampling)``, and ``act_queue`` gives a
        `GenerationOutput`, or a `GenerationError`, for each.
        """

        async def generate(token_ids: Sequence[int], sampling: Any = None) -> Turn:
            prompt_ids = checked_prompt(prompt.id, token_ids)
            asked = SamplingParams() if sampling is None else sampling
            await obs_queue.put((prompt.id, prompt_ids.tolist(), asked))
            reply = await act_queue.get()
            if isinstance(reply, EpisodeError):
                raise reply
            return turn_of(prompt.id, prompt_ids, reply)

        return await self.run(prompt, env, generate)

    async def converse(self, conversation: Conversation, observation: list[int] | None) -> None:
        """Append an observation, ask and respond, until there is no further observation."""
        while observation is not None:
            self.extend(conversation, observation)
            exchange = await conversation.ask(self.gconfig, self.limits)
            if exchange is None:
                conversation.truncated = True
                break
            exchange.text = self.decode(exchange.ids.tolist(), skip_special_tokens=True)
            observation = await self.respond(conversation, exchange)

    def extend(self, conversation: Conversation, observation: list[int]) -> None:
        """Append an observation to the next prompt."""
        conversation.token_ids += observation

    @abstractmethod
    async def respond(self, conversation: Conversation, exchange: Exchange) -> list[int] | None:
        """Judge a completion, and return the tokens that follow it; None ends the episode."""

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return a prompt's tokens: a chat by the tokenizer's template, and who speaks next."""
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens, with its spaces as they are."""
        text: str = self.tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


@dataclass(eq=False, repr=False)
class ChatAgent(ConversationAgent):
    """Base of agents whose observations are messages of a chat template.

    Its arguments are the attributes of a `ConversationAgent`, and this one.

    Attributes:
        old_thoughts: Whether a completion's thoughts stay in later prompts. ``"drop"`` leaves them
            out, as a chat template's history does, so that a later prompt begins a new chain.

    Raises:
        ValueError: If an option is out of range, or the chat template does not show a message of
            the role; as `SetupError`, where the tokenizer's folder cannot be read.
    """

    # of the messages after a completion; None leaves their check to the agent
    role: ClassVar[str | None] = "user"

    gconfig: Any
    tokenizer: Any
    _: KW_ONLY
    limits: ConversationLimits = field(default_factory=ConversationLimits)
    turn_discount: float = 1.0
    old_thoughts: Literal["keep", "drop"] = "keep"

    def __post_init__(self) -> None:
        if self.old_thoughts not in ("keep", "drop"):
            raise ValueError(f'old_thoughts must be "keep" or "drop", got {self.old_thoughts!r}')
        super().__post_init__()
        self.messages = ChatMessages(self.tokenizer)
        if self.role is not None:
            self.messages.check(self.role)

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return a prompt's tokens; a message that the template does not show is a `ValueError`."""
        return self.messages.prompt(messages)

    def extend(self, conversation: Conversation, observation: list[int]) -> None:
        """Append an observation to the next prompt, which drops old thoughts or keeps them."""
        if self.old_thoughts == "drop" and conversation.exchanges:
            ids = conversation.exchanges[-1].ids.tolist()
            prompt_ids = conversation.token_ids[: len(conversation.token_ids) - len(ids)]
            conversation.token_ids = self.messages.without_thoughts(prompt_ids, ids)
        super().extend(conversation, observation)
