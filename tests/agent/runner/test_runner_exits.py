from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from contextlib import aclosing

import anyio
import pytest

from tests.agent.runner.runner_cases import EchoEngine, TwoTurns, collect, prompts, runner
from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import Prompt, SamplingParams


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
