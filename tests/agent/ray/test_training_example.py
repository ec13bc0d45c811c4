"""The training example on `ray.train`: the guide quotes it, and it survives the loss of a rank."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "ray_training.py"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")


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


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the example, with a stand-in for ``ray.train`` that knows one rank."""
    spec = importlib.util.spec_from_file_location("ray_training", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ray_training", module)
    spec.loader.exec_module(module)
    return module


class OneRank:
    """Stands in for ``ray.train``: keeps what the rank reports, and a folder a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.reported, self.checkpoint = folder, [], None
        self.Checkpoint = self

    def from_directory(self, folder: str) -> OneRank:
        shutil.copytree(folder, self.folder / str(len(self.reported)))
        return self

    def report(self, metrics: dict[str, Any], checkpoint: Any) -> None:
        self.reported.append(metrics)
        self.checkpoint = checkpoint

    def get_checkpoint(self) -> Any:
        return self.checkpoint

    @contextmanager
    def as_directory(self) -> Iterator[Path]:
        yield self.folder / str(len(self.reported) - 1)


@pytest.mark.slow
@needs_ray
def test_the_loop_trains_and_goes_on_from_its_checkpoint(
    cluster: None, example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ray

    train = OneRank(tmp_path)
    monkeypatch.setattr(ray, "train", train, raising=False)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    ray.cloudpickle.register_pickle_by_value(example)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        example.train_loop({"num_steps": 1})
        example.train_loop({"num_steps": 3})
    finally:
        torch.distributed.destroy_process_group()
        ray.cloudpickle.unregister_pickle_by_value(example)
    assert [metrics["step"] for metrics in train.reported] == [1, 2, 3]
    rewards = [metrics["reward"] for metrics in train.reported]
    assert rewards[-1] > rewards[0] + 0.1


@needs_ray
@pytest.mark.attack
def test_training_continues_from_its_checkpoint_when_a_rank_is_killed(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not request.config.getoption("--full"):
        pytest.skip("starts dozens of processes, which takes minutes; `make attacks` does it")
    # importing ray.train uses its own deprecated settings
    strict = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning"]
    command = [*strict, str(EXAMPLE), "6", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
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
    assert re.findall(r"^step +(\d)", shown, re.MULTILINE) == [str(step) for step in range(1, 7)]
