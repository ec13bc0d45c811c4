"""Writers killed at any moment: flushed episodes are there once, and a next writer goes on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.packing.trajectory_log.log_cases import append, assert_holds
from tests.packing.trajectory_log.sqlite_calls import needs_sqlite_calls
from trajpack.packing.trajectory_log.log import TrajectoryLog

ROOT = Path(__file__).parents[3]
EPISODES = 40


class Victims:
    """Writers in processes of their own, one at a time."""

    def __init__(self):
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-P", "-m", "tests.packing.trajectory_log.log_victims"]
        self.number = None
        self.program = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def start(self, folder, seed, **options):
        self.send(json.dumps({"folder": str(folder), "seed": seed, **options}))
        self.number = int(self.expect("started"))

    def send(self, line):
        self.program.stdin.write(line + "\n")
        self.program.stdin.flush()

    def expect(self, *words):
        said, _, rest = self.program.stdout.readline().strip().partition(" ")
        assert said in words, (said, rest)
        return rest

    def end(self):
        """Wait for the writer's death, and return the last that it said was flushed."""
        self.number = None
        self.send("")
        flushed = "0"
        while said := self.expect("opened", "flushed", "closed", "dead"):
            flushed = said
        return int(flushed)

    def kill(self):
        os.kill(self.number, signal.SIGKILL)
        return self.end()


@pytest.fixture(scope="module")
def program():
    started = Victims()
    yield started
    started.program.stdin.close()
    started.program.kill()
    started.program.wait()
    started.program.stdout.close()


@pytest.fixture
def victims(program):
    yield program
    if program.number is not None:  # the test failed: the next shall not
        program.kill()


def assert_lost_nothing(folder, flushed):
    """Raise unless the log holds the first episodes, all that were flushed among them."""
    if not flushed and not (folder / "log.sqlite").exists():
        return 0
    held = assert_holds(folder)
    assert held >= flushed
    return held


@pytest.mark.slow
@pytest.mark.attack
def test_a_writer_killed_at_random_moments_keeps_flushed_episodes(memory_path, victims, tries):
    """A reader looks on in between, as often as there is time for it."""
    rng = random.Random(6)
    folder, flushed, num_flushes, num_passes = memory_path / "first", 0, 0, 0
    for kill in range(tries(1000)):
        victims.start(folder, kill, episodes=EPISODES)
        for _ in range(rng.randrange(4)):
            flushed = int(victims.expect("opened", "flushed", "closed"))
            num_flushes += 1
            if flushed == EPISODES:
                break
        moment = time.monotonic() + rng.random() * 0.01  # between, and within, two flushes
        if flushed and rng.random() < 0.3:
            flushed = assert_lost_nothing(folder, flushed)
            num_passes += 1
        time.sleep(max(0.0, moment - time.monotonic()))
        flushed = max(flushed, victims.kill())
        if rng.random() < 0.2:
            flushed = assert_lost_nothing(folder, flushed)
        if flushed == EPISODES:
            with TrajectoryLog.open(folder) as log:
                append(log, EPISODES)
            assert_holds(folder, range(EPISODES + 1))
            folder, flushed = memory_path / str(kill), 0
    assert num_flushes > 0
    assert num_passes > 0


@pytest.mark.attack
@needs_sqlite_calls
def test_a_writer_killed_before_any_step_keeps_flushed_episodes(memory_path, victims, tries):
    """Also in the middle of a write, and once more in the recovery of the next writer."""
    ended = 0
    steps = tries(444)
    for number in range(steps):
        folder, tear, again = memory_path / str(number), number % 2 == 1, number % 4 >= 2
        step = number * 100 // steps
        victims.start(folder, seed=1, step=step, tear=tear, episodes=4)
        flushed = victims.end()
        ended += flushed == 4
        if again:
            victims.start(folder, seed=2, step=step % 9, tear=tear, episodes=6)
            flushed = max(flushed, victims.end())
        flushed = assert_lost_nothing(folder, flushed)
        with TrajectoryLog.open(folder) as log:
            assert len(log) == flushed
            append(log, *range(flushed, 6))
        assert_holds(folder, range(6))
        assert not list(folder.glob("*.tmp"))
    assert 0 < ended < steps / 2  # else there are more steps than were tried, or hardly any


@pytest.mark.slow
def test_a_log_is_locked_until_its_writer_is_dead(tmp_path, victims):
    victims.start(tmp_path, seed=0, episodes=3, linger=True)
    while " " not in (said := victims.expect("opened", "flushed", "child")):
        pass
    child, _, error = said.partition(" ")
    try:
        assert error == f"log {tmp_path} belongs to the process that opened it"
        with pytest.raises(OSError, match="another writer has the log open"):
            TrajectoryLog.open(tmp_path)
        assert_holds(tmp_path, range(3))  # readers need not wait
        victims.kill()
        with TrajectoryLog.open(tmp_path) as log:  # though its forked child is still there
            os.kill(int(child), 0)
            with pytest.raises(OSError, match="another writer has the log open"):
                TrajectoryLog.open(tmp_path)
            append(log, 3)
    finally:
        os.kill(int(child), signal.SIGKILL)
    assert_holds(tmp_path, range(4))
