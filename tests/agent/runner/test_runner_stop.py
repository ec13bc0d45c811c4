from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import anyio
import pytest

from tests.agent.runner.runner_cases import EchoEngine, TwoTurns, collect, prompts, runner, until
from trajpack.agent.agents.conversation import Conversation
from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.errors import EpisodeCancelledError, EpisodeTimeoutError, GenerationError
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import Environment, Prompt, SamplingParams
from trajpack.agent.runner.policy import BackOff, RetryPolicy, RolloutPolicy
from trajpack.agent.runner.runner import EpisodeResult, RolloutRunner
from trajpack.packing.types import Trajectory, Turn


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


def test_a_failing_source_of_prompts_comes_through_as_it_is() -> None:
    async def broken() -> AsyncIterator[Prompt]:
        for prompt in prompts(2):
            yield prompt
        await asyncio.sleep(0.01)
        raise OSError("disk")

    agent = TwoTurns(before=lambda _: asyncio.sleep(10))
    with pytest.raises(OSError, match="disk"):
        asyncio.run(collect(agent, broken()))
    assert sorted(agent.cancelled) == ["q0@0", "q1@0"]


def test_leaving_the_loop_early_cancels_and_closes_every_episode() -> None:
    async def wait(prompt: Prompt) -> None:
        await asyncio.sleep(0 if prompt.id == "q0@0" else 10)

    agent = TwoTurns(before=wait)

    async def body() -> None:
        async with EchoEngine() as engine:
            async for result in runner(engine, agent).run(prompts(5)):
                assert result.prompt.id == "q0"
                break
            await asyncio.sleep(0.01)
            assert engine.open == {}
            assert len(asyncio.all_tasks()) == 2

    asyncio.run(body())
    assert agent.active == 0
    assert len(agent.cancelled) == 4


def test_ending_the_program_right_after_leaving_early_is_silent(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def body() -> None:
        async with EchoEngine() as engine:
            agent = TwoTurns(before=lambda _: asyncio.sleep(0.001))
            async for _ in runner(engine, agent, concurrency=2).run(prompts(20)):
                break

    asyncio.run(body())
    gc.collect()
    assert capfd.readouterr().err == ""


def test_closing_the_generator_waits_for_the_episodes_to_end() -> None:
    agent = TwoTurns(before=lambda p: asyncio.sleep(0 if p.id == "q0@0" else 10))

    async def body() -> None:
        async with EchoEngine() as engine:
            async with aclosing(runner(engine, agent, concurrency=3).run(prompts(50))) as results:
                await anext(results)
            assert engine.open == {}
            assert agent.active == 0
            assert len(asyncio.all_tasks()) == 2

    asyncio.run(body())


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.05])
def test_cancelling_the_reader_cancels_and_closes_every_episode(delay: float) -> None:
    agent = TwoTurns(before=lambda _: asyncio.sleep(10))

    async def body() -> None:
        async with EchoEngine() as engine:
            task = asyncio.create_task(read(engine))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.open == {}
            assert agent.active == 0

    async def read(engine: EchoEngine) -> None:
        async for _ in runner(engine, agent, concurrency=8).run(prompts(50)):
            pass

    asyncio.run(body())


def test_leaving_a_run_early_frees_the_real_engine() -> None:
    model, tokenizer = build_tiny_model()
    ids = tokenizer("What is 12 + 30?")["input_ids"]
    asked = (Prompt(str(k), ids) for k in range(1000))
    agent = TwoTurns(sampling=SamplingParams(max_new_tokens=200))

    async def body() -> None:
        engine = TransformersEngine(model, num_blocks=64, page_size=16)
        async with engine, aclosing(runner(engine, agent, concurrency=4).run(asked)) as results:
            await anext(results)
        assert asyncio.all_tasks() == {asyncio.current_task()}


def test_an_agent_that_will_not_be_cancelled_is_cancelled_again() -> None:
    async def hold_on(prompt: Prompt) -> None:
        for _ in range(3):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0 if prompt.id == "q0@0" else 10)

    async def body() -> None:
        async with EchoEngine() as engine, asyncio.timeout(5):
            results = runner(engine, TwoTurns(before=hold_on)).run(prompts(3))
            async with aclosing(results):
                await anext(results)
            assert engine.open == {}
            assert len(asyncio.all_tasks()) == 2

    asyncio.run(body())


def test_a_reader_in_a_scope_of_its_own_leaves_nothing_behind() -> None:
    agent = TwoTurns(before=lambda _: asyncio.sleep(10))

    async def read(engine: EchoEngine) -> None:
        with anyio.move_on_after(0.02):
            async with aclosing(runner(engine, agent).run(prompts(9))) as results:
                await anext(results)

    async def body() -> None:
        async with EchoEngine() as engine:
            await read(engine)
            assert engine.open == {}
            assert agent.active == 0
            assert len(asyncio.all_tasks()) == 2

    asyncio.run(body())
