"""Rollout workers on a real cluster: nothing is lost, nothing comes twice, weights are current."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.agent.ray.ray_cases import MakeScripted, prompts, reward_of
from trajpack.agent.errors import has_engine_ended
from trajpack.agent.protocols import Prompt, SamplingParams
from trajpack.agent.ray import RolloutWorkers, Weights, WorkerOptions
from trajpack.agent.runner.results import EpisodeResult

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
OPTIONS = WorkerOptions(concurrency=4, num_cpus=0.1, hang_timeout_s=3.0)
LIMIT_S = 900
_LOADS = count()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> MakeScripted:
    folder = tmp_path_factory.mktemp("workers")
    (folder / "notes").touch()
    return MakeScripted(folder / "notes", 0.05, load_s=0.1)


@pytest.fixture(scope="module")
def loop(cluster: Any) -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as loop:
        yield loop


@pytest.fixture(scope="module")
def workers(loop: asyncio.Runner, scripted: MakeScripted) -> Iterator[RolloutWorkers]:
    """Two workers for all tests: each takes seconds to start. One dies before it has."""
    stillborn = replace(scripted, stillborn=scripted.notes.with_name("stillborn"))
    workers = RolloutWorkers(stillborn, 2, options=OPTIONS)
    loop.run(workers.__aenter__())
    assert workers.num_lost == 1
    yield workers
    loop.run(end_with_a_dead_one(workers))
    assert not workers.workers


async def end_with_a_dead_one(workers: RolloutWorkers) -> None:
    os.kill(workers.workers[0].pid, signal.SIGKILL)
    await workers.__aexit__()


async def until(is_so: Callable[[], Any]) -> None:
    """Wait for what happens in other processes."""
    async with asyncio.timeout(LIMIT_S):
        while not is_so():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.02)


def number(version: int, **others: int) -> Weights:
    state_dict = {"number": 100 + version} | others
    return Weights.of({name: torch.tensor(value) for name, value in state_dict.items()}, version)


def versions(result: EpisodeResult) -> list[int]:
    """Return the version of the weights in each turn; the tokens say that it was theirs."""
    for turn in result.turns:
        sampled, version, *_ = np.asarray(turn.completion_ids).tolist()
        assert sampled == 100 + version
        assert turn.version_start == turn.version_end == version
    return [turn.version_end for turn in result.turns]


class Load:
    """Rolls out prompts without end while something happens, and checks what comes."""

    def __init__(self, workers: RolloutWorkers, scripted: MakeScripted) -> None:
        self.workers, self.scripted, self.name = workers, scripted, f"load{next(_LOADS)}"
        self.asked: list[str] = []
        self.results: list[EpisodeResult] = []
        self.oldest: dict[int, int] = {}
        """The oldest weights that a worker which started meanwhile may have."""

    async def during(self, happening: Awaitable[None], *, at_least: int) -> None:
        """Roll out until it has happened, and at least so many episodes."""
        task = asyncio.ensure_future(happening)

        async def endless() -> AsyncIterator[Prompt]:
            while not task.done() or len(self.asked) < at_least // 2:
                self.asked.append(f"{self.name}-{len(self.asked)}")
                yield Prompt(self.asked[-1], [len(self.asked), 2])

        async with aclosing(self.workers.runner(group_size=2).run(endless())) as stream:
            async for result in stream:
                self.results.append(result)
        await task
        self.check()

    async def replaced(self, kill: Callable[[], Awaitable[None]]) -> None:
        """Lose workers under load, publish weights meanwhile, and wait for others."""
        workers = self.workers
        before, num_results = {worker.pid for worker in workers.workers}, len(self.results)
        await until(lambda: len(self.results) > num_results + 10)
        await kill()
        version = workers.version
        await until(lambda: not before <= {worker.pid for worker in workers.workers})
        await workers.publish(number(workers.version + 1))
        await until(lambda: len(workers.workers) == workers.num_workers)
        await workers.publish(number(workers.version + 1))
        for pid in {worker.pid for worker in workers.workers} - before:
            self.oldest[pid] = version

    def check(self) -> None:
        """Assert that each episode came once, whole, with weights that its worker may have had."""
        names = [f"{name}@{sample}" for name in self.asked for sample in (0, 1)]
        assert sorted(result.qid for result in self.results) == sorted(names)
        last = dict(self.scripted.started())
        for result in self.results:
            assert result.error is None
            (path,) = result.trajectories
            assert (path.id, path.group, path.truncated) == (result.qid, result.prompt.id, True)
            assert list(path.turns[0].prompt_ids) == list(result.prompt.input_ids)
            # The object store must not be kept from forgetting it.
            assert np.asarray(path.turns[0].prompt_ids).flags.writeable
            assert {turn.reward for turn in path.turns} == {reward_of(result.prompt.id)}
            assert {turn.stop_reason for turn in path.turns} == {"tool"}
            assert min(versions(result)) >= self.oldest.get(last[result.qid], 0)
        starts = Counter(qid for qid, _ in self.scripted.started() if qid in set(names))
        num_redone = sum(starts.values()) - len(names)
        assert num_redone <= self.workers.num_redone


def test_a_worker_that_dies_under_load_costs_nothing(loop, workers, scripted):
    load = Load(workers, scripted)
    num_lost = workers.num_lost

    async def die_while_loading() -> None:
        victim = workers.workers[0].pid
        await workers.publish(number(workers.version + 1, victim=victim))
        await until(lambda: workers.num_lost > num_lost)

    loop.run(load.during(load.replaced(die_while_loading), at_least=200))
    assert workers.num_lost == num_lost + 1
    assert load.oldest


@pytest.mark.slow
@pytest.mark.attack
def test_losses_of_workers_and_nodes_under_load_cost_nothing(loop, cluster, scripted, tries):
    rng = random.Random(7)

    def add_node() -> None:  # from the main thread only
        cluster.add_node(num_cpus=2, object_store_memory=80 << 20)

    async def storm(load: Load) -> None:
        async def kill() -> None:
            for victim in rng.sample(load.workers.workers, rng.choice([1, 1, 3])):
                os.kill(victim.pid, signal.SIGKILL)

        async def change_nodes() -> None:
            (node,) = cluster.worker_nodes
            await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
            add_node()

        for number in range(tries(60)):
            await load.replaced(change_nodes if number % 3 == 1 else kill)

    async def roll_out() -> None:
        options = replace(OPTIONS, num_cpus=0.8)
        async with RolloutWorkers(scripted, 3, options=options) as workers:
            raylets = {psutil.Process(worker.pid).ppid() for worker in workers.workers}
            assert len(raylets) == 2
            load = Load(workers, scripted)
            await load.during(storm(load), at_least=400)
            assert workers.num_lost >= 3
            assert workers.num_redone

    add_node()
    try:
        loop.run(roll_out())
    finally:
        cluster.remove_node(*cluster.worker_nodes)


PROGRAM = """
import asyncio, pathlib, sys
from tests.agent.ray.ray_cases import MakeScripted
from trajpack.agent.protocols import Prompt
from trajpack.agent.ray import RolloutWorkers, WorkerOptions, local_cluster

