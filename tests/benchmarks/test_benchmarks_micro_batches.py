"""The benchmark of micro-batches: everybody writes the same."""

import pytest

from benchmarks.contest import race
from benchmarks.packing import bench_micro_batches as bench
from benchmarks.workloads import MULTI_TURN, WORKLOADS


@pytest.mark.parametrize("workload", [WORKLOADS[2], MULTI_TURN])
@pytest.mark.parametrize("job", bench.MULTIPLES)
def test_everybody_writes_the_same_micro_batches(job, workload):
    entries = race(*bench.contest(job, workload, 0.01))
    assert [entry.contender for entry in entries if not entry.best] == []
    bench.inputs.cache_clear()


def test_a_micro_batch_that_differs_is_found():
    contest, entrants = bench.contest(bench.PLAIN, MULTI_TURN, 0.01)
    micro_batches = entrants[0].work()
    contest.check(micro_batches)
    micro_batches[-1]["position_ids"][-1] += 1
    with pytest.raises(AssertionError):
        contest.check(micro_batches)
    bench.inputs.cache_clear()
