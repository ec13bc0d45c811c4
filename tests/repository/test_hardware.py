"""`make hardware`: says that there is no device; goes on after a part that fails or hangs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import copy_rates, hardware, machine
from benchmarks.hardware import Part, run_all

HANGS = "import subprocess; subprocess.run(['sleep', '1000'])"
"""Its child holds the pipe, too."""


def python(name: str, program: str, limit_s: float = 60) -> Part:
    return Part(name, limit_s, (sys.executable, "-c", program))


def test_without_a_device_it_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.main(["--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "hardware: there is no CUDA device here\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_target_says_so_too() -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    done = subprocess.run(
        [make, "hardware", f"GPU_PYTHON={sys.executable}"],
        cwd=machine.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "hardware: there is no CUDA device here" in done.stderr


def test_a_part_that_fails_or_hangs_stops_no_other(tmp_path: Path, capsys: Any) -> None:
    wanted = [
        python("fails", "print('1 failed'); raise SystemExit(3)"),
        python("hangs", HANGS, limit_s=1),
        Part("absent", 60, ("no-such-program", "tests")),
        python("passes", "print('5 passed'); print()"),
    ]
    assert run_all(wanted, "python -m benchmarks.hardware", tmp_path / "results", tmp_path) == 1
    written = json.loads((tmp_path / "results" / "hardware.json").read_text())
    assert written["command"] == "python -m benchmarks.hardware"
    assert {"hardware", "versions", "commit"} < set(written)
    outcomes = {part["part"]: part["outcome"] for part in written["parts"]}
    assert outcomes == {
        "fails": "failed with status 3",
        "hangs": "stopped after 1 s",
        "absent": "left out: no-such-program is not on the PATH",
        "passes": "passed",
    }
    fails, _, absent, passes = written["parts"]
    assert (fails["last_line"], passes["last_line"]) == ("1 failed", "5 passed")
    assert "last_line" not in absent
    assert (tmp_path / "fails.log").read_text() == "1 failed\n"
    assert "hangs        stopped after 1 s" in capsys.readouterr().out


def test_all_that_passed_or_was_left_out_is_a_success(tmp_path: Path) -> None:
    wanted = [python("passes", ""), Part("absent", 1, ("no-such-program",))]
    assert run_all(wanted, "", tmp_path, tmp_path) == 0


def test_its_parts_are_there() -> None:
    """The tests that compute-sanitizer is to run exist, and so do the benchmarks."""
    for name in hardware.SANITIZED:
        file, _, test = name.partition("::")
        assert f"def {test}(" in (machine.ROOT / "tests" / "gpu" / file).read_text()
    by_name = {part.name: part for part in hardware.parts()}
    sanitized = ["memcheck", "racecheck", "initcheck"]
    assert list(by_name) == ["copies", "tests", *sanitized, *hardware.BENCHMARKS]
    assert "benchmarks/kernels/bench_kernels_gpu.py" in by_name["build"].command
    assert all(0 < part.limit_s <= 480 for part in by_name.values())


def test_each_benchmark_of_a_device_belongs_to_one_part() -> None:
    for file in (machine.ROOT / "benchmarks").glob("*/bench_*_gpu.py"):
        for name in re.findall(r"^def (bench_\w+)", file.read_text(), re.MULTILINE):
            chosen = [
                part
                for part, words in hardware.BENCHMARKS.items()
                if any(word in name for word in words.split(" or "))
            ]
            assert len(chosen) == 1, name


def test_copies_are_rehearsed_on_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(copy_rates, "NUM_BYTES", 8 * 7 * 60)
    copy_rates.main(str(tmp_path / "hardware" / "copies.json"))
    written = json.loads((tmp_path / "hardware" / "copies.json").read_text())
    assert [row["writes"] for row in written["copies"]] == [1 / 2, 6 / 7]
    assert all(row["gb_per_s"] > 0 for row in written["copies"])
