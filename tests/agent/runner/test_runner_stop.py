from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.agent.runner.runner_cases import EchoEngine, TwoTurns, prompts, runner, until
from trajpack.agent.errors import EpisodeCancelledError, GenerationError
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.policy import BackOff, RetryPolicy, RolloutPolicy
from trajpack.agent.runner.runner import EpisodeResult, RolloutRunner
from trajpack.packing.types import Trajectory


class Doors(TwoTurns):
    """Begins an episode, and goes on when it is let."""

    def __init__(self) -> None:
        super().__init__(before=self.wait)
        self.begun: list[str] = []
        self.door = asyncio.Event()

    async def wait(self, prompt: Prompt) -> None:
        self.begun.append(prompt.id)
        if prompt.id != "q0@0":
            await self.door.wait()


async def stopped(run: RolloutRunner, agent: Doors, *, drain: bool) -> list[EpisodeResult]:
    """Stop at the first result, then let the others go on."""
    results = []
    async for result in run.run(prompts(50)):
        results.append(result)
        if len(results) == 1:
            await until(lambda: len(agent.begun) == 5)
            run.stop(drain=drain)
            if drain:
                agent.door.set()
    assert len(asyncio.all_tasks()) == 2  # the engine's and this
    return results


@pytest.mark.parametrize("drain", [True, False])
def test_stopping_ends_the_run_with_one_result_for_each_episode_begun(drain: bool) -> None:
    async def body() -> None:
        async with EchoEngine() as engine:
            agent = Doors()
            run = runner(engine, agent, concurrency=4)
            results = await stopped(run, agent, drain=drain)
            assert sorted(result.qid for result in results) == sorted(agent.begun)
            assert len(results) == 5
            errors = [type(result.error) for result in results[1:]]
            assert errors == [type(None) if drain else EpisodeCancelledError] * 4
            assert engine.open == {}
            agent.door.set()
            again = [result async for result in run.run(prompts(3))]
            assert [result.error for result in again] == [None] * 3

    asyncio.run(body())


@pytest.mark.parametrize("drain", [True, False])
def test_stopping_does_not_wait_for_the_next_prompt(drain: bool) -> None:
    async def endless() -> AsyncIterator[Prompt]:
        yield prompts(1)[0]
        await asyncio.Event().wait()

    async def body() -> None:
        async with EchoEngine() as engine:
            run = runner(engine, TwoTurns())
            results = []
            async with asyncio.timeout(5):
                async for result in run.run(endless()):
                    results.append(result)
                    run.stop(drain=drain)
            assert [result.error for result in results] == [None]

    asyncio.run(body())


def test_an_episode_that_waits_for_its_next_attempt_is_cancelled_too() -> None:
    class Fails(TwoTurns):
        async def collect_trajectory(self, *values: Any) -> list[Trajectory]:
            raise GenerationError(values[0].id, "lost")

    async def body() -> list[EpisodeResult]:
        nonlocal run
        policy = RolloutPolicy(retries=RetryPolicy(2, wait=BackOff(60.0, 60.0)))
        async with EchoEngine() as engine, asyncio.timeout(5):
            run = runner(engine, Fails(), concurrency=1, policy=policy)
            return [result async for result in run.run(prompts(2))]

    async def ended() -> list[EpisodeResult]:
        task = asyncio.create_task(body())
        await asyncio.sleep(0.05)
        run.stop(drain=False)
        return await task

    run: Any = None
    results = asyncio.run(ended())
    assert sorted(result.qid for result in results) == ["q0@0", "q1@0"]
    assert {type(result.error) for result in results} == {EpisodeCancelledError}


def test_an_episode_that_was_about_to_begin_is_cancelled_too() -> None:
    def stopping() -> Iterator[Prompt]:
        yield prompts(1)[0]
        run.stop(drain=False)
        yield prompts(2)[1]

    async def body() -> list[EpisodeResult]:
        nonlocal run
        async with EchoEngine() as engine:
            run = runner(engine, TwoTurns())
            return [result async for result in run.run(stopping())]

    run: Any = None
    (result,) = asyncio.run(body())
    assert (result.qid, type(result.error)) == ("q0@0", EpisodeCancelledError)


def test_nothing_is_tried_again_once_a_run_drains() -> None:
    async def fail(prompt: Prompt) -> None:
        run.stop(drain=True)
        raise GenerationError(prompt.id, "lost")

    async def body() -> list[EpisodeResult]:
        nonlocal run
        policy = RolloutPolicy(retries=RetryPolicy(5, wait=BackOff(0.0)))
        async with EchoEngine() as engine:
            run = runner(engine, TwoTurns(before=fail), concurrency=1, policy=policy)
            return [result async for result in run.run(prompts(3))]

    run: Any = None
    (result,) = asyncio.run(body())
    assert (result.attempts, type(result.error)) == (1, GenerationError)


