from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import anyio
import pytest

from tests.agent.runner.runner_cases import (
    EchoEngine,
    TwoTurns,
    all_but_first,
    prompts,
    roll,
    runner,
    serve,
    take,
    until,
)
from trajpack.agent.errors import EpisodeCancelledError, EpisodeTimeoutError, GenerationError
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.policy import RetryPolicy, RolloutPolicy
from trajpack.agent.runner.runner import EpisodeResult
from trajpack.packing.types import Trajectory, Turn


@pytest.mark.parametrize("drain", [True, False])
def test_stopping_ends_the_run_with_one_result_for_each_episode_begun(drain: bool) -> None:
    async def body(engine: EchoEngine) -> None:
        begun: list[str] = []
        door = asyncio.Event()

        async def wait(prompt: Prompt) -> None:
            begun.append(prompt.id)
            if prompt.id != "q0@0":
                await door.wait()

        run = runner(engine, TwoTurns(before=wait), concurrency=4)
        results = []
        async for result in run.run(prompts(50)):
            results.append(result)
            if len(results) == 1:
                await until(lambda: len(begun) == 5)
                run.stop(drain=drain)
                if drain:
                    door.set()
        assert len(asyncio.all_tasks()) == 1
        assert sorted(result.qid for result in results) == sorted(begun)
        assert len(results) == 5
        errors = [type(result.error) for result in results[1:]]
        assert errors == [type(None) if drain else EpisodeCancelledError] * 4
        assert not engine.open
        door.set()
        assert [result.error for result in await take(run.run(prompts(3)))] == [None] * 3

    serve(body)


@pytest.mark.parametrize("drain", [True, False])
def test_stopping_does_not_wait_for_the_next_prompt(drain: bool) -> None:
    async def endless() -> AsyncIterator[Prompt]:
        yield prompts(1)[0]
        await asyncio.Event().wait()

    async def body(engine: EchoEngine) -> None:
        run = runner(engine, TwoTurns())
        async for result in run.run(endless()):
            assert result.error is None
            run.stop(drain=drain)

    serve(body)


def test_no_episode_is_tried_again_once_a_run_drains() -> None:
    async def body(engine: EchoEngine) -> list[EpisodeResult]:
        async def fail(prompt: Prompt) -> None:
            run.stop(drain=True)
            raise GenerationError(prompt.id, "lost")

        policy = RolloutPolicy(retries=RetryPolicy(5, wait_initial_s=0.0))
        run = runner(engine, TwoTurns(before=fail), concurrency=1, policy=policy)
        return await take(run.run(prompts(3)))

    (result,) = serve(body)
    assert (result.attempts, type(result.error)) == (1, GenerationError)


