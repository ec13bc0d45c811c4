"""Policies: limits of values, staleness, and filters of groups."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import Any

import pytest

from tests.agent.runner.runner_cases import (
    EchoEngine,
    TwoTurns,
    prompts,
    runner,
    serve,
    take,
    until,
)
from trajpack.agent.errors import GenerationError, StaleEpisodeError
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.policy import (
    GroupPolicy,
    RetryPolicy,
    RolloutPolicy,
    StalenessGate,
    StalenessPolicy,
    not_all_equal,
    refuse_stale,
    success_rate_between,
)
from trajpack.agent.runner.runner import EpisodeResult
from trajpack.packing.types import Trajectory, Turn


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: RetryPolicy(0), ValueError, "max_attempts must be at least 1, got 0"),
        (lambda: RetryPolicy(2, ["luck"]), ValueError, r"causes must be among .* got \['luck'\]"),
        (lambda: RetryPolicy(2, "stale"), TypeError, "causes must be several, got 'stale'"),
        (lambda: RetryPolicy(wait_initial_s=-1.0), ValueError, "wait_initial_s must be at least 0"),
        (lambda: RetryPolicy(wait_initial_s="x"), TypeError, "wait_initial_s must be a number"),
        (lambda: RetryPolicy(wait_max_s=None), TypeError, "wait_max_s must be a number, got None"),
        (lambda: RetryPolicy(wait_max_s=float("nan")), ValueError, "wait_max_s must be at least"),
        (lambda: RolloutPolicy(episode_timeout_s=0), ValueError, "episode_timeout_s must be pos"),
        (lambda: RolloutPolicy(silence_warning_s=0), ValueError, "silence_warning_s must be pos"),
        (lambda: StalenessPolicy(-1, 1), ValueError, "max_staleness must be at least 0, got -1"),
        (lambda: StalenessPolicy(0, 0), ValueError, "batch_size must be at least 1, got 0"),
        (lambda: StalenessPolicy(0, 1.5), TypeError, "batch_size must be an integer"),  # type: ignore[arg-type]
        (lambda: StalenessPolicy(0, 1, -1), ValueError, "max_token_age must be at least 0"),
        (lambda: StalenessPolicy(0, 1, None, -1), ValueError, "num_accepted must be at least 0"),
        (lambda: RolloutPolicy(RetryPolicy), TypeError, "retries must be a RetryPolicy, got type"),  # type: ignore[arg-type]
        (lambda: RolloutPolicy(staleness=0), TypeError, "staleness must be a StalenessPolicy"),  # type: ignore[arg-type]
        (lambda: GroupPolicy("mend"), ValueError, "incomplete must be 'keep' or .* got 'mend'"),  # type: ignore[arg-type]
        (lambda: GroupPolicy(filters=["all"]), TypeError, "a filter must be callable, got str"),  # type: ignore[list-item]
        (lambda: success_rate_between(0.5, 0.4), ValueError, "expected 0 <= low <= high <= 1"),
        (lambda: success_rate_between(-0.1, 1), ValueError, "expected 0 <= low <= high <= 1"),
        (lambda: success_rate_between(float("nan"), 1), ValueError, "expected 0 <= low <= high"),
    ],
)
def test_values_out_of_range_are_refused(make: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


# filters of groups


def scored(*rewards: float) -> list[EpisodeResult]:
    return [
        EpisodeResult(
            Prompt("q", [1]), (Trajectory("t", [Turn([1], [2], [-1.0], one)]),), None, sample
        )
        for sample, one in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("rewards", "difference", "rate"),
    [
        ((1, 1, 1, 1), "all_equal", "too_easy"),
        ((0, 0, 0, 0), "all_equal", "too_hard"),
        ((1, 0, 0, 0), None, None),
        ((1, 1, 1, 0), None, None),
        ((1,), None, "too_easy"),
    ],
)
def test_filters_tell_why_a_group_is_of_no_use(
    rewards: Any, difference: str | None, rate: str | None
) -> None:
    assert not_all_equal(scored(*rewards)) == difference
    assert success_rate_between(0.25, 0.75)(scored(*rewards)) == rate
    turns = [Turn([1], [2], [-1.0], reward) for reward in (1.0, -1.0)]  # the last one counts
    result = EpisodeResult(Prompt("q", [1]), (Trajectory("t", turns),))
    for failed in (result, EpisodeResult(result.prompt, ())):
        assert success_rate_between(0.5, 1.0)([failed]) == "too_hard"


# staleness


def fresh(max_staleness: int, batch_size: int, **options: Any) -> RolloutPolicy:
    retries = RetryPolicy(options.pop("attempts", 1), wait_initial_s=0.0)
    staleness = StalenessPolicy(max_staleness, batch_size, **options)
    return RolloutPolicy(retries=retries, staleness=staleness)


def test_capacity_is_what_later_versions_leave() -> None:
    gate = StalenessGate(StalenessPolicy(max_staleness=1, batch_size=4, num_accepted=0))
    assert [gate.capacity(version) for version in (0, 1, 2)] == [8, 12, 16]
    gate.num_running += 5
    for is_accepted in (True, True, False):
        gate.end(is_accepted=is_accepted)
    assert (gate.num_accepted, gate.num_running, gate.capacity(0)) == (2, 2, 4)


@pytest.mark.parametrize(("num_accepted", "capacity"), [(None, 4), (6, 10), (13, 3)])
def test_a_run_that_goes_on_counts_what_was_accepted_before(
    num_accepted: int | None, capacity: int
) -> None:
    policy = StalenessPolicy(max_staleness=0, batch_size=4, num_accepted=num_accepted)
    assert StalenessGate(policy).capacity(version=3) == capacity


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_no_more_episodes_begin_than_the_weights_allow(max_staleness: int) -> None:
    async def body(engine: EchoEngine) -> None:
        run = runner(engine, TwoTurns(), concurrency=5, policy=fresh(max_staleness, 3))
        async with aclosing(run.run(prompts(100))) as results:
            for version in range(3):
                await take(results, 3 * (max_staleness + 1) if not version else 2)
                waiting = asyncio.create_task(anext(results))
                done, _ = await asyncio.wait({waiting}, timeout=0.15)
                assert not done
                assert len(engine.opened) == 3 * (max_staleness + version + 1)
                engine.version += 1  # nobody tells the runner
                await asyncio.wait({waiting}, timeout=5)
                assert waiting.result().error is None

    serve(body)


def test_the_bound_holds_at_every_moment_of_an_unruly_rollout() -> None:
    drawn = random.Random(7)
    excess: list[int] = []

    async def body(engine: EchoEngine) -> int:
        async def before(prompt: Prompt) -> None:
            excess.append(gate.num_accepted + gate.num_running - (1 + engine.version + 1) * 5)
            for _ in range(drawn.randrange(5)):
                await asyncio.sleep(0)
            if drawn.random() < 0.3:
                raise GenerationError(prompt.id, "lost")

        retries = RetryPolicy(2, wait_initial_s=0.001)
        policy = RolloutPolicy(retries=retries, staleness=StalenessPolicy(1, 5))
        run = runner(engine, TwoTurns(before=before), concurrency=16, policy=policy)
        gate = run.staleness
        num_accepted = 0
        async for result in run.run(prompts(200)):
            num_accepted += result.error is None
            engine.version = num_accepted // 5
        assert (gate.num_running, gate.num_accepted) == (0, num_accepted)
        return num_accepted

    assert serve(body) > 150
    assert max(excess) == 0  # reached, and never passed


def test_the_oldest_token_decides() -> None:
    spans = [(3, 0, 1), (5, 1, 2)]
    mixed = Turn([1], [2, 3], [-1.0, -1.0], version_spans=spans)
    newer = Turn([1], [2], [-1.0], version_start=4, version_end=6)
    silent = Turn([1], [], [])
    policy = StalenessPolicy(9, 9, max_token_age=2)
    for turns, oldest in (([newer, silent, mixed], 3), ([newer], 4), ([silent], None)):
        result = EpisodeResult(Prompt("q", [1]), (Trajectory("t", turns),))
        error = refuse_stale(result, policy, version=7).error
        assert (error is None) == (oldest is None)
        assert error is None or f"a token is of version {oldest}," in str(error)


def test_age_is_measured_when_a_result_is_taken() -> None:
    async def body(engine: EchoEngine) -> list[EpisodeResult]:
        run = runner(engine, TwoTurns(), policy=fresh(9, 9, max_token_age=1))
        async with aclosing(run.run(prompts(4))) as results:
            found = await take(results, 1)
            await until(lambda: len(engine.opened) == 4 and not engine.open)
            engine.version = 2
            return found + await take(results, 3)

    first, *rest = serve(body)
    assert first.error is None
    assert {type(result.error) for result in rest} == {StaleEpisodeError}
