"""The whole job of packing: trajectories in, all ten fields of the turns layout out.

Every way is given the same trajectories, with arrays in them or with plain lists, and its
result is compared with the reference, `by_lists`, before anything is timed.
"""

import functools

import pytest

from benchmarks.contest import OURS, Contender, Contest, best_of
from benchmarks.packing.filling import fill, filled
from benchmarks.packing.whole_job import (
    RIVALS,
    WROTE,
    assert_equal,
    assert_same_fields,
    by_lists,
    three_fields_by_lists,
)
from benchmarks.workloads import MULTI_TURN, WORKLOADS, as_lists, conversations
from trajpack import TrajectoryBuffer

FILLED = f"{OURS}, buffer filled before"
MERGED = f"{OURS}, merged layout"
THREE = "Python lists, 3 fields"
FROM_ARRAYS = "pack, from arrays"
FROM_LISTS = "pack, from lists"

PACK_OVER_LISTS = 20
"""How many times faster packing must be than Python lists, where arrays come in."""
FROM_LISTS_OVER_LISTS = 6
"""And where plain lists come in."""


@functools.lru_cache(maxsize=1)
def inputs(workload, scale=1.0):
    """Return the trajectories with arrays, with lists, and what both are to become."""
    trajectories = conversations(workload, scale)
    return trajectories, as_lists(trajectories), by_lists(trajectories)


def check_three(expected):
    def check(got):
        wanted = (expected.input_ids, expected.prompt_mask, expected.rollout_logprobs)
        for left, right in zip(got, wanted, strict=True):
            assert_equal(left, right, "one of the three")

    return check


def end_to_end(trajectories, layout="turns"):
    """Return our whole job: a kept buffer is cleared, filled and packed."""
    buffer = TrajectoryBuffer(device="cpu")

    def work():
        buffer.clear()
        fill(buffer, trajectories)
        return buffer.pack(layout=layout)

    return work


def pack_alone(trajectories, layout="turns"):
    """Return the first pack after a buffer was filled, which is not timed."""
    buffer = filled(trajectories)

    def refill():
        buffer.clear()
        fill(buffer, trajectories)

    work = functools.partial(buffer.pack, layout=layout)
    return Contender(FILLED, work, WROTE, release=refill)


def merged(trajectories):
    """Return the same training tokens in our other layout, which says each token once."""

    def check(batch):
        assert batch.unpack() == trajectories

    return Contender(MERGED, end_to_end(trajectories, "merged"), f"{WROTE}, fewer tokens", check)


def contenders(workload, trajectories, expected):
    ours = [Contender(OURS, end_to_end(trajectories), WROTE), pack_alone(trajectories)]
    if len(trajectories[0].turns) > 1:
        ours.append(merged(trajectories))
    three = functools.partial(three_fields_by_lists, trajectories)
    rivals = [
        Contender(name, functools.partial(way, trajectories), WROTE) for name, way in RIVALS.items()
    ]
    if workload == MULTI_TURN:  # what the agent does that this library replaces
        rivals.append(Contender(THREE, three, "3 fields", check_three(expected)))
    return [*ours, *rivals]


def whole_job(job, workload, trajectories, expected):
    check = functools.partial(assert_same_fields, expected=expected)
    contest = Contest(job, workload, len(expected.input_ids), check)
    return contest, contenders(workload, trajectories, expected)


CASES = [(workload, job) for workload in WORKLOADS for job in (FROM_ARRAYS, FROM_LISTS)]


@pytest.mark.parametrize(("workload", "job"), CASES)
def bench_whole_job(hold, workload, job):
    arrays, lists, expected = inputs(workload)
    given = arrays if job == FROM_ARRAYS else lists
    entries = hold(*whole_job(job, workload, given, expected))
    if workload == MULTI_TURN:
        lists_take = best_of(entries, "Python lists")
        promised = FROM_LISTS_OVER_LISTS if job == FROM_LISTS else PACK_OVER_LISTS
        assert lists_take / best_of(entries, OURS) >= promised
        if job == FROM_ARRAYS:  # the list-based agent collects only three of the fields
            assert best_of(entries, THREE) / best_of(entries, FILLED) >= PACK_OVER_LISTS
