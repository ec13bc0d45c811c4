from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from typing import Any

import pytest

from tests.agent.runner.runner_cases import (
    EchoEngine,
    TwoTurns,
    collect_groups,
    prompts,
    runner,
    until,
)
from trajpack.agent.errors import EpisodeCancelledError
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.policy import (
    BackOff,
    GroupPolicy,
    RetryPolicy,
    RolloutPolicy,
    StalenessPolicy,
    not_all_equal,
    success_rate_between,
)
from trajpack.agent.runner.runner import EpisodeResult, GroupResult, Progress
from trajpack.packing.types import Trajectory, Turn


def rules(incomplete: Any = "keep", **options: Any) -> RolloutPolicy:
    return RolloutPolicy(groups=GroupPolicy(incomplete, **options))


class Failing(TwoTurns):
    """Fails in the episodes that it is given."""

    def __init__(self, *qids: str) -> None:
        super().__init__(before=self.fail)
        self.qids = qids
        self.begun: list[str] = []

    async def fail(self, prompt: Prompt) -> None:
        self.begun.append(prompt.id)
        if prompt.id in self.qids:
            raise ValueError("no")


def by_prompt(groups: list[GroupResult]) -> dict[str, GroupResult]:
    return {group.prompt.id: group for group in groups}


@pytest.mark.parametrize("concurrency", [1, 2, 64])
def test_groups_come_whole_and_in_the_order_of_their_samples(concurrency: int) -> None:
    async def wait(prompt: Prompt) -> None:
        await asyncio.sleep(0.001 * (int(prompt.id[-1]) * 5 % 4))

    agent = TwoTurns(before=wait)
    options = {"group_size": 4, "concurrency": concurrency}
    groups = asyncio.run(collect_groups(agent, prompts(5), **options))
    assert Counter(group.prompt.id for group in groups) == Counter(f"q{k}" for k in range(5))
    for group in groups:
        name = group.prompt.id
        assert [result.qid for result in group.results] == [f"{name}@{k}" for k in range(4)]
        assert group.rejected is None
        assert [one.id for one in group.trajectories] == [f"{name}@{k}" for k in range(4)]
        assert {one.group for one in group.trajectories} == {name}


def test_a_prompt_may_come_again_while_its_group_is_under_way() -> None:
    async def wait(prompt: Prompt) -> None:
        await asyncio.sleep(0.01)

    asked = [prompts(1)[0], *prompts(2)]
    options = {"group_size": 2, "concurrency": 2}
    groups = asyncio.run(collect_groups(TwoTurns(before=wait), asked, **options))
    assert sorted(group.prompt.id for group in groups) == ["q0", "q0", "q1"]
    assert all(len(group.results) == 2 for group in groups)


@pytest.mark.parametrize(
    ("incomplete", "rejected", "num_good"), [("keep", None, 2), ("drop", "incomplete", 2)]
)
def test_a_group_with_a_failure_is_kept_or_dropped(
    incomplete: str, rejected: str | None, num_good: int
) -> None:
    agent = Failing("q0@1", "q2@0", "q2@1", "q2@2")
    found = by_prompt(
        asyncio.run(collect_groups(agent, prompts(3), group_size=3, policy=rules(incomplete)))
    )
    assert {name: group.rejected for name, group in found.items()} == {
        "q0": rejected,
        "q1": None,
        "q2": "failed",
    }
    assert [result.error is None for result in found["q0"].results] == [True, False, True]
    assert len(found["q0"].trajectories) == num_good
    assert found["q2"].trajectories == ()


def test_failures_are_replaced_by_further_samples() -> None:
    agent = Failing("q0@1", "q0@3", "q0@2")
    found = asyncio.run(collect_groups(agent, prompts(2), group_size=3, policy=rules("refill")))
    group = by_prompt(found)["q0"]
    assert [result.sample for result in group.results] == [0, 1, 2, 3, 4, 5]
    assert [result.error is None for result in group.results] == [True, *[False] * 3, *[True] * 2]
    assert group.rejected is None
    assert max(Counter(agent.begun).values()) == 1
    assert len(by_prompt(found)["q1"].results) == 3


def test_a_group_that_needs_too_many_samples_is_given_up() -> None:
    agent = Failing(*(f"q0@{k}" for k in range(1, 9)))
    policy = rules("refill", max_refills=3)
    (group,) = asyncio.run(collect_groups(agent, prompts(1), group_size=2, policy=policy))
    assert (group.rejected, len(group.results)) == ("incomplete", 5)


def scored(*rewards: float) -> list[EpisodeResult]:
    return [
        EpisodeResult(
            Prompt("q", [1]), (Trajectory("t", [Turn([1], [2], [-1.0], one)]),), None, sample
        )
        for sample, one in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [((1, 1, 1), "all_equal"), ((1, 0, 1), None), ((1,), None), ((0, 0), "all_equal"), ((), None)],
)
def test_groups_without_a_difference_are_told(rewards: Any, expected: str | None) -> None:
    assert not_all_equal(scored(*rewards)) == expected


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((0, 0, 0, 0), "too_hard"),
        ((1, 0, 0, 0), None),
        ((1, 1, 1, 0), None),
        ((1, 1, 1, 1), "too_easy"),
        ((), None),
    ],
)
def test_groups_outside_of_the_bounds_are_told(rewards: Any, expected: str | None) -> None:
    assert success_rate_between(0.25, 0.75)(scored(*rewards)) == expected
    odd = success_rate_between(0.0, 0.5, succeeded=lambda result: result.sample % 2 == 1)
    assert odd(scored(*rewards)) is None


