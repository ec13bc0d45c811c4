"""Agents of AReaL's protocol as agents of a runner, and the other way round."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.agent.runner.runner_cases import EchoEngine, TwoTurns, roll, until
from trajpack.agent.agents.queue_adapter import QueueAgent, run_over_queues
from trajpack.agent.errors import EpisodeError, GenerationError, MalformedResponseError
from trajpack.agent.protocols import GenerationOutput, Prompt
from trajpack.packing.types import Trajectory, Turn


class Queued:
    """Asks for several completions at once, as an agent of queues may."""

    def __init__(self, num_requests: int = 2, qid: str | None = None) -> None:
        self.num_requests, self.qid = num_requests, qid

    async def collect_trajectory(
        self, prompt: Prompt, env: Any, obs_queue: Any, act_queue: Any
    ) -> list[Trajectory]:
        for _ in range(self.num_requests):
            await obs_queue.put((self.qid or prompt.id, prompt.input_ids, None))
        replies = [await act_queue.get() for _ in range(self.num_requests)]
        assert {type(reply) for reply in replies} == {GenerationOutput}
        turns = [Turn(r.prompt_ids, r.output_ids, r.output_logprobs) for r in replies]
        return [Trajectory(prompt.id, turns)]


def test_an_agent_of_queues_runs_in_a_runner() -> None:
    results = roll(QueueAgent(Queued()), 3)
    assert [len(result.turns) for result in results] == [2, 2, 2]
    with pytest.raises(TypeError, match=r"run\(prompt, env, generate\).*got Queued \(QueueAgent"):
        roll(Queued(), 1)


class Refuses(EchoEngine):
    async def wait(self, request: Any) -> None:
        raise GenerationError(request.qid, "out of memory")


def test_a_failed_request_and_one_of_another_episode_end_the_episode() -> None:
    (result,) = roll(QueueAgent(Queued()), 1, engine=Refuses())
    assert str(result.error) == "episode 'q0@0': out of memory"
    (result,) = roll(QueueAgent(Queued(qid="q1")), 1)
    assert "the agent put a request with the qid 'q1'" in str(result.error)


def over_queues(*replies: Any) -> tuple[list[Trajectory], list[Any]]:
    """Run an agent of two turns, and return its trajectories and requests."""

    async def body() -> tuple[list[Trajectory], list[Any]]:
        obs_queue, act_queue = asyncio.Queue[Any](), asyncio.Queue[Any]()
        episode = run_over_queues(TwoTurns(), Prompt("q", [1]), None, obs_queue, act_queue)  # type: ignore[arg-type]
        running = asyncio.create_task(episode)
        requests = []
        for reply in replies:
            await until(lambda: running.done() or not obs_queue.empty())
            if running.done():
                break
            requests.append(obs_queue.get_nowait())
            act_queue.put_nowait(reply)
        return await running, requests

    return asyncio.run(body())


def reply(prompt_ids: list[int], output_ids: list[int]) -> GenerationOutput:
    return GenerationOutput("q", prompt_ids, output_ids, [-1.0] * len(output_ids), False, 3, 4)


def test_an_agent_of_this_library_runs_over_queues() -> None:
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
