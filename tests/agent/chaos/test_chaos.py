"""Thousands of episodes while engine and environment do what they should not.

What must come of every episode follows from the seed, so nothing here depends on luck, nor on how
fast the machine is: time is skipped.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agent.chaos.chaos_cases import (
    Account,
    Beginnings,
    CoinJudge,
    chaos_agent,
    chaos_policy,
    chaos_prompts,
    run_skipping,
)
from tests.agent.chaos.fault_plan import CAUSES, FaultPlan, rates
from tests.agent.chaos.faults import FaultyEngine, FaultyEnvironment
from trajpack.agent.runner.runner import EpisodeResult, RolloutRunner
from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.trajectory_log.log import TrajectoryLog
from trajpack.testing import assert_batches_equal

PAGE = Path(__file__).parents[3] / "docs" / "rollouts.md"
SEED = 6
NUM_EPISODES = 2000
NUM_MORE = 1400
"""For the test of memory, after 500 that fill what is filled once."""
RATE = 0.02


def chaos_plan(seed: int = SEED) -> FaultPlan:
    return FaultPlan(seed, rates("engine", RATE), rates("environment", RATE))


async def roll_out(
    plan: FaultPlan,
    account: Account,
    num_episodes: int,
    take: Callable[[EpisodeResult], None],
    concurrency: int = 256,
) -> None:
    async with FaultyEngine(plan) as engine:
        judge = FaultyEnvironment(CoinJudge(), plan)
        runner = RolloutRunner(
            engine,
            chaos_agent(),
            judge,
            concurrency=concurrency,
            policy=account.policy,
            observers=[account],
        )
        async for result in runner.run(chaos_prompts(num_episodes)):
            take(result)
            plan.end(result.qid)


def figures(account: Account) -> str:
    """Return what a run came to, as the guide shows it."""
    plan, num_episodes = account.plan, len(account.seen)
    num_again = sum(account.tried_again.values())
    lines = [
        f"{num_episodes:,} episodes in {account.num_attempts:,} attempts, "
        f"{plan.counts.total():,} faults injected: {account.num_accepted:,} accepted, "
        f"{account.failed.total():,} failed, {num_again:,} attempts tried again, "
        f"{account.num_lost(qids(num_episodes))} lost, {account.num_doubled} doubled.",
        "",
        "| fault | of the engine | of the environment |",
        "|---|---|---|",
    ]
    for fault in dict.fromkeys([*CAUSES["engine"], *CAUSES["environment"]]):
        told = [
            f"{plan.counts[place, fault]:,} ({CAUSES[place][fault] or 'harmless'})"
            if fault in CAUSES[place]
            else ""
            for place in CAUSES
        ]
        lines.append(f"| {fault} | {told[0]} | {told[1]} |")
    lines += ["", "| cause | attempts tried again | episodes failed |", "|---|---|---|"]
    for cause in sorted({*account.failed, *account.tried_again}):
        again, failed = account.tried_again[cause], account.failed[cause]
        lines.append(f"| `{cause}` | {again:,} | {failed:,} |")
    return "\n".join(lines)


def qids(count: int) -> list[str]:
    return [f"{prompt.id}@0" for prompt in chaos_prompts(count)]


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_nothing_is_lost_and_nothing_is_doubled(tmp_path: Path, capsys: Any) -> None:
    plan = chaos_plan()
    account = Account(plan)
    buffer = TrajectoryBuffer()
    before = open_files(), set(threading.enumerate())

    def take(result: EpisodeResult) -> None:
        account.take(result)
        buffer.extend(result.trajectories)
        error = None if result.error is None else str(result.error)
        log.append(result.qid, result.trajectories, error=error)

    with TrajectoryLog.open(tmp_path, flush_episodes=300) as log:
        run_skipping(roll_out(plan, account, NUM_EPISODES, take))
    with capsys.disabled():
        sys.stdout.write(f"\n\n{figures(account)}\n")

    assert figures(account) in PAGE.read_text(), "the guide shows other figures"
    assert account.misnamed == []
    assert account.num_doubled == account.num_lost(qids(NUM_EPISODES)) == 0
    assert account.num_accepted + account.failed.total() == NUM_EPISODES
    assert set(account.failed) >= {"cancelled", "environment", "malformed", "timeout"}
    assert min(plan.counts[place, fault] for place in CAUSES for fault in CAUSES[place]) > 50
    with TrajectoryLog.open(tmp_path, mode="read") as log:
        logged = list(log.replay())
        replayed = TrajectoryBuffer()
        log.fill(replayed)
    assert Counter(episode.episode for episode in logged) == account.seen
    assert sum(episode.error is None for episode in logged) == account.num_accepted
    assert_batches_equal(replayed.pack(), buffer.pack())
    assert open_files() <= before[0]
    assert set(threading.enumerate()) <= before[1]


@pytest.mark.slow
@pytest.mark.attack
def test_thousands_of_episodes_at_once_survive_every_fault(tries: Callable[[int], int]) -> None:
    """Several seeds, 5,000 attempts in flight at the same time."""
    num_left, num_faults, seed = tries(52_000), 0, 100
    while num_left > 0:
        num_episodes = min(num_left, 13_000)
        plan = chaos_plan(seed)
        account = Account(plan)
        run_skipping(roll_out(plan, account, num_episodes, account.take, concurrency=5000))
        assert account.misnamed == [], seed
        assert account.num_doubled == account.num_lost(qids(num_episodes)) == 0, seed
        assert account.num_accepted + account.failed.total() == num_episodes, seed
        num_faults += sum(plan.counts["engine", fault] for fault in CAUSES["engine"])
        num_left -= num_episodes
        seed += 1
    assert num_faults >= tries(10_161)


def test_the_same_seed_gives_the_same_figures_in_any_company() -> None:
    def once(seed: int, concurrency: int) -> str:
        account = Account(chaos_plan(seed))
        run_skipping(roll_out(account.plan, account, 150, account.take, concurrency))
        assert account.misnamed == []
        return figures(account)

    first = once(1, 64)
    assert first == once(1, 7)
    assert first != once(2, 64)


@pytest.mark.slow
def test_memory_is_flat() -> None:
    """An episode that leaves anything behind leaves a block of memory at least.

    Blocks are what Python hands out for objects. While a run lasts, as many episodes are in flight
    now as were 600 episodes ago; after it nothing is left. A run keeps the name of each prompt.
    """
    plan = chaos_plan()
    before: list[int] = []
    during: list[int] = []
    after: list[int] = []

    def note(blocks: list[int]) -> None:
        gc.collect()
        blocks.append(sys.getallocatedblocks())

    async def body() -> None:
        options: Any = {"concurrency": 8, "group_size": 10, "observers": [Beginnings(plan)]}
        async with FaultyEngine(plan) as engine:
            judge = FaultyEnvironment(CoinJudge(), plan)
            runner = RolloutRunner(engine, chaos_agent(), judge, policy=chaos_policy(), **options)
            for num_episodes, ended in ((500, before), (NUM_MORE, after)):
                num_results = 0
                async for result in runner.run(chaos_prompts(num_episodes // 10)):
                    num_results += 1
                    plan.end(result.qid)
                    if ended is after and num_results % 50 == 0:
                        note(during)
                del result
                await asyncio.sleep(2 * plan.late_s)
                note(ended)

    run_skipping(body())
    early, late = during[2:14], during[14:26]
    growth = (sum(late) - sum(early)) / len(early)
    left = after[0] - before[0]
    assert growth < 0.5 * 50 * len(early)
    assert left < 0.1 * NUM_MORE
