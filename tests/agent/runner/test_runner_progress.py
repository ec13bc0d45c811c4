from __future__ import annotations

import asyncio

import pytest

from tests.agent.runner.runner_cases import TwoTurns, collect, prompts
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.runner import Progress


def test_progress_counts_what_has_finished() -> None:
    seen: list[Progress] = []

    async def fail(prompt: Prompt) -> None:
        if prompt.id == "q0@1":
            raise ValueError("no")

    asked = collect(TwoTurns(before=fail), prompts(3), group_size=2, on_progress=seen.append)
    asyncio.run(asked)
    assert sorted({progress.num_finished for progress in seen} - {0}) == [1, 2, 3, 4, 5, 6]
    last = seen[-1]
    assert (last.num_prompts, last.num_started, last.num_failed) == (3, 6, 1)
    assert (last.num_turns, last.num_kept_turns, last.num_rewarded_turns) == (10, 10, 5)
    assert last.num_tokens == 20
    assert last.reward_sum == 2.5
    assert last.elapsed_s > 0
    assert last.tokens_per_s == pytest.approx(20 / last.elapsed_s)


def test_progress_moves_with_every_reply() -> None:
    seen: list[Progress] = []
    asyncio.run(collect(TwoTurns(), prompts(1), on_progress=seen.append))
    assert [(one.num_turns, one.num_tokens, one.num_finished) for one in seen] == [
        (1, 2, 0),
        (2, 4, 0),
        (2, 4, 1),
    ]


def test_a_callback_that_fails_on_a_reply_ends_the_run() -> None:
    def fail(progress: Progress) -> None:
        if progress.num_finished == 0:
            raise KeyError("bar")

    agent = TwoTurns()
    with pytest.raises(KeyError, match="bar"):
        asyncio.run(collect(agent, prompts(20), concurrency=2, on_progress=fail))
    assert agent.active == 0


def test_a_failing_progress_callback_comes_through_as_it_is() -> None:
    def fail(progress: Progress) -> None:
        raise KeyError("bar")

    agent = TwoTurns(before=lambda _: asyncio.sleep(0.001))
    with pytest.raises(KeyError, match="bar"):
        asyncio.run(collect(agent, prompts(20), concurrency=2, on_progress=fail))
    assert agent.active == 0
