"""An agent that acts in an environment and is shown what it observes."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from trajpack.agent.agents.chat_agent import ChatAgent
from trajpack.agent.agents.episode import Episode, Exchange
from trajpack.agent.protocols import Environment, Observation, Prompt, Reply


class Opening(NamedTuple):
    """The action that begins an episode: its observation is the first one."""

    qid: str
    """Names the episode in all actions to come."""
    seed: int | None = None
    """Of the episode; None leaves it to the environment."""


class Closing(NamedTuple):
    """The action that ends an episode, wherever it is; it is answered without waiting."""

    qid: str
    """As it was opened."""


class EnvironmentAgent(ChatAgent):
    """Shows the model what the environment observes, and takes what it says as its action.

    The first observation is a user's message after the prompt; each other one is a user's message
    after a completion. A turn's reward is the environment's. The episode ends when the environment
    says so, or at a limit.

    A prompt's tokens are those of `opening`: a chat that has a system message and no turn yet. The
    environment is one that takes an `Opening` and a `Closing`, as a `GymnasiumEnvironment` does.
    """

    def prompt_ids(self, instructions: str) -> list[int]:
        """Return a prompt's tokens: a system message that says what is to be done."""
        return self.messages.opening(instructions)

    async def converse(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[Observation],
        act_queue: asyncio.Queue[Reply],
    ) -> Episode:
        """Hold the conversation, and return it."""
        heard = _Heard(env, Opening(prompt.id, prompt.seed))
        episode = Episode(prompt.id, heard, obs_queue, act_queue)
        try:
            await episode.begin(prompt.input_ids)
            with episode.guard("the first observation could not be encoded"):
                ids = self.messages.first(heard.text())
            for turn in range(self.limits.max_turns):
                if not self.fits(len(episode.token_ids) + len(ids)):
                    break
                episode.token_ids += ids
                completion, text = await self.listen(episode)
                reward, has_ended = await episode.judge(text)
                episode.keep(Exchange(completion, text, reward > 0, reward))
                if has_ended or turn + 1 == self.limits.max_turns:
                    break
                with episode.guard("an observation could not be encoded"):
                    ids = self.messages.after(completion.ids.tolist(), "user", [heard.text()])
        finally:
            await heard.close()
        return episode


class _Heard:
    """An environment whose last observation is remembered; its reset opens an episode."""

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
