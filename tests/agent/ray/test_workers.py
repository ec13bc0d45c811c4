"""Rollout workers on a real cluster: nothing is lost, nothing comes twice, weights are current."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.agent.ray.ray_cases import (
    MakeScripted,
    NotingAgent,
    RightAnswers,
    ScriptedEngine,
    prompts,
)
from trajpack.agent.errors import has_engine_ended
from trajpack.agent.protocols import Prompt
from trajpack.agent.ray import (
    RolloutWorkers,
    Weights,
    WorkerLostError,
    WorkerOptions,
)
from trajpack.agent.ray.worker import RolloutWorker
from trajpack.agent.ray.workers import describe_exception, is_loss
from trajpack.agent.runner.runner import EpisodeResult
from trajpack.agent.servers.vllm import VLLMEngine

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
OPTIONS = WorkerOptions(concurrency=4, num_cpus=0.1, heartbeat_s=0.2, hang_timeout_s=3.0)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> MakeScripted:
    folder = tmp_path_factory.mktemp("workers")
    (folder / "notes").touch()
    return MakeScripted(folder / "notes", 0.15, folder / "stillborn", load_s=0.1)


@pytest.fixture(scope="module")
def loop(cluster: None) -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as loop:
        yield loop


@pytest.fixture(scope="module")
def workers(loop: asyncio.Runner, scripted: MakeScripted) -> Iterator[RolloutWorkers]:
    """Two workers for all tests: each takes seconds to start. One dies before it has."""
    workers = RolloutWorkers(scripted, 2, options=OPTIONS)
    loop.run(workers.__aenter__())
    assert workers.num_lost == 1
    yield workers
    loop.run(end_with_a_dead_one(workers))
    assert not workers.workers


async def end_with_a_dead_one(workers: RolloutWorkers) -> None:
    os.kill(workers.workers[0].pid, signal.SIGKILL)
    async with asyncio.timeout(900):
        await workers.__aexit__()


async def all_serving(workers: RolloutWorkers) -> list[int]:
    """Wait until both serve; return their processes."""
    async with asyncio.timeout(900):
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


@pytest.mark.slow
def test_a_worker_that_dies_loading_weights_costs_nothing_and_the_next_has_those_of_now(
    loop, workers, scripted
):
    asked: list[str] = []

    async def roll_out() -> tuple[list[EpisodeResult], int, set[int], int]:
        results: list[EpisodeResult] = []
        pids = await all_serving(workers)
        victim = pids[0]
        publishing: asyncio.Task[int] | None = None

        async def endless() -> AsyncIterator[Prompt]:
            while publishing is None or not publishing.done():
                asked.append(f"q{len(asked)}")
                yield Prompt(asked[-1], [len(asked), 2])

        async with aclosing(workers.runner(group_size=2).run(endless())) as stream:
            async for result in stream:
                results.append(result)
                ended = {result.qid for result in results}
                under_way = [q for q, pid in scripted.started() if pid == victim and q not in ended]
                if len(results) >= 20 and len(under_way) > 2 and publishing is None:
                    publishing = asyncio.create_task(publish_until_replaced(workers, victim))
        assert publishing is not None
        new = set(await all_serving(workers)) - set(pids)
        return results, victim, new, await publishing

    results, victim, new, version = loop.run(roll_out())
    assert sorted(r.qid for r in results) == sorted(f"{q}@{n}" for q in asked for n in (0, 1))
    for result in results:
        assert result.error is None
        (path,) = result.trajectories
        assert (path.id, path.group) == (result.qid, result.prompt.id)
        assert list(path.turns[0].prompt_ids) == list(result.prompt.input_ids)
        # The object store must not be kept from forgetting it.
        assert np.asarray(path.turns[0].prompt_ids).flags.writeable
    assert (workers.num_turns, workers.num_tokens) == (2 * len(results), 4 * len(results))
    began = scripted.started()
    redone = {qid for qid, count in Counter(qid for qid, _ in began).items() if count > 1}
    assert len(redone) <= workers.num_redone <= OPTIONS.concurrency
    assert redone <= {qid for qid, pid in began if pid == victim}
    assert workers.num_lost == 2
    served = {qid for qid, pid in began if pid in new}
    oldest = min(pair[1] for r in results if r.qid in served for pair in numbers(r))
    assert oldest >= version - 1, "it has served with weights from before its start"


async def publish_until_replaced(workers: RolloutWorkers, victim: int) -> int:
    """Publish weights that the victim dies of, and newer ones until another has its place."""
    weights = {"victim": torch.tensor(victim), "number": torch.tensor(101)}
    await workers.publish(Weights.of(weights, version=1))
    async with asyncio.timeout(900):
        while len(workers.workers) == 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # nothing tells of it
        while len(workers.workers) < 2:
            await workers.publish(number(101 + workers.version, workers.version + 1))
            await asyncio.sleep(0.3)
    return workers.version


def test_weights_reach_workers_that_serve_while_episodes_go_on(loop, workers):
    async def roll_out() -> tuple[list[EpisodeResult], int]:
        results = []
        await all_serving(workers)
        await workers.everywhere()
        version = workers.version
        with pytest.raises(ValueError, match=f"version must exceed {version}, got {version}"):
            await workers.publish(Weights.of({}, version))
        async with aclosing(workers.runner().run(prompts(100))) as stream:
            async for result in stream:
                results.append(result)
                if len(results) == 20:
                    await workers.publish(number(7, version + 5))
        await workers.everywhere()
        assert [worker.version for worker in workers.workers] == [version + 5] * 2
        return results, version

    results, version = loop.run(roll_out())
    seen = [pair for result in results for pair in numbers(result)]
    assert set(seen) == {(100 + version, version), (7, version + 5)}
    assert numbers(results[-1]) == [(7, version + 5)] * 2


def test_what_goes_wrong_in_an_episode_is_its_result(loop, workers):
    async def roll_out() -> list[EpisodeResult]:
        asked = [Prompt("bad", [1]), *prompts(2)]
        return [result async for result in workers.runner().run(asked)]

    results = {result.qid: result for result in loop.run(roll_out())}
    assert str(results["bad@0"].error) == "episode 'bad@0': KeyError: 'no such thing'"
    assert results["q0@0"].error is results["q1@0"].error is None


def test_a_termination_cancels_the_episodes_on_their_workers_as_an_interrupt_does(
    loop, workers, scripted
):
    endless = [Prompt(f"endless{k}", [1]) for k in range(2)]

    async def roll_out() -> None:
        async with aclosing(workers.runner().run([*endless, *prompts(1)])) as stream:
            await anext(stream)
            os.kill(os.getpid(), signal.SIGTERM)
            await anext(stream)

    async def go_on() -> list[EpisodeResult]:
        async with asyncio.timeout(900):
            ended = {("endless0@0", 0), ("endless1@0", 0)}
            while not ended <= set(scripted.started()):  # noqa: ASYNC110 - on other processes
                await asyncio.sleep(0.02)
        return [result async for result in workers.runner().run(prompts(20))]

    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "it would end the tests"
    with pytest.raises(KeyboardInterrupt):
        loop.run(roll_out())
    assert len(loop.run(go_on())) == 20


def test_a_cluster_that_is_too_small_is_named_at_once_and_not_waited_for_for_ever(
    loop, scripted, caplog
):
    async def start() -> None:
        options = replace(OPTIONS, num_cpus=1000, start_timeout_s=0.5)
        room = "ask for 2000 CPUs, of which the cluster has 2 "
        with pytest.raises(WorkerLostError, match=f"within 0.5 s; 2 rollout workers {room}"):
            await RolloutWorkers(scripted, 2, options=options).__aenter__()
        assert f"waiting for a larger cluster: 2 rollout workers {room}" in caplog.text

    loop.run(start())


def test_a_worker_is_lost_whatever_ray_says_of_its_end_but_not_by_what_it_raised():
    from ray import exceptions

    assert is_loss(exceptions.ActorDiedError())
    assert is_loss(exceptions.OutOfMemoryError("the node is short of memory"))
    assert is_loss(exceptions.NodeDiedError("the node is gone"))
    raised = exceptions.RayTaskError("start", "a long traceback", KeyError("x"))
    assert not is_loss(raised.as_instanceof_cause())
    assert describe_exception(raised.as_instanceof_cause()) == "KeyError: 'x'"


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
        paths = tuple(reply.trajectories())
        assert paths[0].group == "q0"
        return numbers(EpisodeResult(Prompt("q0", [1]), paths))

    assert loop.run(roll_out()) == expected


@pytest.mark.slow
def test_a_worker_that_hangs_is_given_up_and_its_episodes_are_redone(loop, workers):
    async def roll_out() -> list[EpisodeResult]:
        results = []
        victim = (await all_serving(workers))[0]
        async with aclosing(workers.runner().run(prompts(60))) as stream:
            async for result in stream:
                results.append(result)
                if len(results) == 10:
                    os.kill(victim, signal.SIGSTOP)
        async with asyncio.timeout(900):
            while Path(f"/proc/{victim}").exists():  # noqa: ASYNC110, ASYNC240 - it is killed
                await asyncio.sleep(0.05)
        return results

    num_lost, num_redone = workers.num_lost, workers.num_redone
    results = loop.run(roll_out())
    assert sorted(result.qid for result in results) == sorted(f"q{k}@0" for k in range(60))
    assert all(result.error is None for result in results)
    assert workers.num_lost == num_lost + 1
    assert workers.num_redone > num_redone


@pytest.mark.slow
def test_workers_that_nobody_keeps_any_more_end_the_run(
    loop: asyncio.Runner, tmp_path: Path
) -> None:
    async def body() -> list[EpisodeResult]:
        workers = RolloutWorkers(MakeScripted(tmp_path / "notes"), 1, options=OPTIONS)
        async with workers, asyncio.timeout(900):
            for keeper in workers._keepers:
                keeper.cancel()
            return [result async for result in workers.runner().run(prompts(2))]

    results = loop.run(body())
    assert results
    for result in results:
        assert has_engine_ended(result.error)
        assert "no rollout worker is left, the last was lost: the task that" in str(result.error)


class _Idle:
    """An engine that replies after half a minute."""

    def __init__(self, *, knows: bool) -> None:
        self.engine = ScriptedEngine(30.0)
        if knows:
            self.check_serving = VLLMEngine("http://127.0.0.1:9").check_serving

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def _worker(engine: _Idle, notes: Path) -> RolloutWorker:
    @asynccontextmanager
    async def make(number: int) -> AsyncIterator[Any]:
        async with engine.engine:
            yield engine, NotingAgent(notes), RightAnswers()

    return RolloutWorker(make, 0, OPTIONS)


def test_an_engine_that_a_worker_has_not_entered_is_an_error_at_its_start(tmp_path: Path) -> None:
    async def body() -> None:
        async with asyncio.timeout(900):
            await _worker(_Idle(knows=True), tmp_path / "notes").start(None)

    with pytest.raises(RuntimeError, match="this VLLMEngine has not been entered: use it within"):
        asyncio.run(body())
