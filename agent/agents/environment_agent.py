"""Agent that acts in an environment and shows the model its observations."""

from __future__ import annotations

from typing import Any, NamedTuple

from trajpack.agent.agents.chat_agent import ChatAgent
from trajpack.agent.agents.conversation import Conversation, Exchange
from trajpack.agent.protocols import Environment, Prompt


class Opening(NamedTuple):
    """Action that begins an episode; it is answered with the first observation."""

    qid: str
    """Name of the episode in all later actions."""
    seed: int | None = None
    """Seed of the episode; None leaves it to the environment."""


class Closing(NamedTuple):
    """Action that ends an episode at any time; it is answered without waiting."""

    qid: str
    """Name of the episode."""


class EnvironmentAgent(ChatAgent):
    """Shows the model the environment's observations, and takes its completions as actions.

    The first observation is a user's message after the prompt; each other one is a user's message
    after a completion. A turn's reward is the environment's. The episode ends when the environment
    says so, or at a limit.

    A prompt's tokens are those of `opening`: a chat that has a system message and no turn yet. The
    environment is one that takes an `Opening` and a `Closing`, as a `GymnasiumEnvironment` does.
    """

    def prompt_ids(self, instructions: str) -> list[int]:
        """Return a prompt's tokens: a system message with the instructions."""
        return self.messages.opening(instructions)

    async def converse(self, conversation: Conversation, prompt: Prompt) -> None:
        """Hold the conversation."""
        env = _Observed(conversation.env, Opening(prompt.id, prompt.seed))
        conversation.env = env
        try:
            await conversation.begin(prompt.input_ids)
            with conversation.guard("the first observation could not be encoded"):
                ids = self.messages.first(env.text())
            for turn in range(self.limits.max_turns):
                if not self.fits(len(conversation.token_ids) + len(ids)):
                    break
                conversation.token_ids += ids
                completion, text = await self.listen(conversation)
                reward, has_ended = await conversation.judge(text)
                conversation.keep(Exchange(completion, text, reward > 0, reward))
                if has_ended or turn + 1 == self.limits.max_turns:
                    break
                with conversation.guard("an observation could not be encoded"):
                    ids = self.messages.after(completion.ids.tolist(), "user", [env.text()])
        finally:
            await env.close()


class _Observed:
    """Proxy that keeps the last observation of an environment; its reset opens an episode."""

    def __init__(self, env: Environment, opening: Opening) -> None:
        self._env = env
        self._opening = opening
        self._observation: Any = None
        self._is_open = False

    async def reset(self) -> Any:
        answer = await self._env.reset()
        self._is_open = True
        await self.step(self._opening)
        return answer

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        answer = await self._env.step(action)
        self._observation = answer[0]
        return answer

    async def close(self) -> None:
        if self._is_open:
            await self._env.step(Closing(self._opening.qid))

    def text(self) -> str:
        if not isinstance(self._observation, str):
            kind = type(self._observation).__name__
            raise TypeError(f"expected an observation that is a str, got {kind}")
        return self._observation
