"""A program that forks writers of logs, to be killed: imports cost seconds, a fork does not.

Each line on its input, JSON, starts a writer; on the next line it waits until that one is dead,
and says so. What a writer says goes to the same output, a line at a time.
"""

import gc
import json
import os
import random
import signal
import sys

from tests.packing.trajectory_log.log_cases import append, begin, episode
from tests.packing.trajectory_log.sqlite_calls import SQLiteCalls

STEPS = ("fsync", "replace", "open", "unlink")


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def die_before(step, tear):
    """Let this process kill itself before one of the calls that change or open a file.

    With ``tear``, a call of SQLite that writes does one half of its work before.
    """
    left = [step]

    def is_last():
        left[0] -= 1
        return left[0] < 0

    def mortal(call):
        def counted(*args, **kwargs):
            if is_last():
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in STEPS:
        setattr(os, name, mortal(getattr(os, name)))
    SQLiteCalls(lambda _: ("tear" if tear else "die") if is_last() else None)


def write(folder, seed, step=None, tear=False, episodes=10_000, linger=False):
    """Append what the log lacks, and say what was flushed, until killed."""
    rng = random.Random(seed)
    if step is not None:
        die_before(step, tear)
    with begin(folder, flush_episodes=rng.choice([2, 5, 1000])) as log:
        say("opened", len(log))
        for number in range(len(log), episodes):
            append(log, number)
            if rng.random() < 0.3:
                log.flush()
                say("flushed", len(log))
        if linger:
            stay(log)
    say("closed", episodes)


def stay(log):
    """Leave a child behind, which has inherited what a forked process does."""
    log.flush()
    child = os.fork()
    if child == 0:
        try:
            log.append("from the child", [])
        except ValueError as error:
            say("child", os.getpid(), error)
        signal.pause()
    signal.pause()


def main():
    for number in range(100):
        episode(number)  # once, not in each writer
    gc.collect()
    gc.freeze()  # what is here is shared by all that is forked
    for line in sys.stdin:
        writer = os.fork()
        if writer == 0:
            say("started", os.getpid())
            try:
                write(**json.loads(line))
            except Exception as error:  # noqa: BLE001 - said, and seen by the test
                say("failed", repr(error))
            os._exit(0)
        sys.stdin.readline()
        os.waitpid(writer, 0)
        say("dead")


if __name__ == "__main__":
    main()
