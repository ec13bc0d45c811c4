from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import Any

import pytest

from tests.agent.runner.runner_cases import EchoEngine, TwoTurns, collect, prompts, runner, until
from trajpack.agent.errors import GenerationError, StaleEpisodeError
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.policy import (
    BackOff,
    RetryPolicy,
    RolloutPolicy,
    StalenessGate,
    StalenessPolicy,
    oldest_version,
)
from trajpack.agent.runner.runner import EpisodeResult, RolloutRunner
from trajpack.packing.types import Trajectory, Turn


def fresh(max_staleness: int, batch_size: int, **options: Any) -> RolloutPolicy:
    return RolloutPolicy(staleness=StalenessPolicy(max_staleness, batch_size, **options))


def test_capacity_is_what_later_versions_leave() -> None:
    gate = StalenessGate(StalenessPolicy(max_staleness=1, batch_size=4, num_accepted=0))
    assert [gate.capacity(version) for version in (0, 1, 2)] == [8, 12, 16]
    for _ in range(5):
        gate.begin(0)
    gate.accept()
    gate.accept()
    gate.give_back()
    assert (gate.num_accepted, gate.num_running, gate.capacity(0)) == (2, 2, 4)


@pytest.mark.parametrize(("num_accepted", "capacity"), [(None, 4), (6, 10), (13, 3)])
def test_a_run_that_goes_on_counts_what_was_accepted_before(
    num_accepted: int | None, capacity: int
) -> None:
    policy = StalenessPolicy(max_staleness=0, batch_size=4, num_accepted=num_accepted)
    assert StalenessGate(policy).capacity(version=3) == capacity


async def take(results: Any, count: int) -> list[EpisodeResult]:
    async with asyncio.timeout(5):
        return [await anext(results) for _ in range(count)]


async def stays(results: Any, seconds: float = 0.15) -> asyncio.Task[EpisodeResult]:
    """Assert that no result comes for a while, and return the task that waits for one."""
    waiting = asyncio.create_task(anext(results))
    done, _ = await asyncio.wait({waiting}, timeout=seconds)
    assert not done
    return waiting


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_no_more_episodes_begin_than_the_weights_allow(max_staleness: int) -> None:
    async def body() -> None:
        async with EchoEngine() as engine:
            run = runner(engine, TwoTurns(), concurrency=5, policy=fresh(max_staleness, 3))
            async with aclosing(run.run(prompts(100))) as results:
                for version in range(3):
                    await take(results, 3 * (max_staleness + 1) if not version else 2)
                    waiting = await stays(results)
                    assert len(engine.opened) == 3 * (max_staleness + version + 1)
                    engine.version += 1  # nobody tells the runner
                    await asyncio.wait({waiting}, timeout=5)
                    assert waiting.result().error is None

    asyncio.run(body())


def test_results_that_nobody_took_count_as_under_way() -> None:
    async def body() -> None:
        async with EchoEngine() as engine:
            run = runner(engine, TwoTurns(), policy=fresh(0, 4))
            async with aclosing(run.run(prompts(100))) as results:
                await take(results, 1)
                await asyncio.sleep(0.1)
                assert len(engine.opened) == 4
                gate = run.staleness
                assert gate is not None
                assert (gate.num_accepted, gate.num_running) == (1, 3)
            assert (gate.num_accepted, gate.num_running) == (1, 0)

    asyncio.run(body())


def test_what_failed_gives_its_place_to_another() -> None:
    async def fail(prompt: Prompt) -> None:
        if prompt.id in ("q0@0", "q2@0", "q3@0"):
            raise ValueError("no")

    async def body() -> list[EpisodeResult]:
        async with EchoEngine() as engine:
            agent = TwoTurns(before=fail)
            async with aclosing(
                runner(engine, agent, policy=fresh(0, 4)).run(prompts(100))
            ) as results:
                found = await take(results, 7)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(results), 0.1)
                return found

    found = asyncio.run(body())
    assert sum(result.error is None for result in found) == 4


def test_a_paused_runner_looks_for_new_weights_when_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trajpack.agent.runner.run._VERSION_INTERVAL_S", 60)

    async def body() -> None:
        async with EchoEngine() as engine:
            run = runner(engine, TwoTurns(), policy=fresh(0, 1))
            async with aclosing(run.run(prompts(9))) as results:
                for version in range(3):
                    await take(results, 1)
                    await asyncio.sleep(0.01)  # until it has seen that no more may begin
                    async with run.paused(drain=True):
                        engine.version = version + 1

    asyncio.run(body())


