"""Builders and assertions of the log's tests."""

import os
import threading
from contextlib import suppress
from functools import cache

import numpy as np

from tests.packing.trajectory_log.sqlite_calls import SQLiteCalls
from trajpack import TrajectoryBuffer, Turn, pack
from trajpack.packing.trajectory_log.log import TrajectoryLog
from trajpack.packing.trajectory_log.options import LogOptions
from trajpack.testing import assert_batches_equal, random_trajectory

BY_HAND = LogOptions(flush_seconds=3600)
"""Nothing is written until it is asked for."""


@cache
def episode(number):
    """Return the trajectory of an episode, the same in every process."""
    rng = np.random.default_rng(number)
    name = f"e{number}"
    return random_trajectory(rng, name, num_turns=2, prompt=(1, 9), completion=(1, 30))


def write(folder, *groups_of_numbers, options=BY_HAND, fields=None):
    """Append episodes, a segment for each group of numbers."""
    with TrajectoryLog.open(folder, options=options, fields=fields) as log:
        for numbers in groups_of_numbers:
            for number in numbers:
                log.append(f"e{number}", [episode(number)])
            log.flush()


def read(folder, **options):
    with TrajectoryLog.open(folder, mode="read", options=LogOptions(**options)) as log:
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
    assert [one.episode for one in replayed] == [f"e{number}" for number in expected]
    originals = pack([episode(number) for number in expected], device="cpu")
    assert_batches_equal(buffer.pack(), originals)
    assert [len(one.trajectories) for one in replayed] == [1] * len(replayed)
    return len(replayed)


def turn(prompt=(1, 2), completion=(3,), **changes):
    return Turn(list(prompt), list(completion), [-0.5] * len(completion), **changes)


def wait_until(condition):
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it never came true")


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
    with TrajectoryLog.open(folder, options=BY_HAND) as log:
        log.append("e9", trajectories)
