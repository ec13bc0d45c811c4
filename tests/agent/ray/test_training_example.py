"""The training example on `ray.train`: the guide quotes it, and it survives the loss of a rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "ray_training.py"


def test_the_guide_quotes_the_example() -> None:
    quoted = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "ray.md").read_text(), re.DOTALL)
    assert len(quoted) == 2
    for block in quoted:
        assert block in EXAMPLE.read_text()


def ranks_of(pid: int) -> list[int]:
    """Return the process ids of the ranks that a process has started."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if "TrainWorker" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
@pytest.mark.slow
@pytest.mark.attack
def test_training_continues_from_its_checkpoint_when_a_rank_is_killed(tmp_path: Path) -> None:
    # importing ray.train uses its own deprecated settings
    strict = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning"]
    command = [*strict, str(EXAMPLE), "4", str(tmp_path)]
    own = os.environ | {"RAY_ADDRESS": "local"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own) as child:
        try:
            ranks: list[int] = []
            while child.poll() is None and len(ranks) < 2:
                ranks = ranks_of(child.pid)
                time.sleep(0.05)
            while child.poll() is None and not list(tmp_path.rglob("state.pt")):
                time.sleep(0.05)
            os.kill(ranks[-1], signal.SIGKILL)
            shown, _ = child.communicate()
        except BaseException:
            child.kill()
            raise
    assert child.returncode == 0
    steps = re.findall(r"^step +(\d): mean reward (\S+),", shown, re.MULTILINE)
    assert [int(step) for step, _ in steps] == [1, 2, 3, 4]
    assert float(steps[-1][1]) > float(steps[0][1]) + 0.1