class Slow(EchoEngine):
    """Answers one request each time it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Semaphore(0)

    async def wait(self, request: Any) -> None:
        await self.answers.acquire()


def test_no_request_reaches_the_engine_during_a_pause() -> None:
    async def body(engine: EchoEngine) -> None:
        agent = TwoTurns()
        run = runner(engine, agent, concurrency=4)
        async with run.paused():
            reading = asyncio.create_task(take(run.run(prompts(8))))
            await until(lambda: agent.active == 4)
            async with run.paused(drain=True):  # one more: no request is in flight
                pass
            await asyncio.sleep(0.01)
            assert (engine.opened, reading.done()) == ([], False)
        assert [result.error for result in await reading] == [None] * 8

    serve(body)


def test_a_draining_pause_waits_for_the_requests_in_flight() -> None:
    async def body(engine: Slow) -> None:
        run = runner(engine, TwoTurns())
        rolling = asyncio.create_task(take(run.run(prompts(1))))
        await until(lambda: engine.open == ["q0@0"])
        entered: list[list[str]] = []

        async def pause() -> None:
            async with run.paused(drain=True):
                entered.append(engine.open.copy())
                await asyncio.sleep(0.01)
                entered.append(engine.open.copy())

        pausing = asyncio.create_task(pause())
        await asyncio.sleep(0.01)
        assert entered == []
        engine.answers.release()
        await pausing
        assert entered == [[], []]
        engine.answers.release()
        assert (await rolling)[0].error is None
        async with asyncio.timeout(60), run.paused(drain=True):
            pass

    serve(body, Slow())


def test_a_request_given_up_is_in_flight_no_more() -> None:
    async def body(engine: Slow) -> None:
        run = runner(engine, TwoTurns(), policy=RolloutPolicy(episode_timeout_s=0.02))
        results = await take(run.run(prompts(2)))
        assert [result.error.cause for result in results if result.error] == ["timeout"] * 2
        async with asyncio.timeout(60), run.paused(drain=True):
            pass

    serve(body, Slow())


def test_a_task_that_an_agent_leaves_running_asks_no_more() -> None:
    late: list[BaseException] = []

    async def body(engine: EchoEngine) -> None:
        class Leaves(TwoTurns):
            async def run(self, *values: Any) -> list[Trajectory]:
                prompt, _, generate = values

                async def ask_later() -> None:
                    await until(lambda: not self.active)
                    try:
                        await generate(prompt.input_ids)
                    except RuntimeError as error:
                        late.append(error)

                tasks.append(asyncio.create_task(ask_later()))
                return await super().run(*values)

        tasks: list[asyncio.Task[None]] = []
        await take(runner(engine, Leaves()).run(prompts(1)))
        await asyncio.gather(*tasks)

    serve(body)
    assert [str(error) for error in late] == ["episode 'q0@0' is over: it asks no more"]


def test_a_task_that_still_asks_when_its_episode_ends_is_cancelled() -> None:
    async def body(engine: Slow) -> None:
        async def leaves(prompt: Prompt, env: Any, generate: Any) -> list[Trajectory]:
            tasks.append(asyncio.create_task(generate(prompt.input_ids)))
            await until(lambda: engine.open == [prompt.id])
            return [Trajectory(prompt.id, [Turn([1], [2], [-1.0])])]

        tasks: list[asyncio.Task[Any]] = []
        run = runner(engine, leaves)
        (result,) = await take(run.run(prompts(1)))
        assert result.error is None
        await asyncio.wait(tasks)
        assert tasks[0].cancelled()
        async with asyncio.timeout(60), run.paused(drain=True):
            pass

    serve(body, Slow())


@pytest.mark.parametrize("limit", ["episode_timeout_s", "generation_timeout_s"])
@pytest.mark.parametrize("begins", ["before", "meanwhile"])
def test_a_pause_makes_no_episode_late(limit: str, begins: str) -> None:
    async def body(engine: Slow) -> None:
        go = asyncio.Event()
        agent = TwoTurns(before=lambda _: go.wait())
        run = runner(engine, agent, policy=RolloutPolicy(**{limit: 0.05}))
        rolling = asyncio.create_task(take(run.run(prompts(1))))
        await until(lambda: agent.active == 1)
        if begins == "before":
            go.set()
            await until(lambda: engine.open == ["q0@0"])
        async with run.paused():
            async with run.paused():
                await asyncio.sleep(0.06)
            go.set()
            await asyncio.sleep(0.02)
        engine.answers.release()
        engine.answers.release()
        assert (await rolling)[0].error is None

    serve(body, Slow())


def test_a_reply_that_is_late_fails_its_episode_alone() -> None:
    class First(EchoEngine):
        async def wait(self, request: Any) -> None:
            await asyncio.sleep(1000 if request.qid == "q0@0" else 0)

    policy = RolloutPolicy(generation_timeout_s=0.02)
    results = {r.qid: r.error for r in roll(TwoTurns(), 2, engine=First(), policy=policy)}
    assert results["q1@0"] is None
    assert isinstance(results["q0@0"], EpisodeTimeoutError)
    assert results["q0@0"].reason == "no reply within 0.02 s"


def test_time_goes_on_after_a_pause_and_an_episode_may_end_in_one() -> None:
    async def body(engine: EchoEngine) -> None:
        run = runner(engine, all_but_first(1000), policy=RolloutPolicy(episode_timeout_s=0.05))
        async with aclosing(run.run(prompts(2))) as results:
            assert (await anext(results)).error is None
            async with run.paused():
                await asyncio.sleep(0.01)
            assert isinstance((await anext(results)).error, EpisodeTimeoutError)

    serve(body)


def test_a_failing_source_of_prompts_comes_through_as_it_is() -> None:
    async def broken() -> AsyncIterator[Prompt]:
        for prompt in prompts(2):
            yield prompt
        await asyncio.sleep(0.01)
        raise OSError("disk")

    agent = TwoTurns(before=lambda _: asyncio.sleep(1000))
    with pytest.raises(OSError, match="disk"):
        roll(agent, broken())
    assert sorted(agent.cancelled) == ["q0@0", "q1@0"]


async def _break(run: AsyncIterator[EpisodeResult]) -> None:
    async for result in run:
        assert result.prompt.id == "q0"
        break


async def _cancel(run: AsyncIterator[EpisodeResult]) -> None:
    task = asyncio.create_task(take(run))
    await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _time_out(run: AsyncGenerator[EpisodeResult]) -> None:
    with anyio.move_on_after(0.02):
        async with aclosing(run) as results:
            await take(results)


@pytest.mark.parametrize("leave", [_break, _cancel, _time_out])
def test_leaving_early_cancels_and_closes_every_episode(leave: Any) -> None:
    agent = all_but_first(1000)

    async def body(engine: EchoEngine) -> None:
        await leave(runner(engine, agent, concurrency=8).run(prompts(50)))
        await until(lambda: not engine.open and agent.active == 0)
        await until(lambda: len(asyncio.all_tasks()) == 1)

    serve(body)
    assert len(agent.cancelled) >= 3


def test_closing_the_generator_waits_for_the_episodes_to_end() -> None:
    async def hold_on(prompt: Prompt) -> None:
        """Take three cancellations."""
        for _ in range(3):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0 if prompt.id == "q0@0" else 1000)

    async def body(engine: EchoEngine) -> None:
        for agent in (all_but_first(1000), TwoTurns(before=hold_on)):
            async with aclosing(runner(engine, agent, concurrency=3).run(prompts(50))) as results:
                await anext(results)
            assert not engine.open
            assert agent.active == 0
            assert len(asyncio.all_tasks()) == 1

    serve(body)
