"""Times a trajectory log: ``python -m benchmarks.trajectory_log --episodes 100000 --tokens 500``.

Prints seconds of the clock and of the processor for appending with a flush after so many episodes,
opening, and replaying; with ``--readers``, while so many other processes replay the log meanwhile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trajpack import Trajectory, Turn
from trajpack.packing import TrajectoryLog

NUM_TURNS = 4
NUM_DIFFERENT = 500


def episodes(num_tokens: int) -> list[list[Trajectory]]:
    """Return episodes of four turns, each of which goes on with the one before."""
    rng, step = np.random.default_rng(0), num_tokens // (2 * NUM_TURNS)
    made = []
    for _ in range(NUM_DIFFERENT):
        ids = rng.integers(0, 152_000, num_tokens).astype(np.int32)
        logprobs = -rng.exponential(0.3, step).astype(np.float32)
        turns = [
            Turn(
                ids[: 2 * step * k + step], ids[2 * step * k + step : 2 * step * (k + 1)], logprobs
            )
            for k in range(NUM_TURNS)
        ]
        made.append([Trajectory("path", turns)])
    return made


def timed(name: str, work: Callable[[], Any]) -> Any:
    """Print how long some work takes."""
    clock, cpu = time.perf_counter(), time.process_time()
    result = work()
    seconds, of_cpu = time.perf_counter() - clock, time.process_time() - cpu
    print(f"{name:16} {seconds:8.2f} s, {of_cpu:8.2f} s of the processor")
    return result


def replay(folder: Path) -> int:
    with TrajectoryLog.open(folder, mode="read") as log:
        return sum(len(one.trajectories) for one in log.replay())


def read_on(folder: Path, until: Any) -> None:
    while not until.is_set():
        replay(folder)


def append(folder: Path, made: list[list[Trajectory]], count: int, flush_every: int) -> None:
    calls, flushes = 0.0, []
    with TrajectoryLog.open(folder, flush_episodes=flush_every + 1) as log:
        for number in range(count):
            begin = time.perf_counter()
            log.append(f"question-{number}@0", made[number % len(made)])
            end = time.perf_counter()
            calls += end - begin
            if (number + 1) % flush_every == 0:
                log.flush()
                flushes.append(time.perf_counter() - end)
    print(f"{'append calls':16} {calls:8.2f} s")
    print(f"{'flush':16} {1e3 * statistics.median(flushes):8.2f} ms, the median")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--flush-every", type=int, default=1024)
    parser.add_argument("--readers", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where there is room; a temporary one")
    chosen = parser.parse_args()
    made = episodes(chosen.tokens)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        TrajectoryLog.open(folder).close()
        spawn = multiprocessing.get_context("spawn")
        until = spawn.Event()
        readers = [
            spawn.Process(target=read_on, args=(folder, until)) for _ in range(chosen.readers)
        ]
        for reader in readers:
            reader.start()
        timed("append all", lambda: append(folder, made, chosen.episodes, chosen.flush_every))
        until.set()
        for reader in readers:
            reader.join()
        timed("open to append", lambda: TrajectoryLog.open(folder).close())
        log = timed("open to read", lambda: TrajectoryLog.open(folder, mode="read"))
        timed("replay", lambda: sum(1 for _ in log.replay()))
        size = sum(path.stat().st_size for path in folder.iterdir())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{'on the disk':16} {size / 1e6:8.1f} MB, peak memory {peak / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
