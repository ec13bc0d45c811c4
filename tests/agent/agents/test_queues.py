"""Agents of this library over AReaL's queues."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.agent.runner.runner_cases import TwoTurns, until
from trajpack.agent.agents.chat_agent import ConversationAgent
from trajpack.agent.errors import EpisodeError, GenerationError, MalformedResponseError
from trajpack.agent.protocols import GenerationOutput, Prompt
from trajpack.packing.types import Trajectory


def over_queues(*replies: Any) -> tuple[list[Trajectory], list[Any]]:
    """Run an agent of two turns, and return its trajectories and requests."""

    async def body() -> tuple[list[Trajectory], list[Any]]:
        queues: Any = asyncio.Queue[Any](), asyncio.Queue[Any]()
        agent: Any = TwoTurns()
        episode = ConversationAgent.collect_trajectory(agent, Prompt("q", [1]), agent, *queues)
        running = asyncio.create_task(episode)
        requests = []
        for reply in replies:
            await until(lambda: running.done() or not queues[0].empty())
            if running.done():
                break
            requests.append(queues[0].get_nowait())
            queues[1].put_nowait(reply)
        return await running, requests

    return asyncio.run(body())


def reply(prompt_ids: list[int], output_ids: list[int]) -> GenerationOutput:
    return GenerationOutput("q", prompt_ids, output_ids, [-1.0] * len(output_ids), False, 3, 4)


def test_requests_and_replies_are_in_the_queues() -> None:
    (trajectory,), requests = over_queues(reply([1], [2]), reply([1, 2], [5, 6]))
    assert [request[:2] for request in requests] == [("q", [1]), ("q", [1, 2])]
    first, second = trajectory.turns
    assert (list(first.completion_ids), list(second.completion_ids)) == ([2], [5, 6])
    assert (second.version_start, second.version_end) == (3, 4)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [(GenerationError("q", "lost"), GenerationError), (reply([9], [2]), MalformedResponseError)],
)
def test_errors_and_wrong_replies_of_a_queue_end_the_episode(wrong: Any, kind: Any) -> None:
    with pytest.raises(EpisodeError) as caught:
        over_queues(wrong)
    assert type(caught.value) is kind
