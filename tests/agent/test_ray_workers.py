"""Rollout workers on a real cluster: nothing is lost, nothing comes twice, weights are current."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.agent.ray_cases import MakeScripted, cluster, prompts  # noqa: F401
from trajpack.agent.protocols import Prompt
from trajpack.agent.ray import RolloutWorkers, Weights, WorkerOptions
from trajpack.agent.ray_worker import RolloutWorker
from trajpack.agent.runner import EpisodeResult

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
OPTIONS = WorkerOptions(concurrency=4, heartbeat_s=0.2, hang_timeout_s=3.0)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> MakeScripted:
    notes = tmp_path_factory.mktemp("workers") / "notes"
    notes.touch()
    return MakeScripted(notes, delay_s=0.03)


@pytest.fixture(scope="module")
def loop(cluster) -> Iterator[asyncio.Runner]:  # noqa: F811
    with asyncio.Runner() as loop:
        yield loop


@pytest.fixture(scope="module")
def workers(loop: asyncio.Runner, scripted: MakeScripted) -> Iterator[RolloutWorkers]:
    """Two workers for all tests: each takes seconds to start."""
    workers = loop.run(enter(RolloutWorkers(scripted, 2, options=OPTIONS)))
    yield workers
    loop.run(workers.__aexit__())


async def enter(workers: RolloutWorkers) -> RolloutWorkers:
    return await workers.__aenter__()


async def all_serving(workers: RolloutWorkers) -> list[int]:
    """Wait until both serve; return their processes."""
    async with asyncio.timeout(60):
        while len(workers.workers) < 2:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.05)
    return [worker.pid for worker in workers.workers]


def number(value: int, version: int) -> Weights:
    return Weights.of({"number": torch.tensor(value)}, version)


def numbers(result: EpisodeResult) -> list[tuple[int, int]]:
    """Return what the engine's weights were in each turn: their number and their version."""
    return [
        (int(turn.completion_ids[0]), turn.version_end)
        for path in result.trajectories
        for turn in path.turns
    ]


def test_a_killed_worker_costs_no_accepted_episode_and_the_others_are_redone(
    loop, workers, scripted
):
    def begun_by(pid: int) -> set[str]:
        return {qid for qid, worker in scripted.started() if worker == pid}

    async def roll_out() -> tuple[list[EpisodeResult], int]:
        results, killed = [], set()
        victim = (await all_serving(workers))[0]
        async with aclosing(workers.runner(group_size=2).run(prompts(60))) as stream:
            async for result in stream:
                results.append(result)
                under_way = begun_by(victim) - {result.qid for result in results}
                if len(results) >= 20 and len(under_way) > 2 and not killed:
                    os.kill(victim, signal.SIGKILL)
                    killed = under_way
        assert victim not in await all_serving(workers)
        return results, victim

    results, victim = loop.run(roll_out())
    assert sorted(r.qid for r in results) == sorted(f"q{k}@{n}" for k in range(60) for n in (0, 1))
    for result in results:
        assert result.error is None
        assert result.trajectories[0].id == result.qid
        assert result.trajectories[0].group == result.prompt.id
        assert list(result.trajectories[0].turns[0].prompt_ids) == list(result.prompt.input_ids)
    began = scripted.started()
    redone = {qid for qid, count in Counter(qid for qid, _ in began).items() if count > 1}
    assert 1 <= len(redone) <= workers.num_redone <= OPTIONS.concurrency
    assert redone <= {qid for qid, pid in began if pid == victim}
    assert workers.num_lost == 1
    assert (workers.num_turns, workers.num_tokens) == (240, 480)


def test_weights_reach_workers_that_serve_while_episodes_go_on(loop, workers):
    async def roll_out() -> list[EpisodeResult]:
        results = []
        await all_serving(workers)
        with pytest.raises(ValueError, match="version must exceed 0, got 0"):
            await workers.publish(Weights.of({}, 0))
        async with aclosing(workers.runner().run(prompts(200))) as stream:
            async for result in stream:
                results.append(result)
                if len(results) == 20:
                    await workers.publish(number(105, version=5))
        await workers.everywhere()
        assert [worker.version for worker in workers.workers] == [5, 5]
        return results

    results = loop.run(roll_out())
    seen = [pair for result in results for pair in numbers(result)]
    assert set(seen) == {(100, 0), (105, 5)}
    assert numbers(results[-1]) == [(105, 5)] * 2


