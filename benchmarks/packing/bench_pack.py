"""The whole job of packing: trajectories in, all ten fields of the turns layout out.

Every way is given the same trajectories, with arrays in them or with plain lists, and its
result is compared with the reference, `by_lists`, before anything is timed.
"""

import functools

import pytest

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.packing.whole_job import (
    RIVALS,
    WROTE,
    assert_equal,
    assert_same_fields,
    by_lists,
    by_numpy_again,
    three_fields_by_lists,
)
from benchmarks.promises import FROM_ARRAYS, FROM_LISTS, PACK_ONLY, THREE, broken
from benchmarks.workloads import MULTI_TURN, SEQUENCES, WORKLOADS, as_lists, conversations, filled
from trajpack import TrajectoryBuffer

MERGED = f"{OURS}, merged layout"
NUMPY_AGAIN = "numpy, memory reused"
ON_MEMORY = (next(iter(SEQUENCES)), MULTI_TURN)
"""Workloads on which it is measured what using memory again is worth."""
NEVER_NEAR = ("pad, then mask", "torch.nested jagged")
"""Rivals that lists do not bring nearer than arrays do; from lists they run on one workload."""


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
        buffer.extend(trajectories)
        return buffer.pack(layout=layout)

    return work


def pack_only(trajectories, layout="turns"):
    """Return the first pack after a buffer was filled, which is not timed."""
    buffer = filled(trajectories)

    def refill():
        buffer.clear()
        buffer.extend(trajectories)

    work = functools.partial(buffer.pack, layout=layout)
    return Contender(PACK_ONLY, work, WROTE, release=refill)


def merged(trajectories):
    """Return the same training tokens in our other layout, which says each token once."""

    def check(batch):
        assert batch.unpack() == trajectories

    return Contender(MERGED, end_to_end(trajectories, "merged"), f"{WROTE}, fewer tokens", check)


def rivals_of(trajectories, names=tuple(RIVALS)):
    return [
        Contender(
            name,
            functools.partial(RIVALS[name], trajectories),
            WROTE,
            tunes_threads="torch" in name or "pad" in name,
        )
        for name in names
    ]


def contenders(job, workload, trajectories, expected):
    entrants = [Contender(OURS, end_to_end(trajectories), WROTE), pack_only(trajectories)]
    if len(trajectories[0].turns) > 1:
        entrants.append(merged(trajectories))
    if job == FROM_ARRAYS:
        entrants += rivals_of(trajectories)
        if workload in ON_MEMORY:
            again = functools.partial(by_numpy_again(), trajectories)
            entrants.append(Contender(NUMPY_AGAIN, again, WROTE))
    else:
        everybody = workload == MULTI_TURN
        names = [name for name in RIVALS if everybody or name not in NEVER_NEAR]
        entrants += rivals_of(trajectories, names)
    if job == FROM_ARRAYS or workload == MULTI_TURN:  # what the list-based agent collects
        three = functools.partial(three_fields_by_lists, trajectories)
        entrants.append(Contender(THREE, three, "3 fields", check_three(expected)))
    return entrants


def whole_job(job, workload, trajectories, expected):
    check = functools.partial(assert_same_fields, expected=expected)
    contest = Contest(job, workload, len(expected.input_ids), check)
    return contest, contenders(job, workload, trajectories, expected)


CASES = [(workload, job) for workload in WORKLOADS for job in (FROM_ARRAYS, FROM_LISTS)]


@pytest.mark.parametrize(("workload", "job"), CASES)
def bench_whole_job(hold, workload, job):
    arrays, lists, expected = inputs(workload)
    given = arrays if job == FROM_ARRAYS else lists
    record = hold(*whole_job(job, workload, given, expected))
    missed = broken([record])
    assert not missed, "; ".join(missed)
