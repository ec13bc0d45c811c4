"""`make hardware`: says that there is no device; goes on after an item that fails or hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import hardware, machine
from benchmarks.hardware import CALLS, Item
from tests.ptx import calls


def test_without_a_device_it_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.main(["--results", str(tmp_path)]) == 2
    assert capfd.readouterr().err == "hardware: there is no CUDA device here\n"
    assert not list(tmp_path.iterdir())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "hardware", lambda: {"gpu": "some GPU"})


def works(setting: Any) -> Iterator[dict[str, Any]]:
    sys.stdout.write("of a library")
    yield {"ms": 1 / 3, "many": [2 / 3]}


def fails(setting: Any) -> Iterator[dict[str, Any]]:
    yield {"ms": 1.0}
    raise RuntimeError("no")


def hangs(setting: Any) -> Iterator[dict[str, Any]]:
    yield {"ms": 2.0}
    subprocess.run(["sleep", "1000"], check=False)


def dies(setting: Any) -> Iterator[dict[str, Any]]:
    yield from ()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("device")
def test_an_item_that_fails_hangs_or_dies_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capfd: Any, tmp_path: Path
) -> None:
    every = [Item(one.__name__, 2, one) for one in (fails, hangs, dies, works)]
    monkeypatch.setattr(hardware, "CALLS", {1: every})
    assert hardware.main(["--results", str(tmp_path), "--call", "1"]) == 1
    written = json.loads((tmp_path / "call1.json").read_text())
    assert {"hardware", "versions", "commit", "command"} < set(written)
    rows = [{key: row[key] for key in row if key != "at_s"} for row in written["rows"]]
    assert rows == [
        {"item": "fails", "ms": 1.0},
        {"item": "fails", "error": "RuntimeError: no"},
        {"item": "hangs", "ms": 2.0},
        {"item": "works", "ms": 0.33333, "many": [0.66667]},
    ]
    assert {ended["item"]: ended["outcome"] for ended in written["items"]} == {
        "fails": "failed",
        "hangs": "stopped after 2 s",
        "dies": "its process died",
        "works": "passed",
    }
    printed = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert len(printed) == 8
    assert "of a library" in (tmp_path / "call1.log").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["call1.json", "call1.log"]


# --- rehearsals

QUICK = "rates|logprobs|step|grpo|micro|host|fields|ncu|rivals"


@pytest.mark.parametrize("items", [QUICK, pytest.param("", marks=pytest.mark.slow)])
def test_items_are_rehearsed(items: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.hardware", "--rehearse", "--results"]
    command += [str(tmp_path), "--items", items, "--base", str(machine.ROOT)]
    environment = os.environ | {"PYTHONPATH": str(machine.ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=machine.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    written = [json.loads((tmp_path / f"call{n}.json").read_text()) for n in CALLS]
    ended = [one for call in written for one in call["items"]]
    rows = [one for call in written for one in call["rows"]]
    assert {one["outcome"] for one in ended} == {"passed"}, ended
    assert done.returncode == 0
    names = {item.name for call in CALLS.values() for item in call if re.search(items, item.name)}
    assert {one["item"] for one in rows} == names
    assert not [one for one in rows if "error" in one or "said" in one or one.get("status")]
    assert any(one.get("of") == "base" for one in rows)
    losses = {one["workload"]: [] for one in rows if one["item"] == "step" and "way" in one}
    for one in rows:
        if one["item"] == "step" and "way" in one:
            losses[one["workload"]].append(one["loss"])
    for several in losses.values():
        assert len(several) == 8
        assert max(several) == pytest.approx(min(several), rel=1e-3)


def test_every_kernel_is_among_the_calls(executor: Any) -> None:
    """And so beside its reference on a device, and under compute-sanitizer."""
    executor.is_running = False
    for _, call in calls.every_call(calls.Drawn(calls.SMALL["A"])):
        call("triton")
    sources = machine.ROOT.glob("kernels/**/*_triton.py")
    kernels = {
        name for file in sources for name in re.findall(r"def (\w+_kernel)\(", file.read_text())
    }
    assert kernels == set(executor.launched)