def test_a_restarted_worker_serves_with_the_weights_of_now(loop, workers):
    async def roll_out() -> list[EpisodeResult]:
        victims = await all_serving(workers)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        # Those that should take them are dead, and nobody waits for them here.
        for version in (6, 7):
            await workers.publish(number(100 + version, version))
        results = [result async for result in workers.runner().run(prompts(20))]
        assert not set(victims) & set(await all_serving(workers))
        assert [worker.version for worker in workers.workers] == [7, 7]
        return results

    results = loop.run(roll_out())
    assert len(results) == 20
    assert {pair for result in results for pair in numbers(result)} == {(107, 7)}


def test_what_goes_wrong_in_an_episode_is_its_result(loop, workers):
    async def roll_out() -> list[EpisodeResult]:
        asked = [Prompt("bad", [1]), *prompts(2)]
        return [result async for result in workers.runner().run(asked)]

    results = {result.qid: result for result in loop.run(roll_out())}
    assert str(results["bad@0"].error) == "episode 'bad@0': KeyError: 'no such thing'"
    assert results["q0@0"].error is results["q1@0"].error is None


def test_episodes_that_nobody_waits_for_are_cancelled_on_their_workers(loop, workers, scripted):
    endless = [Prompt(f"endless{k}", [1]) for k in range(2)]

    async def roll_out() -> list[EpisodeResult]:
        async with aclosing(workers.runner().run([*endless, *prompts(1)])) as stream:
            await anext(stream)
        async with asyncio.timeout(20):
            ended = {("endless0@0", 0), ("endless1@0", 0)}
            while not ended <= set(scripted.started()):  # noqa: ASYNC110 - on other processes
                await asyncio.sleep(0.02)
        return [result async for result in workers.runner().run(prompts(20))]

    assert len(loop.run(roll_out())) == 20


def test_a_worker_that_hangs_is_given_up_and_its_episodes_are_redone(loop, workers):
    async def roll_out() -> list[EpisodeResult]:
        results = []
        victim = (await all_serving(workers))[0]
        async with aclosing(workers.runner().run(prompts(60))) as stream:
            async for result in stream:
                results.append(result)
                if len(results) == 10:
                    os.kill(victim, signal.SIGSTOP)
        async with asyncio.timeout(20):
            while Path(f"/proc/{victim}").exists():  # noqa: ASYNC110, ASYNC240 - it is killed
                await asyncio.sleep(0.05)
        return results

    num_lost, num_redone = workers.num_lost, workers.num_redone
    results = loop.run(roll_out())
    assert sorted(result.qid for result in results) == sorted(f"q{k}@0" for k in range(60))
    assert all(result.error is None for result in results)
    assert workers.num_lost == num_lost + 1
    assert workers.num_redone > num_redone


@pytest.mark.parametrize(
    ("drain", "expected"), [(False, [(105, 5), (105, 5)]), (True, [(100, 0), (105, 5)])]
)
def test_weights_wait_for_the_requests_in_flight_where_the_engine_cannot(
    loop, tmp_path, drain, expected
):
    async def roll_out() -> list[tuple[int, int]]:
        options = replace(OPTIONS, drain=drain)
        worker = RolloutWorker(MakeScripted(tmp_path / "notes", delay_s=0.05), 0, options)
        await worker.start(None)
        episode = asyncio.ensure_future(worker.roll_out(Prompt("q0@0", [1])))
        while not (tmp_path / "notes").exists():  # noqa: ASYNC110 - it has asked then
            await asyncio.sleep(0)
        assert await worker.set_weights(number(105, version=5)) == 5
        reply = await episode
        await worker.stop()
        paths = tuple(reply.arrays.trajectories())
        assert paths[0].group == "q0"
        return numbers(EpisodeResult(Prompt("q0", [1]), paths))

    assert loop.run(roll_out()) == expected
