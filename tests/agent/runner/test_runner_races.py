"""Failures, retries, old weights, slow readers and stops at the same time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from random import Random
from typing import Any

import pytest

from tests.agent.chaos.chaos_cases import run_skipping
from tests.agent.runner.runner_cases import EchoEngine, TwoTurns, prompts, runner
from trajpack.agent.errors import CAUSES, EpisodeError, ServerUnavailableError
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.agent.runner.policy import (
    GroupPolicy,
    RetryPolicy,
    RolloutPolicy,
    StalenessPolicy,
)
from trajpack.agent.runner.runner import EpisodeResult, GroupResult


def test_a_place_taken_as_the_run_stops_is_given_back_to_those_that_wait() -> None:
    """The reader makes room, which lets the next prompt in, and stops in the same breath."""
    fails = True

    async def once(prompt: Prompt) -> None:
        nonlocal fails
        if prompt.id == "q0@0" and fails:
            fails = False
            raise ServerUnavailableError(prompt.id, "not yet")

    async def body() -> list[str]:
        policy = RolloutPolicy(retries=RetryPolicy(2, wait_initial_s=0.02))
        async with EchoEngine() as engine, asyncio.timeout(60):
            run = runner(engine, TwoTurns(before=once), concurrency=1, policy=policy)
            async with aclosing(run.run(prompts(50))) as results:
                names = [(await anext(results)).qid]
                run.stop()
                return names + [result.qid async for result in results]

    assert asyncio.run(body()) == ["q1@0", "q0@0"]


class Counts(RolloutObserver):
    """Counts what it is told of each episode and group."""

    def __init__(self) -> None:
        self.begun: Counter[str] = Counter()
        self.over: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.groups: Counter[str] = Counter()

    def episode_started(self, qid: str, attempt: int) -> None:
        self.begun[qid] += 1

    def episode_ended(
        self, qid: str, attempt: int, error: Exception | None, *, final: bool
    ) -> None:
        self.over[qid] += final

    def result_accepted(self, result: EpisodeResult, version: int) -> None:
        self.accepted[result.qid] += 1

    def group_ended(self, prompt_id: str, results: Any, reason: str | None) -> None:
        self.groups[prompt_id] += 1


class Chance:
    """One rollout in which everything happens at random."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = Random(seed)
        self.by_group = draw.random() < 0.6
        self.counts = Counts()
        self.stops_after_s = draw.choice([None, 0.0, 0.003, 0.01])
        self.stops_at = draw.choice([None, 1, 3])
        self.drains = draw.random() < 0.5
        incomplete: Any = draw.choice(["keep", "drop"]) if self.by_group else "keep"
        age = draw.choice([None, 0, 1])
        self.options: dict[str, Any] = {
            "concurrency": draw.choice([1, 1, 2, 3, 8]),
            "group_size": draw.choice([1, 2, 4]),
            "observers": [self.counts],
            "policy": RolloutPolicy(
                retries=RetryPolicy(draw.choice([1, 3]), CAUSES, draw.choice([0, 0.002])),
                episode_timeout_s=0.02,
                staleness=StalenessPolicy(draw.choice([0, 3]), 2, age),
                groups=GroupPolicy(incomplete),
            ),
        }

    async def happen(self, prompt: Prompt) -> None:
        await asyncio.sleep(self.draw.choice([0, 0, 0.001, 0.003]))
        what = self.draw.random()
        if what < 0.1:
            raise ValueError("no")
        if what < 0.2:
            raise ServerUnavailableError(prompt.id, "no")
        if what < 0.25:
            await asyncio.sleep(1000)
        if what < 0.3:
            raise asyncio.CancelledError

    async def source(self) -> AsyncIterator[Prompt]:
        for prompt in prompts(12):
            await asyncio.sleep(self.draw.choice([0, 0, 0.001]))
            yield prompt

    async def roll_out(self) -> list[EpisodeResult | GroupResult]:
        found: list[EpisodeResult | GroupResult] = []
        async with EchoEngine() as engine, asyncio.timeout(60):
            run = runner(engine, TwoTurns(before=self.happen), **self.options)
            others = [asyncio.create_task(self.update(engine))]
            if self.stops_after_s is not None:
                others.append(asyncio.create_task(self.stop(run)))
            stream: Any = run.run_groups if self.by_group else run.run
            async with aclosing(stream(self.source())) as results:
                async for result in results:
                    found.append(result)
                    if len(found) == self.stops_at:
                        run.stop(drain=self.drains)
                    if self.draw.random() < 0.3:
                        await asyncio.sleep(self.draw.choice([0, 0.002, 0.006]))
            for other in others:
                other.cancel()
            await asyncio.wait(others)
            assert (engine.open, run.staleness.num_running) == ([], 0)
            assert len(asyncio.all_tasks()) == 1
        return found

    async def update(self, engine: EchoEngine) -> None:
        while True:
            await asyncio.sleep(0.004)
            engine.version += 1

    async def stop(self, run: Any) -> None:
        await asyncio.sleep(self.stops_after_s or 0)
        run.stop(drain=self.drains)


@pytest.mark.attack
def test_every_episode_that_began_gives_one_result_whatever_happens(
    tries: Callable[[int], int],
) -> None:
    num_results = 0
    for seed in range(tries(2_800)):
        try:
            num_results += check_chance(Chance(seed))
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert num_results >= tries(12_000)


def check_chance(chance: Chance) -> int:
    """Return the number of results."""
    found = run_skipping(chance.roll_out())
    results: list[EpisodeResult] = []
    for one in found:
        results += one.results if isinstance(one, GroupResult) else [one]
    names = Counter(result.qid for result in results)
    assert set(names.values()) <= {1}
    assert set(chance.counts.begun) <= set(names)
    assert all(chance.counts.over[qid] for qid in chance.counts.begun)
    accepted = [
        result.qid
        for one in found
        if not isinstance(one, GroupResult) or one.rejected is None
        for result in (one.results if isinstance(one, GroupResult) else [one])
        if result.error is None
    ]
    assert Counter(accepted) == chance.counts.accepted
    assert all(isinstance(r.error, EpisodeError) != bool(r.trajectories) for r in results)
    if chance.by_group:
        assert chance.counts.groups == Counter(one.prompt.id for one in found)
    if chance.stops_after_s is None and chance.stops_at is None:
        assert len(found) == 12 * (1 if chance.by_group else chance.options["group_size"])
    return len(results)
