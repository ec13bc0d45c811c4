"""Faults while groups are gathered, runs are stopped, engines die and weights change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.agent.chaos.chaos_cases import (
    Account,
    CoinJudge,
    chaos_agent,
    chaos_policy,
    chaos_prompts,
    run_skipping,
)
from tests.agent.chaos.fault_plan import FaultPlan, rates
from tests.agent.chaos.faults import FaultyEngine, FaultyEnvironment
from trajpack.agent.errors import EngineEndedError
from trajpack.agent.protocols import GenerationOutput, GenerationRequest, Prompt
from trajpack.agent.runner.policy import (
    GroupPolicy,
    RetryPolicy,
    RolloutPolicy,
    StalenessPolicy,
)
from trajpack.agent.runner.runner import EpisodeResult, RolloutRunner
from trajpack.packing.trajectory_log.log import TrajectoryLog

GROUP_SIZE = 4


class Stage:
    """An engine and an environment that go wrong, and a runner before them."""

    def __init__(self, account: Account, engine: FaultyEngine | None = None) -> None:
        self.account = account
        self.plan = account.plan
        self.engine = FaultyEngine(self.plan) if engine is None else engine

    def runner(self, **options: Any) -> RolloutRunner:
        judge = FaultyEnvironment(CoinJudge(), self.plan)
        options = {"concurrency": 24, "policy": self.account.policy} | options
        return RolloutRunner(self.engine, chaos_agent(), judge, observers=[self.account], **options)

    def take(self, result: EpisodeResult) -> None:
        self.account.take(result)
        self.plan.end(result.qid)


def chaos_plan(seed: int) -> FaultPlan:
    return FaultPlan(seed, rates("engine", 0.02), rates("environment", 0.02))


def foretold_rejection(account: Account, prompt: str) -> str | None:
    """Return why the group of a prompt must be rejected."""
    causes = [account.foretold(f"{prompt}@{k}")[1] for k in range(GROUP_SIZE)]
    if None not in causes:
        return "failed"
    is_whole = set(causes) == {None}
    return None if is_whole or account.policy.groups.incomplete == "keep" else "incomplete"


@pytest.mark.parametrize("incomplete", ["keep", "drop"])
def test_groups_become_what_the_rule_says_and_no_sample_is_lost(
    incomplete: Literal["keep", "drop"],
) -> None:
    groups, retries = GroupPolicy(incomplete), RetryPolicy(2, wait_initial_s=0.5)
    account = Account(chaos_plan(3), chaos_policy(groups=groups, retries=retries))
    stage = Stage(account)
    outcomes: dict[str, str | None] = {}

    async def body() -> None:
        async with stage.engine:
            runner = stage.runner(group_size=GROUP_SIZE)
            async for group in runner.run_groups(chaos_prompts(60)):
                assert group.prompt.id not in outcomes
                outcomes[group.prompt.id] = group.rejected
                assert [result.sample for result in group.results] == list(range(GROUP_SIZE))
                for result in group.results:
                    stage.take(result)

    run_skipping(body())
    assert outcomes == {f"q{k}": foretold_rejection(account, f"q{k}") for k in range(60)}
    assert account.num_doubled == 0
    assert account.misnamed == []
    assert len(set(outcomes.values())) == (2 if incomplete == "keep" else 3)


class Mortal(FaultyEngine):
    """Answers so many requests, and then none any more."""

    def __init__(self, plan: FaultPlan, num_left: int) -> None:
        super().__init__(plan)
        self.num_left = num_left

    async def answer(self, request: GenerationRequest, *place: int) -> GenerationOutput:
        self.num_left -= 1
        if self.num_left < 0:
            raise EngineEndedError(request.qid, "the process has died")
        return await super().answer(request, *place)


@pytest.mark.parametrize("end", ["drained", "cancelled", "dead"])
def test_a_run_that_ends_early_is_taken_up_where_its_log_ends(end: str, tmp_path: Path) -> None:
    asked = [f"q{k}@0" for k in range(250)]
    besides = frozenset({"cancelled", "ended"})

    async def roll_out(log: TrajectoryLog, stage: Stage, stop_after: int | None) -> None:
        async with stage.engine:
            runner = stage.runner(finished=log.finished)
            async for result in runner.run(chaos_prompts(250)):
                stage.take(result)
                error = None if result.error is None else str(result.error)
                log.append(result.qid, result.trajectories, error=error)
                if len(stage.account.seen) == stop_after:
                    runner.stop(drain=end == "drained")

    plan = chaos_plan(4)
    engine = Mortal(plan, 400 if end == "dead" else 10**6)
    first = Stage(Account(plan, besides=besides), engine)
    with TrajectoryLog.open(tmp_path) as log:
        run_skipping(roll_out(log, first, None if end == "dead" else 80))
        done = set(log.finished)
    account = first.account
    assert account.started <= set(account.seen) < set(asked)
    assert 50 < len(done) == account.num_accepted
    assert account.failed["ended" if end == "dead" else "cancelled"] > (end != "drained")

    second = Stage(Account(chaos_plan(4)))
    with TrajectoryLog.open(tmp_path) as log:
        run_skipping(roll_out(log, second, None))
    assert set(second.account.seen) == set(asked) - done
    assert account.num_doubled == second.account.num_doubled == 0
    assert account.misnamed == second.account.misnamed == []
    with TrajectoryLog.open(tmp_path, mode="read") as log:
        logged = [episode.episode for episode in log.replay()]
        assert sorted(logged) == sorted(asked)
        assert len(log.finished) == len(done) + second.account.num_accepted


@pytest.mark.parametrize("drain", [True, False])
def test_weights_change_in_the_midst_of_faults(drain: bool) -> None:
    batch, most = 16, 0
    staleness = StalenessPolicy(max_staleness=1, batch_size=batch, max_token_age=most)
    policy: RolloutPolicy = chaos_policy(staleness=staleness)
    # time limits go on in a pause, and one that drains lasts until the last lost reply is given up
    account = Account(chaos_plan(5), policy, besides=frozenset({"stale", "timeout"}))
    stage = Stage(account)
    is_quiet = False
    broken: list[str] = []

    def asked(qid: str) -> None:
        if is_quiet and drain:
            broken.append(qid)

    async def body() -> None:
        nonlocal is_quiet
        stage.engine.on_request = asked
        async with stage.engine:
            runner = stage.runner()
            gate = runner.staleness
            async for result in runner.run(chaos_prompts(400)):
                stage.take(result)
                for turn in result.turns:
                    is_empty = len(turn.completion_ids) == 0
                    assert is_empty or stage.engine.version - turn.version_start <= most
                assert gate.capacity(stage.engine.version) >= 0
                if result.error is None and account.num_accepted % batch == 0:
                    async with runner.paused(drain=drain):
                        is_quiet = True
                        await asyncio.sleep(5.0)
                        stage.engine.version += 1
                        is_quiet = False
            assert gate.num_running == 0

    run_skipping(body())
    assert len(account.seen) == 400
    assert account.num_doubled == 0
    assert account.misnamed == []
    assert broken == []
    assert account.failed["stale"] > 0
    assert stage.engine.version == account.num_accepted // batch > 15


def tickets() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("episode ")]


def test_whoever_kills_tasks_kills_only_those_episodes() -> None:
    """Tasks are killed wherever they are: asking, being judged, waiting for their next attempt."""
    account = Account(chaos_plan(6), besides=frozenset({"cancelled"}))
    stage = Stage(account)
    num_killed = 0

    async def kill() -> None:
        nonlocal num_killed
        while True:
            await asyncio.sleep(0.15)
            for victim in tickets()[:1]:
                num_killed += victim.cancel()

    async def body() -> None:
        async with stage.engine:
            killing = asyncio.create_task(kill())
            async for result in stage.runner().run(chaos_prompts(200)):
                stage.take(result)
                if len(account.seen) > 190:
                    killing.cancel()

    run_skipping(body())
    assert len(account.seen) == 200
    assert account.num_doubled == 0
    assert account.misnamed == []
    assert num_killed > 50
    assert account.num_accepted > 100
    assert account.failed["cancelled"] >= num_killed / 2


def test_a_task_that_is_killed_before_it_begins_is_a_failed_episode() -> None:
    def asked() -> Iterator[Prompt]:
        for prompt in chaos_prompts(8):
            yield prompt
            for task in tickets():
                task.cancel()

    async def body() -> None:
        stage = Stage(Account(FaultPlan(0)))
        async with stage.engine:
            results = [result async for result in stage.runner().run(asked())]
        causes = [result.error and result.error.cause for result in results]
        assert causes == ["cancelled"] * 8

    run_skipping(body())
