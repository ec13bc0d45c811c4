from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from typing import Any

import pytest

from tests.agent.runner.runner_cases import (
    EchoEngine,
    TwoTurns,
    failing,
    prompts,
    roll_groups,
    runner,
    serve,
    take,
    until,
)
from trajpack.agent.errors import EpisodeCancelledError
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.policy import (
    GroupPolicy,
    RetryPolicy,
    RolloutPolicy,
    StalenessPolicy,
)
from trajpack.agent.runner.runner import GroupResult, Progress
from trajpack.packing.types import Trajectory


def rules(incomplete: Any = "keep", **options: Any) -> RolloutPolicy:
    return RolloutPolicy(groups=GroupPolicy(incomplete, **options))


def by_prompt(groups: list[GroupResult]) -> dict[str, GroupResult]:
    return {group.prompt.id: group for group in groups}


@pytest.mark.parametrize("concurrency", [1, 2, 64])
def test_groups_come_whole_and_in_the_order_of_their_samples(concurrency: int) -> None:
    async def wait(prompt: Prompt) -> None:
        await asyncio.sleep(0.001 * (int(prompt.id[-1]) * 5 % 4))

    agent = TwoTurns(before=wait)
    options = {"group_size": 4, "concurrency": concurrency}
    groups = roll_groups(agent, prompts(5), **options)
    assert Counter(group.prompt.id for group in groups) == Counter(f"q{k}" for k in range(5))
    for group in groups:
        name = group.prompt.id
        assert [result.qid for result in group.results] == [f"{name}@{k}" for k in range(4)]
        assert group.rejected is None
        assert [one.id for one in group.trajectories] == [f"{name}@{k}" for k in range(4)]
        assert {one.group for one in group.trajectories} == {name}


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_prompt_that_comes_again_has_other_samples_and_another_group(concurrency: int) -> None:
    agent = TwoTurns(before=lambda _: asyncio.sleep(0.01))
    asked = [prompts(1)[0], *prompts(2), prompts(1)[0]]
    groups = roll_groups(agent, asked, group_size=2, concurrency=concurrency)
    found = {(r.qid, r.trajectories[0].group) for group in groups for r in group.results}
    assert found == {
        *((f"q0@{n * 2 + k}", f"q0#{n}" if n else "q0") for n in range(3) for k in (0, 1)),
        *((f"q1@{k}", "q1") for k in (0, 1)),
    }


@pytest.mark.parametrize(
    ("incomplete", "rejected", "num_good"), [("keep", None, 2), ("drop", "incomplete", 2)]
)
def test_a_group_with_a_failure_is_kept_or_dropped(
    incomplete: str, rejected: str | None, num_good: int
) -> None:
    agent = failing("q0@1", "q2@0", "q2@1", "q2@2")
    found = by_prompt(roll_groups(agent, prompts(3), group_size=3, policy=rules(incomplete)))
    assert {name: group.rejected for name, group in found.items()} == {
        "q0": rejected,
        "q1": None,
        "q2": "failed",
    }
    assert [result.error is None for result in found["q0"].results] == [True, False, True]
    assert len(found["q0"].trajectories) == num_good
    assert found["q2"].trajectories == ()


def test_filters_reject_whole_groups_by_what_did_not_fail() -> None:
    asked: list[int] = []

    def count(results: Any) -> str | None:
        asked.append(len(results))
        return "picky" if results[0].prompt.id == "q1" else None

    policy = rules(filters=[count, lambda results: "never" if len(results) == 3 else None])
    agent = failing("q0@1")
    found = roll_groups(agent, prompts(3), group_size=3, policy=policy)
    assert {name: group.rejected for name, group in by_prompt(found).items()} == {
        "q0": None,
        "q1": "filtered: picky",
        "q2": "filtered: never",
    }
    assert sorted(asked) == [2, 3, 3]
    assert all(len(group.results) == 3 for group in found)


