"""Parts of the fault injector that chaos tests cannot see: times, late replies and the plan."""

from __future__ import annotations

import asyncio

import pytest

from tests.agent.chaos.chaos_cases import run_skipping
from tests.agent.chaos.fault_plan import Fault, FaultPlan
from tests.agent.chaos.faults import FaultyEngine
from trajpack.agent.protocols import GenerationRequest

WAIT_S = 1000.0


async def seconds_to_answer(fault: Fault) -> float | None:
    """Ask once; return after how many seconds the reply comes, if it does."""
    plan = FaultPlan(1, {fault: 1.0})
    began = asyncio.get_running_loop().time()
    async with FaultyEngine(plan) as engine:
        try:
            async with asyncio.timeout(WAIT_S):
                await engine.generate(GenerationRequest("q0@0", [1, 2], None))
        except TimeoutError:
            return None
    assert plan.counts == {("engine", fault): 1}
    return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize(
    ("fault", "seconds"), [(Fault.DELAY, 0.5), (Fault.LATE, 90.0), (Fault.DROP, None)]
)
def test_replies_that_are_late_or_never_come(fault: Fault, seconds: float | None) -> None:
    found = run_skipping(seconds_to_answer(fault))
    assert found == (None if seconds is None else pytest.approx(seconds))


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