def test_the_bound_holds_at_every_moment_of_an_unruly_rollout() -> None:
    drawn = random.Random(7)

    class Unruly(TwoTurns):
        async def collect_trajectory(self, *values: Any) -> list[Trajectory]:
            gate, version = run.staleness, engine.version
            assert gate is not None
            used = gate.num_accepted + gate.num_running
            excess.append(used - (1 + version + 1) * 5)
            for _ in range(drawn.randrange(5)):
                await asyncio.sleep(0)
            if drawn.random() < 0.3:
                raise GenerationError(values[0].id, "lost")
            return await super().collect_trajectory(*values)

    async def body() -> int:
        nonlocal run, engine
        retries = RetryPolicy(2, wait=BackOff(0.001))
        policy = RolloutPolicy(retries=retries, staleness=StalenessPolicy(1, 5))
        async with EchoEngine() as engine:
            run = runner(engine, Unruly(), concurrency=16, policy=policy)
            num_accepted = 0
            async for result in run.run(prompts(200)):
                num_accepted += result.error is None
                engine.version = num_accepted // 5
            assert run.staleness is not None
            assert (run.staleness.num_running, run.staleness.num_accepted) == (0, num_accepted)
        return num_accepted

    run: Any = None
    engine: Any = None
    excess: list[int] = []
    assert asyncio.run(body()) > 150
    assert max(excess) == 0  # reached, and never passed


def test_the_oldest_version_is_that_of_any_sampled_token() -> None:
    spans = [(3, 0, 1), (5, 1, 2)]
    mixed = Turn([1], [2, 3], [-1.0, -1.0], version_spans=spans)
    newer = Turn([1], [2], [-1.0], version_start=4, version_end=6)
    silent = Turn([1], [], [])
    assert oldest_version([Trajectory("a", [newer, silent]), Trajectory("b", [mixed])]) == 3
    assert oldest_version([Trajectory("a", [newer])]) == 4
    assert oldest_version([Trajectory("a", [silent])]) is None


class Ages(TwoTurns):
    """New weights come while the first episode is under way, as often as it is told."""

    def __init__(self, engine: EchoEngine, times: int) -> None:
        super().__init__()
        self.engine, self.times = engine, times

    async def collect_trajectory(self, *values: Any) -> list[Trajectory]:
        found = await super().collect_trajectory(*values)
        if values[0].id == "q0@0" and self.times:
            self.times -= 1
            self.engine.version += 3
        return found


@pytest.mark.parametrize(
    ("max_token_age", "attempts", "expected"),
    [(3, 1, (None, 1)), (2, 1, (StaleEpisodeError, 1)), (2, 3, (None, 2)), (2, 9, (None, 2))],
)
def test_a_result_with_old_tokens_is_stale(
    max_token_age: int, attempts: int, expected: tuple[Any, int]
) -> None:
    async def body() -> EpisodeResult:
        staleness = StalenessPolicy(99, 99, max_token_age=max_token_age)
        retries = RetryPolicy(attempts, wait=BackOff(0.0))
        policy = RolloutPolicy(retries=retries, staleness=staleness)
        async with EchoEngine() as engine:
            run = runner(engine, Ages(engine, 1), policy=policy)
            (result,) = [result async for result in run.run(prompts(1))]
            assert run.staleness is not None
            assert run.staleness.num_running == 0
            return result

    result = asyncio.run(body())
    kind, attempt = expected
    assert type(result.error) is (kind or type(None))
    assert (result.attempts, bool(result.trajectories)) == (attempt, kind is None)
    if kind:
        assert "a token is of version 0, 3 behind the engine's; at most 2" in str(result.error)


def test_results_that_were_stale_make_no_room_for_more() -> None:
    async def body() -> int:
        retries = RetryPolicy(9, wait=BackOff(0.0))
        policy = RolloutPolicy(retries=retries, staleness=StalenessPolicy(99, 99, max_token_age=1))
        async with EchoEngine() as engine:
            run = runner(engine, Ages(engine, 5), concurrency=1, policy=policy)
            async with aclosing(run.run(prompts(100))) as results:
                await take(results, 6)
                await asyncio.sleep(0.05)
                return len(set(engine.opened))

    # Six taken, and two that run or wait.
    assert asyncio.run(body()) == 8


def test_age_is_measured_when_a_result_is_taken() -> None:
    async def body() -> list[EpisodeResult]:
        policy = RolloutPolicy(staleness=StalenessPolicy(9, 9, max_token_age=1))
        async with EchoEngine() as engine:
            run: RolloutRunner = runner(engine, TwoTurns(), policy=policy)
            async with aclosing(run.run(prompts(4))) as results:
                found = await take(results, 1)
                await until(lambda: len(engine.opened) == 4 and not engine.open)
                engine.version = 2
                return found + await take(results, 3)

    first, *rest = asyncio.run(body())
    assert first.error is None
    assert {type(result.error) for result in rest} == {StaleEpisodeError}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_staleness": -1}, "max_staleness must be at least 0, got -1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_token_age": -1}, "max_token_age must be at least 0"),
        ({"num_accepted": -1}, "num_accepted must be at least 0"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StalenessPolicy(**({"max_staleness": 0, "batch_size": 1} | options))
    with pytest.raises(TypeError, match="batch_size must be an integer"):
        StalenessPolicy(0, 1.5)  # type: ignore[arg-type]


def test_without_a_bound_nothing_is_counted() -> None:
    results = asyncio.run(collect(TwoTurns(), prompts(3)))
    assert [result.error for result in results] == [None] * 3
