"""Agents over queues, as AReaL runs them: requests on one queue, replies on another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import (
    Environment,
    Generate,
    GenerationOutput,
    Prompt,
    SamplingParams,
)
from trajpack.agent.runner.episode import coroutine_of
from trajpack.agent.runner.replies import checked_prompt, turn_of
from trajpack.packing.types import Trajectory, Turn


async def run_over_queues(
    agent: Any,
    prompt: Prompt,
    env: Environment,
    obs_queue: asyncio.Queue[Any],
    act_queue: asyncio.Queue[Any],
) -> list[Trajectory]:
    """Run one episode of an agent of this library by AReaL's protocol.

    Args:
        agent: Agent, or the coroutine function that is one.
        prompt: Opening; its id is the ``qid`` of each request.
        env: Environment of the episode.
        obs_queue: Takes requests, ``(prompt.id, token_ids, sampling)``, one at a time.
        act_queue: Gives a `GenerationOutput` or a `GenerationError` for each request.
    """
    lock = asyncio.Lock()  # replies do not name their requests

    async def generate(token_ids: Sequence[int], sampling: Any = None) -> Turn:
        prompt_ids = checked_prompt(prompt.id, token_ids)
        sampling = SamplingParams() if sampling is None else sampling
        async with lock:
            await obs_queue.put((prompt.id, prompt_ids.tolist(), sampling))
            reply = await act_queue.get()
        if isinstance(reply, EpisodeError):
            raise reply
        return turn_of(prompt.id, prompt_ids, reply)

    found: list[Trajectory] = await coroutine_of(agent)(prompt, env, generate)
    return found


class QueueAgent:
    """Makes an agent that has AReaL's ``collect_trajectory`` one of a runner.

    A request that fails ends the episode with the request's error.

    Args:
        agent: Has a coroutine ``collect_trajectory(prompt, env, obs_queue, act_queue)``.
    """

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    async def run(self, prompt: Prompt, env: Environment, generate: Generate) -> list[Trajectory]:
        """Run one episode and return its trajectories."""
        obs_queue, act_queue = asyncio.Queue[Any](), asyncio.Queue[Any]()

        async def serve() -> None:
            while True:
                qid, token_ids, sampling = await obs_queue.get()
                if qid != prompt.id:
                    raise EpisodeError(prompt.id, f"the agent put a request with the qid {qid!r}")
                act_queue.put_nowait(_reply(qid, await generate(token_ids, sampling)))

        episode = self.agent.collect_trajectory(prompt, env, obs_queue, act_queue)
        serving, playing = asyncio.ensure_future(serve()), asyncio.ensure_future(episode)
        try:
            await asyncio.wait({serving, playing}, return_when=asyncio.FIRST_COMPLETED)
            found: list[Trajectory] = await (playing if playing.done() else serving)  # type: ignore[assignment]
        finally:
            for task in (serving, playing):
                task.cancel()
            await asyncio.wait({serving, playing})
        return found


def _reply(qid: str, turn: Turn) -> GenerationOutput:
    return GenerationOutput(
        qid,
        turn.prompt_ids,
        turn.completion_ids,
        turn.completion_logprobs,
        turn.truncated,
        turn.version_start,
        turn.version_end,
        turn.version_spans,
        turn.fields,
        turn.stop_reason,
    )