def test_success_is_a_reward_in_the_last_turn() -> None:
    turns = [Turn([1], [2], [-1.0], reward) for reward in (1.0, -1.0)]
    result = EpisodeResult(Prompt("q", [1]), (Trajectory("t", turns),))
    empty = EpisodeResult(Prompt("q", [1]), ())
    assert success_rate_between(0.5, 1.0)([result]) == "too_hard"
    assert success_rate_between(0.5, 1.0)([empty]) == "too_hard"


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.4), (-0.1, 1), (0, 1.1), (float("nan"), 1)])
def test_bounds_that_make_no_sense_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="expected 0 <= low <= high <= 1"):
        success_rate_between(low, high)


def test_filters_reject_whole_groups_by_what_did_not_fail() -> None:
    asked: list[int] = []

    def count(results: Any) -> str | None:
        asked.append(len(results))
        return "picky" if results[0].prompt.id == "q1" else None

    policy = rules(filters=[count, lambda results: "never" if len(results) == 3 else None])
    agent = Failing("q0@1")
    found = asyncio.run(collect_groups(agent, prompts(3), group_size=3, policy=policy))
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
        asyncio.run(collect_groups(agent, prompts(9), policy=rules(filters=[broken])))
    assert agent.active == 0


def test_a_run_of_episodes_refuses_rules_for_groups() -> None:
    async def body() -> None:
        async with EchoEngine() as engine:
            await anext(runner(engine, TwoTurns(), policy=rules("drop")).run(prompts(1)))

    with pytest.raises(ValueError, match="rules for groups, which run does not look at"):
        asyncio.run(body())


def test_rejected_groups_do_not_count_for_staleness() -> None:
    async def body() -> list[str | None]:
        policy = RolloutPolicy(
            groups=GroupPolicy("drop"), staleness=StalenessPolicy(0, 2, num_accepted=0)
        )
        async with EchoEngine() as engine:
            agent = Failing("q0@1", "q2@0")
            run = runner(engine, agent, group_size=2, policy=policy)
            async with aclosing(run.run_groups(prompts(50))) as groups:
                async with asyncio.timeout(5):
                    found = [(await anext(groups)).rejected for _ in range(4)]
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(groups), 0.15)
                assert len(agent.begun) == 8
                return found

    assert Counter(asyncio.run(body())) == {None: 2, "incomplete": 2}


@pytest.mark.parametrize(("attempts", "stale", "tried"), [(2, None, [2, 1]), (1, "stale", [1, 1])])
def test_a_member_that_went_stale_is_rolled_out_again(
    attempts: int, stale: str | None, tried: list[int]
) -> None:
    class Later(TwoTurns):
        async def collect_trajectory(self, *values: Any) -> list[Trajectory]:
            found = await super().collect_trajectory(*values)
            if values[0].id == "q0@1":
                await until(lambda: bool(seen) and seen[-1].num_finished == 1)
                if engine.version == 0:
                    engine.version = 2
                    return await super().collect_trajectory(*values)
            return found

    async def body() -> GroupResult:
        nonlocal engine
        policy = RolloutPolicy(
            retries=RetryPolicy(attempts, wait=BackOff(0.0)),
            staleness=StalenessPolicy(9, 9, max_token_age=1),
        )
        async with EchoEngine() as engine:
            options: Any = {"group_size": 2, "policy": policy, "on_progress": seen.append}
            run = runner(engine, Later(), **options)
            (group,) = [group async for group in run.run_groups(prompts(1))]
            return group

    engine: Any = None
    seen: list[Progress] = []
    group = asyncio.run(body())
    causes = [result.error and result.error.cause for result in group.results]
    assert causes == [stale, None]
    assert [result.attempts for result in group.results] == tried
    assert (seen[-1].num_finished, seen[-1].num_started) == (2, 2)


def test_groups_that_were_finished_before_are_not_begun() -> None:
    finished = ["q0@0", "q0@1", "q1@1", "q2@0", "q2@5"]
    agent = Failing()
    options: Any = {"group_size": 2, "finished": finished}
    groups = asyncio.run(collect_groups(agent, prompts(4), **options))
    assert sorted(group.prompt.id for group in groups) == ["q1", "q3"]
    assert sorted(agent.begun) == ["q1@0", "q1@1", "q3@0", "q3@1"]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"incomplete": "mend"}, ValueError, "incomplete must be one of .* got 'mend'"),
        ({"max_refills": -1}, ValueError, "max_refills must be 0 or more"),
        ({"filters": ["all"]}, TypeError, "a filter must be callable, got str"),
    ],
)
def test_rules_that_make_no_sense_are_refused(options: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        GroupPolicy(**options)


def cut_rules(incomplete: Any = "keep") -> RolloutPolicy:
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
            options: Any = {"group_size": 3, "concurrency": 1, "policy": cut_rules(incomplete)}
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
            options: Any = {"group_size": 3, "concurrency": 1, "policy": cut_rules("drop")}
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
            run = runner(engine, TwoTurns(before=fail), concurrency=1, policy=cut_rules("refill"))
            return [group async for group in run.run_groups(prompts(3))]

    run: Any = None
    (group,) = asyncio.run(body())
    assert (group.rejected, len(group.results)) == ("failed", 1)
