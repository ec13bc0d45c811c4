"""A writer dies at any moment: what was flushed is there, nothing twice, and another goes on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.packing.log_cases import assert_holds, episode
from trajpack.packing.log_options import LogInUseError
from trajpack.packing.trajectory_log import TrajectoryLog

ROOT = Path(__file__).parents[2]
KILLS = 30
STEPS = 34


class Victims:
    """Writers in processes of their own, one at a time."""

    def __init__(self):
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-P", "-m", "tests.packing.log_victims"]
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
    if not flushed and not (folder / "manifest.jsonl").exists():
        return 0
    with TrajectoryLog.open(folder, mode="read") as log:
        assert log.finished == {f"e{number}" for number in range(len(log))}
        assert len(log) >= flushed
        return len(log)


def test_killed_at_random_moments_it_keeps_all_that_was_flushed(tmp_path, victims):
    rng = random.Random(6)
    flushed = 0
    for kill in range(KILLS):
        victims.start(tmp_path, kill)
        for _ in range(rng.randrange(4)):
            flushed = int(victims.expect("opened", "flushed"))
        time.sleep(rng.random() * 0.02)  # anywhere between, and within, two flushes
        flushed = max(flushed, victims.kill())
        held = assert_lost_nothing(tmp_path, flushed)
        if kill % 10 == 9:
            assert_holds(tmp_path, range(held))
    assert flushed > 0
    with TrajectoryLog.open(tmp_path) as log:
        count = len(log)
        assert count >= flushed
        log.append(f"e{count}", [episode(count)])
    assert_holds(tmp_path, range(count + 1))
    assert not list(tmp_path.glob("*.tmp"))


def test_killed_before_any_of_its_steps_it_keeps_all_that_was_flushed(tmp_path, victims):
    ended = 0
    for step in range(STEPS):
        folder = tmp_path / str(step)
        victims.start(folder, seed=1, step=step, episodes=4)
        flushed = victims.end()
        ended += flushed == 4
        assert_lost_nothing(folder, flushed)
        with TrajectoryLog.open(folder) as log:
            for number in range(len(log), 6):
                log.append(f"e{number}", [episode(number)])
        assert_holds(folder, range(6))
        assert not list(folder.glob("*.tmp"))
    assert 0 < ended < STEPS / 2  # else there are more steps than were tried, or hardly any


def test_a_log_has_one_writer_until_that_is_dead(tmp_path, victims):
    victims.start(tmp_path, seed=0, episodes=3, linger=True)
    while " " not in (said := victims.expect("opened", "flushed", "child")):
        pass
    child, _, error = said.partition(" ")
    try:
        assert error == f"log {tmp_path} belongs to the process that opened it"
        with pytest.raises(LogInUseError, match=f"has a writer already: process {victims.number};"):
            TrajectoryLog.open(tmp_path)
        assert_holds(tmp_path, range(3))  # readers need not wait
        victims.kill()
        with TrajectoryLog.open(tmp_path) as log:  # though what it forked is still there
            os.kill(int(child), 0)
            with pytest.raises(LogInUseError, match=f"process {os.getpid()};"):
                TrajectoryLog.open(tmp_path)
            log.append("e3", [episode(3)])
    finally:
        os.kill(int(child), signal.SIGKILL)
    assert_holds(tmp_path, range(4))