async def main():
    make = MakeScripted(pathlib.Path(sys.argv[1]))
    async with RolloutWorkers(make, 1, options=WorkerOptions(num_cpus=0.1)) as workers:
        async for _ in workers.runner().run([Prompt("endless", [1])]):
            pass

with local_cluster(num_cpus=1, object_store_bytes=80 << 20):
    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("is_own", "end"), [(False, signal.SIGKILL), (True, signal.SIGINT)])
def test_workers_end_with_their_program(cluster, tmp_path, is_own, end):
    """A program uses the cluster that is named to it, or starts its own."""
    make = MakeScripted(tmp_path / "notes")
    make.notes.touch()
    named = {"RAY_ADDRESS": "local"} if is_own else {}
    command = [sys.executable, "-c", PROGRAM, str(make.notes)]
    with subprocess.Popen(command, env=os.environ | named) as child:
        try:
            asyncio.run(until(make.started))
            child.send_signal(end)
            child.wait(LIMIT_S)
        except BaseException:
            child.kill()
            raise
    ((name, pid),) = make.started()[:1]
    asyncio.run(until(lambda: not Path(f"/proc/{pid}").exists()))
    assert make.started()[1:] == ([(name, 0)] if is_own else [])


@pytest.mark.slow
def test_a_worker_that_hangs_is_given_up_and_its_episodes_are_redone(loop, workers, scripted):
    load = Load(workers, scripted)
    victim = workers.workers[0].pid

    async def hang() -> None:
        os.kill(victim, signal.SIGSTOP)
        await until(lambda: not Path(f"/proc/{victim}").exists())

    num_redone = workers.num_redone
    loop.run(load.during(load.replaced(hang), at_least=100))
    assert workers.num_redone > num_redone


