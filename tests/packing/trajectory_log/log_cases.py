"""Builders and assertions of the log's tests."""

import os
from contextlib import suppress
from functools import cache

import numpy as np

from tests.packing.trajectory_log.sqlite_calls import SQLiteCalls
from trajpack import TrajectoryBuffer, Turn, pack
from trajpack.packing.trajectory_log.log import TrajectoryLog
from trajpack.testing import assert_batches_equal, random_trajectory

NEVER = 1e9
"""Seconds until a log flushes by itself."""


@cache
def episode(number):
    """Return the trajectory of an episode, the same in every process."""
    rng = np.random.default_rng(number)
    name = f"e{number}"
    return random_trajectory(rng, name, num_turns=2, prompt=(1, 9), completion=(1, 30))


def begin(folder, **options):
    """Open a log to append, which is flushed by hand unless ``options`` say otherwise."""
    return TrajectoryLog.open(folder, **{"flush_seconds": NEVER} | options)


def append(log, *numbers):
    for number in numbers:
        log.append(f"e{number}", [episode(number)])


def write(folder, *groups_of_numbers, **options):
    """Append episodes, a transaction for each group of numbers."""
    with begin(folder, **options) as log:
        for numbers in groups_of_numbers:
            append(log, *numbers)
            log.flush()


def read(folder, **options):
    with TrajectoryLog.open(folder, mode="read", **options) as log:
        return list(log.replay())


def assert_holds(folder, numbers=None):
    """Raise unless a folder holds these episodes, bit for bit and in this order.

    Without ``numbers`` it holds the first ones, however many; return how many.
    """
    with TrajectoryLog.open(folder, mode="read") as log:
        replayed = list(log.replay())
        buffer = TrajectoryBuffer("cpu")
        assert log.fill(buffer) == len(buffer)
        expected = range(len(log)) if numbers is None else list(numbers)
    assert [logged.episode for logged in replayed] == [f"e{number}" for number in expected]
    originals = pack([episode(number) for number in expected], device="cpu")
    assert_batches_equal(buffer.pack(), originals)
    assert [len(logged.trajectories) for logged in replayed] == [1] * len(replayed)
    return len(replayed)


def turn(prompt=(1, 2), completion=(3,), **changes):
    return Turn(list(prompt), list(completion), [-0.5] * len(completion), **changes)


def in_a_fork(work, *values):
    """Run some work in a forked process; return its exit status, 1 if the work raised."""
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            work(*values)
            status = 0
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_in_a_transaction(folder, trajectories):
    """Kill this process when the file of a log is half written."""
    writes = iter(range(100))
    SQLiteCalls(lambda name: "die" if "write" in name and next(writes) == 13 else None)
    with begin(folder) as log:
        log.append("e9", trajectories)
