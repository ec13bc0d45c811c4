from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from tests.agent.runner.runner_cases import EchoEngine, TwoTurns, prompts, runner, until
from trajpack.agent.errors import EpisodeCancelledError
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.policy import GroupPolicy, RolloutPolicy
from trajpack.agent.runner.runner import GroupResult


def rules(incomplete: Any = "keep") -> RolloutPolicy:
    return RolloutPolicy(groups=GroupPolicy(incomplete))


@pytest.mark.parametrize(("drain", "incomplete"), [(True, "drop"), (False, "keep"), (True, "keep")])
def test_a_group_that_was_cut_short_is_yielded_with_what_it_has(
    drain: bool, incomplete: str
) -> None:
    async def wait(prompt: Prompt) -> None:
        if prompt.id == "q1@0":
            run.stop(drain=drain)
            await asyncio.sleep(0.01)

    async def body() -> list[GroupResult]:
        nonlocal run
        async with EchoEngine() as engine:
            options: Any = {"group_size": 3, "concurrency": 1, "policy": rules(incomplete)}
            run = runner(engine, TwoTurns(before=wait), **options)
            return [group async for group in run.run_groups(prompts(3))]

    run: Any = None
    whole, cut = asyncio.run(body())
    assert (whole.prompt.id, whole.rejected, len(whole.results)) == ("q0", None, 3)
    assert (cut.prompt.id, len(cut.results)) == ("q1", 1)
    assert isinstance(cut.results[0].error, type(None) if drain else EpisodeCancelledError)
    expected = {(True, "drop"): "incomplete", (True, "keep"): None, (False, "keep"): "failed"}
    assert cut.rejected == expected[drain, incomplete]


@pytest.mark.parametrize("reads_at_once", [True, False])
def test_a_group_whose_next_sample_never_came_is_yielded_once(reads_at_once: bool) -> None:
    async def body() -> list[GroupResult]:
        async with EchoEngine() as engine:
            options: Any = {"group_size": 3, "concurrency": 1, "policy": rules("drop")}
            run = runner(engine, TwoTurns(), **options)
            async with asyncio.timeout(5), aclosing(run.run_groups(prompts(3))) as groups:
                first = await anext(groups)
                # As nobody takes them, no more than two of the next group begin, and both end.
                await until(lambda: len(engine.opened) == 5 and not engine.open)
                await asyncio.sleep(0.01)
                assert len(engine.opened) == 5
                run.stop(drain=True)
                if not reads_at_once:  # then its results and its end wait to be read together
                    await asyncio.sleep(0.01)
                return [first, *[group async for group in groups]]

    whole, cut = asyncio.run(body())
    assert (whole.rejected, len(whole.results)) == (None, 3)
    assert (cut.rejected, len(cut.results)) == ("incomplete", 2)


def test_no_sample_is_refilled_once_a_run_drains() -> None:
    async def fail(prompt: Prompt) -> None:
        run.stop(drain=True)
        raise ValueError("no")

    async def body() -> list[GroupResult]:
        nonlocal run
        async with EchoEngine() as engine:
            run = runner(engine, TwoTurns(before=fail), concurrency=1, policy=rules("refill"))
            return [group async for group in run.run_groups(prompts(3))]

    run: Any = None
    (group,) = asyncio.run(body())
    assert (group.rejected, len(group.results)) == ("failed", 1)