def test_weights_reach_workers_that_serve_while_episodes_go_on(loop, workers):
    async def roll_out() -> tuple[list[EpisodeResult], int]:
        results, version = [], workers.version
        await until(lambda: {worker.version for worker in workers.workers} == {version})
        with pytest.raises(ValueError, match=f"version must exceed {version}, got {version}"):
            await workers.publish(number(version))
        async with aclosing(workers.runner().run(prompts(100))) as stream:
            async for result in stream:
                results.append(result)
                if len(results) == 20:
                    await workers.publish(number(version + 5))
        await until(lambda: [worker.version for worker in workers.workers] == [version + 5] * 2)
        return results, version

    results, version = loop.run(roll_out())
    assert {one for result in results for one in versions(result)} == {version, version + 5}
    assert versions(results[-1]) == [version + 5] * 2


def test_an_episode_on_a_worker_is_that_of_the_runner(loop, workers):
    """Its error is its result; names, groups and sampling are the runner's."""

    async def roll_out() -> list[EpisodeResult]:
        rolling = workers.runner(sampling=SamplingParams(max_new_tokens=9))
        asked = [Prompt("bad", [1]), Prompt("q", [1, 2]), Prompt("q", [3])]
        return [result async for result in rolling.run(asked)]

    results = {result.qid: result for result in loop.run(roll_out())}
    assert str(results["bad@0"].error) == "episode 'bad@0': KeyError: 'no such thing'"
    groups = [path.group for qid in ("q@0", "q@1") for path in results[qid].trajectories]
    assert groups == ["q", "q#1"]
    for turn in results["q@1"].turns:
        assert list(turn.completion_ids)[2] == 9
        assert turn.reward == reward_of("q")


def test_leaving_a_run_cancels_its_episodes_on_the_workers(loop, workers, scripted):
    async def roll_out() -> list[EpisodeResult]:
        asked = [Prompt("endless", [1]), *prompts(1)]
        async with aclosing(workers.runner(group_size=2).run(asked)) as stream:
            await anext(stream)
        await until(lambda: {("endless@0", 0), ("endless@1", 0)} <= set(scripted.started()))
        return [result async for result in workers.runner().run(prompts(20))]

    assert len(loop.run(roll_out())) == 20


@pytest.mark.slow
def test_an_engine_that_ends_again_and_again_ends_the_run(loop, scripted, monkeypatch):
    monkeypatch.setattr("trajpack.agent.ray.workers._MAX_FAILURES", 2)

    async def roll_out() -> list[EpisodeResult]:
        async with RolloutWorkers(scripted, 1, options=OPTIONS) as workers:
            results = [result async for result in workers.runner().run([Prompt("deadly", [1])])]
            assert (workers.num_lost, workers.num_redone) == (2, 1)
            return results

    (result,) = loop.run(roll_out())
    assert has_engine_ended(result.error)
    expected = "no rollout worker is left, the last was lost: WorkerLostError: out of memory"
    assert expected in str(result.error)


def test_a_cluster_that_is_too_small_is_named_at_once_and_not_waited_for_for_ever(
    loop, scripted, caplog
):
    async def start() -> None:
        options = replace(OPTIONS, num_cpus=1000, start_timeout_s=0.5)
        with pytest.raises(TimeoutError, match=r"worker gave no answer within 0\.5 s"):
            await RolloutWorkers(scripted, 2, options=options).__aenter__()
        assert "larger cluster: the workers ask for 2000 CPUs, the cluster has 2" in caplog.text

    loop.run(start())