class Slow(EchoEngine):
    """Answers one request each time it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []
        self.answers = asyncio.Semaphore(0)

    async def _answer(self) -> None:
        while True:
            item = await self.obs_queue.get()
            self.taken.append(item[0])
            await self.answers.acquire()
            self.answer(item)


def test_no_request_reaches_the_engine_during_a_pause() -> None:
    async def body() -> None:
        async with EchoEngine() as engine:
            run = runner(engine, TwoTurns(), concurrency=4)
            async with AsyncExitStack() as stack, run.paused():
                task = asyncio.create_task(gather(run, 8))
                await until(lambda: len(engine.opened) == 4)
                async with run.paused(drain=True):  # one more: nothing is in flight
                    pass
                await asyncio.sleep(0.01)
                assert (engine.obs_queue.qsize(), task.done()) == (0, False)
                stack.pop_all()
            assert await task == 8

    async def gather(run: RolloutRunner, count: int) -> int:
        return len([r async for r in run.run(prompts(count)) if r.error is None])

    asyncio.run(body())


def test_a_draining_pause_waits_for_what_is_in_flight() -> None:
    async def body() -> None:
        engine = Slow()
        async with engine:
            run = runner(engine, TwoTurns())
            rolling = asyncio.create_task(take(run))
            await until(lambda: engine.taken == ["q0@0"])
            entered: list[int] = []

            async def pause() -> None:
                async with run.paused(drain=True):
                    entered.append(engine.obs_queue.qsize())
                    await asyncio.sleep(0.01)
                    entered.append(len(engine.taken))

            pausing = asyncio.create_task(pause())
            await asyncio.sleep(0.01)
            assert entered == []
            engine.answers.release()
            await pausing
            assert entered == [0, 1]
            engine.answers.release()
            assert (await rolling).error is None
            async with asyncio.timeout(1), run.paused(drain=True):
                pass

    async def take(run: RolloutRunner) -> EpisodeResult:
        (result,) = [result async for result in run.run(prompts(1))]
        return result

    asyncio.run(body())


def test_a_request_given_up_is_in_flight_no_more() -> None:
    async def body() -> None:
        async with Slow() as engine:
            policy = RolloutPolicy(episode_timeout_s=0.02)
            run = runner(engine, TwoTurns(), policy=policy)
            results = [result async for result in run.run(prompts(2))]
            assert [result.error.cause for result in results if result.error] == ["timeout"] * 2
            async with asyncio.timeout(1), run.paused(drain=True):
                pass

    asyncio.run(body())


def test_a_pause_makes_the_queue_full_for_those_who_do_not_wait() -> None:
    class Hasty(TwoTurns):
        async def collect_trajectory(self, *values: Any) -> list[Trajectory]:
            prompt, _, requests, replies = values
            assert requests.full() == is_paused
            requests.put_nowait((prompt.id, prompt.input_ids, None))
            await replies.get()
            return []

    async def body() -> list[EpisodeResult]:
        async with EchoEngine() as engine:
            run = runner(engine, Hasty())
            if not is_paused:
                return [result async for result in run.run(prompts(1))]
            async with run.paused():
                return [result async for result in run.run(prompts(1))]

    is_paused = False
    assert asyncio.run(body())[0].error is None
    is_paused = True
    assert "QueueFull" in str(asyncio.run(body())[0].error)


def test_what_an_agent_leaves_running_asks_no_more() -> None:
    late: list[BaseException | None] = []

    class Leaves(TwoTurns):
        async def collect_trajectory(self, *values: Any) -> list[Trajectory]:
            prompt, _, requests, _ = values

            async def ask_later() -> None:
                await until(lambda: prompt.id not in engine.open)
                try:
                    await requests.put((prompt.id, prompt.input_ids, None))
                except RuntimeError as error:
                    late.append(error)

            tasks.append(asyncio.create_task(ask_later()))
            return await super().collect_trajectory(*values)

    async def body() -> None:
        nonlocal engine
        async with EchoEngine() as engine:
            [_ async for _ in runner(engine, Leaves()).run(prompts(1))]
            await asyncio.gather(*tasks)

    engine: Any = None
    tasks: list[asyncio.Task[None]] = []
    asyncio.run(body())
    assert [str(error) for error in late] == ["episode 'q0@0' is over: it asks no more"]
