"""Parts of the fault injector that chaos tests cannot see: times, late replies and the plan."""

from __future__ import annotations

import asyncio

import pytest

from tests.agent.chaos.chaos_cases import MarkingEngine, run_skipping
from tests.agent.chaos.fault_plan import Fault, FaultPlan
from tests.agent.chaos.faults import FaultyEngine
from trajpack.agent.protocols import Reply

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


def test_a_plan_is_decided_by_its_seed_and_keeps_to_its_rates() -> None:
    one, same, other = (FaultPlan(seed, dict.fromkeys(Fault, 0.02)) for seed in (1, 1, 2))
    names = [(f"q{k}@0", attempt, 0) for k in range(2000) for attempt in range(2)]
    drawn = [one.engine_fault(*name) for name in names]
    assert drawn == [same.engine_fault(*name) for name in names]
    assert drawn != [other.engine_fault(*name) for name in names]
    for fault in Fault:
        assert 50 < drawn.count(fault) < 110


def test_nothing_to_wait_for_is_told_in_skipped_time() -> None:
    with pytest.raises(RuntimeError, match="everything waits"):
        run_skipping(asyncio.Event().wait(), patience_s=0.05)
