"""The contests of planning: every way plans, and what is wrong is found."""

import numpy as np
import pytest

from benchmarks.contest import OURS, race
from benchmarks.packing import plan_job, plan_loops
from benchmarks.packing.bench_plan import hold_all

COUNT = 300


@pytest.mark.parametrize("mix", plan_job.MIXES)
@pytest.mark.parametrize("make", [plan_job.fewest_contest, plan_job.even_contest])
def test_every_way_of_planning_passes_or_is_missing(mix, make):
    noted = {}
    for entry in race(*make(mix, COUNT, noted, rounds=1)):
        assert entry.best or "not installed" in entry.note, entry
        assert entry.contender in noted or not entry.best
    assert noted[OURS]


def test_what_each_way_made_of_each_size_is_written_down():
    kept = []
    records = hold_all(kept.append, plan_job.fewest_contest, "code", (60, 120), rounds=1)
    assert kept == records
    lengths = plan_job.code(120)
    for record in records:
        for entry in record["entries"]:
            if entry["best_ms"]:
                few, many = entry["wrote"].split(" / ")
                assert 0 < int(few) < int(many)
                assert int(many) >= lengths.sum() / plan_job.CAPACITY


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([[0, 1], [1]], "each sequence once"),
        ([[0, 1]], "each sequence once"),
        ([[0, 1, 2]], "over the capacity"),
    ],
)
def test_a_wrong_plan_is_found(found, said, monkeypatch):
    monkeypatch.setitem(plan_job.MIXES, "three", lambda count: np.array([20_000] * 3))
    contest, _ = plan_job.fewest_contest("three", 3, {})
    with pytest.raises(AssertionError, match=said):
        contest.check(found)
    contest.check([[0], [1], [2]])


def test_the_loops_are_the_rules_they_are_named_after():
    lengths, capacity = [5, 3, 4, 2, 6], 10
    for way in (plan_loops.first_fit_by_scan, plan_loops.best_fit_by_tree):
        bins = way(lengths, capacity)
        assert sorted(map(sorted, bins)) == [[0, 1, 3], [2, 4]]
    bins = plan_loops.fewest_held_by_scan(lengths, capacity)
    assert sorted(map(sorted, bins)) == [[0, 2], [1, 4], [3]]
    bins = plan_loops.differencing_by_rows([8, 7, 6, 5, 4], 3)
    assert sorted(sum([8, 7, 6, 5, 4][one] for one in held) for held in bins) == [8, 11, 11]
    bins = plan_loops.longest_first_by_heap([4, 5, 6, 7, 8], 2)
    assert sorted(sum([4, 5, 6, 7, 8][one] for one in held) for held in bins) == [13, 17]
