"""Agents over queues, as AReaL runs them: requests on one queue, replies on another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import Environment, Generate, GenerationOutput, Prompt, SamplingParams
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
    """Run one episode of an agent, or of the coroutine function that is one, by AReaL's protocol.

    ``obs_queue`` takes requests ``(prompt.id, token_ids, sampling)``, one at a time. ``act_queue``
    gives a `GenerationOutput`, or a `GenerationError`, for each.
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

    trajectories: list[Trajectory] = await coroutine_of(agent)(prompt, env, generate)
    return trajectories


class QueueAgent:
    """Makes an agent that has AReaL's ``collect_trajectory`` one of a runner.

    ``await obs_queue.put(request)`` returns once the reply is on ``act_queue``, and raises the
    error of a request that fails.

    Args:
        agent: Has a coroutine ``collect_trajectory(prompt, env, obs_queue, act_queue)``.
    """

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    async def run(self, prompt: Prompt, env: Environment, generate: Generate) -> list[Trajectory]:
        """Run one episode and return its trajectories."""
        replies = asyncio.Queue[GenerationOutput]()
        requests = _Requests(prompt.id, generate, replies)
        trajectories: list[Trajectory] = await self.agent.collect_trajectory(
            prompt, env, requests, replies
        )
        return trajectories


class _Requests(NamedTuple):
    """The ``obs_queue`` of one episode, which generates as a request is put."""

    qid: str
    generate: Generate
    replies: asyncio.Queue[GenerationOutput]

    async def put(self, request: tuple[str, Sequence[int], Any]) -> None:
        qid, token_ids, sampling = request
        if qid != self.qid:
            raise EpisodeError(self.qid, f"the agent put a request with the qid {qid!r}")
        turn = await self.generate(token_ids, sampling)
        same = ("prompt_ids", "version_start", "version_end", "version_spans", "fields")
        reply = GenerationOutput(
            qid=qid,
            output_ids=turn.completion_ids,
            output_logprobs=turn.completion_logprobs,
            no_eos=turn.truncated,
            stop_reason=turn.stop_reason,
            **{name: getattr(turn, name) for name in same},
        )
        self.replies.put_nowait(reply)
