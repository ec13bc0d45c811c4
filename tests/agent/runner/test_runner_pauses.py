from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from tests.agent.runner.runner_cases import EchoEngine, TwoTurns, prompts, runner, until
from trajpack.agent.agents.conversation import Conversation
from trajpack.agent.errors import EpisodeTimeoutError
from trajpack.agent.protocols import Environment, Prompt
from trajpack.agent.runner.policy import RolloutPolicy
from trajpack.packing.types import Trajectory, Turn


class AsksTwiceAtOnce(TwoTurns):
    """Asks for a second reply before it takes the first."""

    async def collect_trajectory(self, prompt: Prompt, *queues: Any) -> list[Trajectory]:
        _, requests, replies = queues
        turns = []
        for _ in range(2):
            await requests.put((prompt.id, prompt.input_ids, None))
            await asyncio.sleep(0.02)
        for _ in range(2):
            reply = await replies.get()
            turns.append(Turn(prompt.input_ids, reply.output_ids, reply.output_logprobs))
        return [Trajectory(prompt.id, turns)]


def test_a_draining_pause_does_not_wait_for_agents_that_it_holds_up() -> None:
    async def body() -> None:
        async with EchoEngine() as engine, asyncio.timeout(5):
            run = runner(engine, AsksTwiceAtOnce())
            async with aclosing(run.run(prompts(1))) as results:
                rolling = asyncio.ensure_future(anext(results))
                await asyncio.sleep(0.01)
                async with run.paused(drain=True):
                    await asyncio.sleep(0.03)
                    assert not rolling.done()
                assert (await rolling).error is None

    asyncio.run(body())


class AsksInTime(TwoTurns):
    """Asks once, for a reply that is to come soon."""

    async def collect_trajectory(
        self, prompt: Prompt, env: Environment, *queues: Any
    ) -> list[Trajectory]:
        episode = Conversation(prompt.id, env, *queues)
        await episode.begin(prompt.input_ids)
        completion = await episode.ask(None, timeout=0.05)
        return [Trajectory(prompt.id, [Turn([*prompt.input_ids], completion.ids, [-1.0, -2.0])])]


@pytest.mark.parametrize("limit", ["of the episode", "of a reply"])
@pytest.mark.parametrize("begins", ["before", "meanwhile"])
def test_a_pause_makes_no_episode_late(limit: str, begins: str) -> None:
    async def body() -> None:
        policy = RolloutPolicy(episode_timeout_s=0.05 if limit == "of the episode" else None)
        go = asyncio.Event()
        agent = AsksInTime() if limit == "of a reply" else TwoTurns(before=lambda _: go.wait())
        async with EchoEngine() as engine, asyncio.timeout(5):
            run = runner(engine, agent, policy=policy)
            async with aclosing(run.run(prompts(1))) as results:
                rolling = asyncio.ensure_future(anext(results))
                if begins == "before" and limit == "of the episode":
                    await until(lambda: bool(engine.open))
                async with run.paused():
                    async with run.paused(drain=True):
                        await asyncio.sleep(0.06)
                    await asyncio.sleep(0.02)
                go.set()
                assert (await rolling).error is None

    asyncio.run(body())


def test_time_goes_on_after_a_pause_and_an_episode_may_end_in_one() -> None:
    async def body() -> None:
        policy = RolloutPolicy(episode_timeout_s=0.05)
        agent = TwoTurns(before=lambda prompt: asyncio.sleep(0 if prompt.id == "q0@0" else 10))
        async with EchoEngine() as engine, asyncio.timeout(5):
            run = runner(engine, agent, policy=policy)
            async with aclosing(run.run(prompts(2))) as results:
                first = await anext(results)
                async with run.paused():
                    await asyncio.sleep(0.01)
                second = await anext(results)
        assert first.error is None
        assert isinstance(second.error, EpisodeTimeoutError)

    asyncio.run(body())