def test_a_filter_that_fails_ends_the_run() -> None:
    def broken(results: Any) -> str | None:
        raise KeyError("filter")

    agent = TwoTurns(before=lambda _: asyncio.sleep(0.001))
    with pytest.raises(KeyError, match="filter"):
        roll_groups(agent, 9, policy=rules(filters=[broken]))
    assert agent.active == 0


def test_a_run_of_episodes_refuses_rules_for_groups() -> None:
    with pytest.raises(ValueError, match="rules for groups, which run does not look at"):
        asyncio.run(take(runner(EchoEngine(), TwoTurns(), policy=rules("drop")).run([]), 1))


def test_rejected_groups_do_not_count_for_staleness() -> None:
    async def body(engine: EchoEngine) -> list[str | None]:
        policy = RolloutPolicy(
            groups=GroupPolicy("drop"), staleness=StalenessPolicy(0, 2, num_accepted=0)
        )
        run = runner(engine, failing("q0@1", "q2@0"), group_size=2, policy=policy)
        async with aclosing(run.run_groups(prompts(50))) as groups:
            found = [group.rejected for group in await take(groups, 4)]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(groups), 0.15)
            assert len(engine.opened) == 6
            return found

    assert Counter(serve(body)) == {None: 2, "incomplete": 2}


def test_a_member_that_went_stale_has_failed() -> None:
    async def body(engine: EchoEngine) -> GroupResult:
        class Later(TwoTurns):
            async def run(self, *values: Any) -> list[Trajectory]:
                if values[0].id == "q0@1":
                    await until(lambda: "q0@0" in engine.opened and not engine.open)
                    engine.version = 2
                return await super().run(*values)

        retries, staleness = RetryPolicy(3), StalenessPolicy(9, 9, max_token_age=1)
        policy = RolloutPolicy(retries, staleness=staleness)
        run = runner(engine, Later(), group_size=2, policy=policy, on_progress=seen.append)
        (group,) = await take(run.run_groups(prompts(1)))
        return group

    seen: list[Progress] = []
    group = serve(body)
    causes = [result.error and result.error.cause for result in group.results]
    assert causes == ["stale", None]
    assert [result.attempts for result in group.results] == [1, 1]
    assert (seen[-1].num_finished, seen[-1].num_failed) == (2, 1)


def test_groups_that_were_finished_before_are_not_begun() -> None:
    engine = EchoEngine()
    finished = ["q0@0", "q0@1", "q1@1"]
    groups = roll_groups(TwoTurns(), 3, engine=engine, group_size=2, finished=finished)
    assert sorted(group.prompt.id for group in groups) == ["q1", "q2"]
    assert sorted(engine.opened) == ["q1@0", "q1@1", "q2@0", "q2@1"]


@pytest.mark.parametrize(("drain", "incomplete"), [(True, "drop"), (False, "keep"), (True, "keep")])
def test_a_group_that_was_cut_short_is_yielded_with_its_results(
    drain: bool, incomplete: str
) -> None:
    async def body(engine: EchoEngine) -> list[GroupResult]:
        async def wait(prompt: Prompt) -> None:
            if prompt.id == "q1@0":
                run.stop(drain=drain)
                await asyncio.sleep(0.01)

        options: Any = {"group_size": 3, "concurrency": 1, "policy": rules(incomplete)}
        run = runner(engine, TwoTurns(before=wait), **options)
        return await take(run.run_groups(prompts(3)))

    whole, cut = serve(body)
    assert (whole.prompt.id, whole.rejected, len(whole.results)) == ("q0", None, 3)
    assert cut.prompt.id == "q1"
    kinds = [type(result.error) for result in cut.results]
    assert kinds == [type(None) if drain else EpisodeCancelledError, *[EpisodeCancelledError] * 2]
    expected = {(True, "drop"): "incomplete", (True, "keep"): None, (False, "keep"): "failed"}
    assert cut.rejected == expected[drain, incomplete]
