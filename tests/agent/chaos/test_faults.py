"""The fault injector does what it says: each fault on its own, and none where there is none."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from tests.agent.chaos.chaos_cases import CoinJudge, MarkingEngine, marked_ids, run_skipping
from tests.agent.chaos.fault_plan import CAUSES, Fault, FaultPlan
from tests.agent.chaos.faults import FaultyEngine, FaultyEnvironment
from trajpack.agent.errors import GenerationError, ServerUnavailableError
from trajpack.agent.protocols import GenerationOutput, Reply
from trajpack.packing.conversion import as_ids

WAIT_S = 1000.0


async def replies(fault: Fault | None, count: int) -> list[tuple[float, Reply]]:
    """Ask once for each of ``count`` episodes; return all that comes, and after how long."""
    plan = FaultPlan(1, {} if fault is None else {fault: 1.0})
    found: list[tuple[float, Reply]] = []
    loop = asyncio.get_running_loop()
    async with FaultyEngine(MarkingEngine(), plan) as engine:
        for number in range(count):
            qid, began = f"q{number}@0", loop.time()
            queue = engine.open_episode(qid)
            await engine.obs_queue.put((qid, [1, 2], None))
            try:
                while True:
                    reply = await asyncio.wait_for(queue.get(), WAIT_S)
                    found.append((loop.time() - began, reply))
            except TimeoutError:
                engine.close_episode(qid)
    assert plan.counts == ({} if fault is None else {("engine", fault): count})
    return found


def outputs(fault: Fault | None, count: int = 20) -> list[GenerationOutput]:
    found = run_skipping(replies(fault, count))
    assert all(isinstance(reply, GenerationOutput) for _, reply in found)
    return [reply for _, reply in found if isinstance(reply, GenerationOutput)]


def test_without_a_fault_replies_are_the_engine_s() -> None:
    found = outputs(None, 3)
    assert [list(one.output_ids) for one in found] == [
        marked_ids(f"q{k}@0", 0, 0) for k in range(3)
    ]


@pytest.mark.parametrize(
    ("fault", "times"), [(Fault.DELAY, [0.5]), (Fault.LATE, [90.0]), (Fault.DROP, [])]
)
def test_replies_that_are_late_or_never_come(fault: Fault, times: list[float]) -> None:
    assert [seconds for seconds, _ in run_skipping(replies(fault, 1))] == pytest.approx(times)


def test_a_late_reply_comes_when_its_episode_is_over_and_nobody_gets_it() -> None:
    async def body() -> None:
        plan = FaultPlan(1, {Fault.LATE: 1.0})
        async with FaultyEngine(MarkingEngine(), plan) as engine:
            first = engine.open_episode("q0@0")
            await engine.obs_queue.put(("q0@0", [1], None))
            await asyncio.sleep(1)
            engine.close_episode("q0@0")
            second = engine.open_episode("q0@0")
            await asyncio.sleep(WAIT_S)
            assert (first.qsize(), second.qsize()) == (1, 0)

    run_skipping(body())


def test_replies_that_are_not_what_they_should_be() -> None:
    doubled = outputs(Fault.DUPLICATE, 2)
    assert [one.qid for one in doubled] == ["q0@0", "q0@0", "q1@0", "q1@0"]
    short = outputs(Fault.TRUNCATE)
    assert all(len(one.output_ids) == len(one.output_logprobs) < 6 for one in short)
    assert {one.no_eos for one in short} == {True, False}
    lengths = {
        len(one.output_logprobs) - len(one.output_ids) for one in outputs(Fault.WRONG_LENGTH)
    }
    assert lengths == {1, -1}
    assert all(not all(map(math.isfinite, one.output_logprobs)) for one in outputs(Fault.NAN))
    for one in outputs(Fault.UNKNOWN_ID):
        with pytest.raises((TypeError, ValueError)):
            as_ids("output_ids", one.output_ids)
    assert {one.qid for one in outputs(Fault.STRAY, 1)} == {"q0@00"}


@pytest.mark.parametrize(
    ("fault", "kind"), [(Fault.EXCEPTION, GenerationError), (Fault.KILL, ServerUnavailableError)]
)
def test_errors_in_place_of_replies(fault: Fault, kind: type[GenerationError]) -> None:
    ((_, reply),) = run_skipping(replies(fault, 1))
    assert type(reply) is kind


async def judged(fault: Fault) -> Any:
    environment = FaultyEnvironment(CoinJudge(), FaultPlan(1, {}, {fault: 1.0}))
    _, rewards, *_ = await asyncio.wait_for(environment.step(("q0@0", ["4"])), WAIT_S)
    return rewards


def test_judgements_that_go_wrong() -> None:
    assert len(run_skipping(judged(Fault.WRONG_LENGTH))) == 2
    assert math.isnan(run_skipping(judged(Fault.NAN))[0])
    for fault, kind in {
        Fault.DROP: TimeoutError,
        Fault.EXCEPTION: RuntimeError,
        Fault.KILL: BrokenPipeError,
        Fault.CANCEL: asyncio.CancelledError,
    }.items():
        with pytest.raises(kind):
            run_skipping(judged(fault))


def test_a_plan_is_decided_by_its_seed_and_keeps_to_its_rates() -> None:
    one, same, other = (FaultPlan(seed, dict.fromkeys(Fault, 0.02)) for seed in (1, 1, 2))
    names = [(f"q{k}@0", attempt, 0) for k in range(2000) for attempt in range(2)]
    drawn = [one.engine_fault(*name) for name in names]
    assert drawn == [same.engine_fault(*name) for name in names]
    assert drawn != [other.engine_fault(*name) for name in names]
    for fault in Fault:
        assert 50 < drawn.count(fault) < 110


def test_what_comes_after_a_duplicate_is_spared() -> None:
    plan = FaultPlan(1, {Fault.DUPLICATE: 1.0})
    assert plan.engine_fault("q0@0", 0, 0) is Fault.DUPLICATE
    assert plan.engine_fault("q0@0", 0, 1) is None
    assert plan.cause("q0@0", 0, 1) is None
    assert plan.cause("q0@0", 0, 2) == "malformed" == CAUSES["engine"][Fault.DUPLICATE]


def test_nothing_to_wait_for_is_told_in_skipped_time() -> None:
    with pytest.raises(RuntimeError, match="everything waits"):
        run_skipping(asyncio.Event().wait(), patience_s=0.05)
