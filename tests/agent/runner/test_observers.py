from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest

from tests.agent.runner.runner_cases import (
    EchoEngine,
    NoEnvironment,
    TwoTurns,
    failing,
    roll,
    roll_groups,
)
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.agent.runner.policy import (
    GroupPolicy,
    RetryPolicy,
    RolloutPolicy,
    StalenessPolicy,
)
from trajpack.agent.runner.runner import Progress
from trajpack.packing.types import Trajectory

HOOKS = [name for name in vars(RolloutObserver) if not name.startswith("_")]


class Records:
    """Keeps the name and the values of every hook that is called."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        if name not in HOOKS:
            raise AttributeError(name)
        return lambda *values, **named: self.told.append((name, *values, *named.values()))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [values for hook, *values in self.told if hook == name]  # type: ignore[misc]


class Judged(TwoTurns):
    """Asks twice and has each answer judged."""

    async def run(self, *values: Any) -> list[Trajectory]:
        prompt, env, generate = values
        await env.reset()
        for turn in range(2):
            await generate([1] * (3 + turn))
            await env.step((prompt.id, ["x"]))
        return await super().run(*values)


def test_observers_are_told_of_every_step_in_order() -> None:
    seen = Records()
    (result,) = roll(Judged(), 1, engine=EchoEngine(version=4), observers=[seen])
    calls = [(name, *values[:2]) for name, *values in seen.told]
    turns = [
        call
        for turn in (0, 1)
        for call in [
            ("generation_started", "q0@0", turn),
            ("generation_ended", "q0@0", turn),
            ("verification_started", "q0@0", turn),
            ("verification_ended", "q0@0", turn),
        ]
    ]
    others = [
        (f"generation_{what}", "q0@0", turn) for turn in (2, 3) for what in ("started", "ended")
    ]
    assert calls == [
        ("episode_started", "q0@0", 0),
        *turns,
        *others,
        ("episode_ended", "q0@0", 0),
        ("result_accepted", result, 4),
    ]
    assert [size for _, _, size in seen.of("generation_started")] == [3, 4, 2, 4]
    assert seen.of("generation_ended")[0][2].output_ids == [1, 2]
    assert seen.of("verification_ended") == [["q0@0", 0, None], ["q0@0", 1, None]]
    assert seen.of("episode_ended") == [["q0@0", 0, None, True]]


def test_failures_of_environment_and_attempts_are_told() -> None:
    class Breaks(NoEnvironment):
        async def step(self, action: Any) -> Any:
            raise LookupError("no verdict")

    seen = Records()
    policy = RolloutPolicy(retries=RetryPolicy(2, wait_initial_s=0.0))
    (result,) = roll(Judged(), 1, observers=[seen], environment=Breaks(), policy=policy)
    assert [str(values[2]) for values in seen.of("verification_ended")] == ["no verdict"] * 2
    assert [(values[1], values[2].cause, values[3]) for values in seen.of("episode_ended")] == [
        (0, "environment", False),
        (1, "environment", True),
    ]
    assert seen.of("episode_started") == [["q0@0", 0], ["q0@0", 1]]
    assert seen.of("result_accepted") == []
    assert result.attempts == 2


def test_a_stale_result_ends_its_attempt_a_second_time() -> None:
    engine = EchoEngine()

    class Ages(TwoTurns):
        async def run(self, *values: Any) -> list[Trajectory]:
            found = await super().run(*values)
            engine.version = 9
            return found

    policy = RolloutPolicy(
        retries=RetryPolicy(2, wait_initial_s=0.0),
        staleness=StalenessPolicy(9, 9, max_token_age=0),
    )
    seen = Records()
    roll(Ages(), 1, engine=engine, policy=policy, observers=[seen])
    ends = [
        (values[1], values[2] and values[2].cause, values[3]) for values in seen.of("episode_ended")
    ]
    assert ends == [(0, None, True), (0, "stale", True)]
    assert seen.of("result_accepted") == []


def test_groups_are_told_with_their_reason() -> None:
    seen = Records()
    policy = RolloutPolicy(groups=GroupPolicy("drop"))
    roll_groups(failing("q0@1"), 2, policy=policy, group_size=2, observers=[seen])
    groups = {values[0]: (len(values[1]), values[2]) for values in seen.of("group_ended")}
    assert groups == {"q0": (2, "incomplete"), "q1": (2, None)}
    assert sorted(values[0].qid for values in seen.of("result_accepted")) == ["q1@0", "q1@1"]


def test_an_observer_that_fails_is_logged_once_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(RolloutObserver):
        def generation_ended(self, qid: str, turn: int, reply: Any) -> None:
            raise ZeroDivisionError("x\n2026 ERROR forged \x1b[2J")

        def episode_ended(self, qid: str, attempt: int, error: Any, *, final: bool) -> None:
            raise KeyError(qid)

    seen = Records()
    with caplog.at_level(logging.ERROR):
        (result,) = roll(Judged(), 1, observers=[Broken(), seen])
    assert result.error is None
    said = [re.sub(r"/\S+:\d+", "FILE", record.getMessage()) for record in caplog.records]
    assert said == [
        "Broken.generation_ended has failed at FILE, told once: "
        "ZeroDivisionError: x\\n2026 ERROR forged \\x1b[2J",
        "Broken.episode_ended has failed at FILE, told once: KeyError: 'q0@0'",
    ]
    assert not [record.exc_info for record in caplog.records if record.exc_info]
    assert len(seen.of("generation_ended")) == 4


def test_an_environment_keeps_what_else_it_has() -> None:
    class Rich(NoEnvironment):
        name = "rich"

        async def reset(self, seed: int = 0) -> Any:
            return seed

    class Asks(TwoTurns):
        async def run(self, *values: Any) -> list[Trajectory]:
            assert values[1].name == "rich"
            assert await values[1].reset(seed=3) == 3
            with pytest.raises(AttributeError, match="poor"):
                _ = values[1].poor
            return await super().run(*values)

    (result,) = roll(Asks(), 1, environment=Rich())
    assert result.error is None


def test_progress_counts_the_episodes_that_have_finished() -> None:
    seen: list[Progress] = []
    roll(failing("q0@1"), 3, group_size=2, on_progress=seen.append)
    assert sorted({progress.num_finished for progress in seen} - {0}) == [1, 2, 3, 4, 5, 6]
    last = seen[-1]
    assert last.num_failed == 1
    assert (last.num_turns, last.num_kept_turns, last.num_rewarded_turns) == (10, 10, 5)
    assert last.num_tokens == 20
    assert last.elapsed_s > 0
    assert last.tokens_per_s == pytest.approx(20 / last.elapsed_s)
    seen.clear()
    roll(TwoTurns(), 1, on_progress=seen.append)
    moves = [(one.num_turns, one.num_tokens, one.num_finished) for one in seen]
    assert list(dict.fromkeys(moves)) == [(1, 2, 0), (2, 4, 0), (2, 4, 1)]


@pytest.mark.parametrize("only_on_replies", [False, True])
def test_a_progress_callback_that_fails_ends_the_run(only_on_replies: bool) -> None:
    def fail(progress: Progress) -> None:
        if progress.num_finished == 0 or not only_on_replies:
            raise KeyError("bar")

    agent = TwoTurns(before=lambda _: asyncio.sleep(0.001))
    with pytest.raises(KeyError, match="bar"):
        roll(agent, 20, concurrency=2, on_progress=fail)
    assert agent.active == 0
