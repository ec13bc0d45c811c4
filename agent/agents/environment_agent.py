"""Agent that acts in an environment and shows the model its observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trajpack.agent.agents.chat_agent import ChatAgent
from trajpack.agent.agents.conversation import Conversation, Exchange


class Opening(NamedTuple):
    """Action that begins an episode; it is answered with the first observation.

    Attributes:
        qid: Name of the episode in all later actions.
        seed: Seed of the episode; None leaves it to the environment.
    """

    qid: str
    seed: int | None = None


class Closing(NamedTuple):
    """Action that ends an episode at any time; it is answered without waiting.

    Attributes:
        qid: Name of the episode.
    """

    qid: str


@dataclass(eq=False, repr=False)
class EnvironmentAgent(ChatAgent):
    """Shows the model the environment's observations, and takes its completions as actions.

    The first observation is a user's message after the prompt; each other one is a user's message
    after a completion. A turn's reward is the environment's. The episode ends when the environment
    says so, or at a limit: its trajectory is truncated unless the environment says ``terminated``.

    A prompt's tokens are those of `prompt_ids`: a chat that has a system message and no turn yet.
    The environment takes an `Opening` and a `Closing`, as a `GymnasiumEnvironment` does. Arguments
    are those of a `ChatAgent`.
    """

    def prompt_ids(self, messages: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Return a prompt's tokens: a system message of the instructions, or of one message's."""
        if isinstance(messages, str):
            return self.messages.opening(messages)
        if len(messages) != 1:
            raise ValueError(
                "an EnvironmentAgent's prompt is one message, the instructions; the environment "
                f"says what follows; got {len(messages)} messages"
            )
        return self.messages.opening(messages[0]["content"])

    async def converse(self, conversation: Conversation, observation: list[int] | None) -> None:
        """Run an episode of the environment, behind its first observation."""
        try:
            opening = Opening(conversation.qid, conversation.prompt.seed)
            conversation.observation, *_ = await conversation.env.step(opening)
            first = self.messages.first(_text_of(conversation))
            await super().converse(conversation, first)
        finally:
            await conversation.env.step(Closing(conversation.qid))

    async def respond(self, conversation: Conversation, exchange: Exchange) -> list[int] | None:
        """Act in the environment and return its observation; None at the end."""
        has_ended = await conversation.judge(exchange)
        if conversation.terminated:
            conversation.truncated = False
        if has_ended:
            return None
        return self.messages.after(exchange.ids.tolist(), "user", [_text_of(conversation)])


def _text_of(conversation: Conversation) -> str:
    observation = conversation.observation
    if not isinstance(observation, str):
        kind = type(observation).__name__
        raise TypeError(f"expected an observation that is a str, got {kind}")
    return observation
