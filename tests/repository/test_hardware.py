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

from benchmarks import device_checks, hardware, machine, predictions
from benchmarks.hardware import Part, run_all
from tests.ptx import calls
from tests.support.slow import slow_after

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


TOLD = [
    "FAILED a",
    "[gw1] [ 2%] FAILED tests/gpu/test_a.py::test_b",
    "tests/gpu/test_a.py::test_b ERROR [ 2%]",
    "========= Invalid __global__ read",
]


def test_a_part_that_fails_or_hangs_stops_no_other(tmp_path: Path, capsys: Any) -> None:
    said = ["tests/gpu/test_a.py::test_c PASSED", *TOLD, "1 failed"]
    good = [
        python("absent", "")._replace(program="no-such-program"),
        python("lacks", "")._replace(needs=["json", "no_such_module"]),
        python("passes", "print('5 passed'); print()"),
    ]
    wanted = [
        python("fails", f"print(*{said!r}, sep=chr(10)); exit(3)"),
        python("hangs", HANGS, limit_s=1),
        *good,
    ]
    folder = tmp_path / "results"
    assert run_all(wanted, "python -m benchmarks.hardware", folder, tmp_path) == 1
    written = json.loads((folder / "hardware.json").read_text())
    assert written["command"] == "python -m benchmarks.hardware"
    assert {"hardware", "versions", "commit"} < set(written)
    outcomes = {part["part"]: part["outcome"] for part in written["parts"]}
    ended = {
        "absent": "left out: no-such-program is not on the PATH",
        "lacks": "left out: no_such_module is not installed",
        "passes": "passed",
    }
    assert outcomes == {"fails": "failed with status 3", "hangs": "stopped after 1 s", **ended}
    fails, _, absent, _, passes = written["parts"]
    assert (fails["last_line"], passes["last_line"]) == ("1 failed", "5 passed")
    assert fails["told"] == TOLD
    assert "last_line" not in absent
    assert (tmp_path / "fails.log").read_text().splitlines() == said
    assert "hangs        stopped after 1 s" in capsys.readouterr().out
    # what is run again replaces its record alone; what was left out is no failure
    assert run_all([python("hangs", ""), *good], "", folder, tmp_path) == 0
    again = json.loads((folder / "hardware.json").read_text())["parts"]
    assert {part["part"]: part["outcome"] for part in again} == {
        "fails": "failed with status 3", "hangs": "passed", **ended,
    }  # fmt: skip


def test_parts_that_time_nothing_run_beside_each_other(tmp_path: Path) -> None:
    """Each of two ends when the other has begun; one that times begins when both have ended."""
    meet = """
import pathlib, sys, time
own, other, folder = sys.argv[1:4]
(pathlib.Path(folder) / own).touch()
while not (pathlib.Path(folder) / other).exists():
    time.sleep(0.01)
time.sleep(0.1)
(pathlib.Path(folder) / f"{own} ended").touch()
"""
    names = ("a", "b")
    folder = str(tmp_path)
    wanted = [
        Part(one, 60, (sys.executable, "-c", meet, one, other, folder), beside=True)
        for one, other in (names, names[::-1])
    ]
    ended = [str(tmp_path / f"{name} ended") for name in names]
    alone = f"import os; assert all(map(os.path.exists, {ended!r}))"
    assert run_all([*wanted, python("times", alone)], "", tmp_path, tmp_path) == 0
    written = json.loads((tmp_path / "hardware.json").read_text())["parts"]
    assert [part["part"] for part in written] == ["a", "b", "times"]


RACE = "========= Error: Race reported between Read access at "


@pytest.mark.parametrize(
    ("lines", "status", "found"),
    [
        ([], 0, 0),
        ([f"{RACE}nvjet_sm90_tss+0xb30"], 86, 0),
        ([f"{RACE}nvjet_sm90_tss+0xb30", f"{RACE}scan_kernel+0x10"], 86, 86),
        (["========= Program hit an error"], 86, 86),
        ([f"{RACE}nvjet_sm90_tss+0xb30"], 1, 1),
    ],
)
def test_a_race_in_another_library_is_no_failure(lines: list[str], status: int, found: int) -> None:
    program = f"print(*{lines!r}, sep=chr(10)); exit({status})"
    assert device_checks.run_share([sys.executable, "-c", program]) == found


def test_the_cheapest_evidence_comes_first() -> None:
    names = [part.name for part in hardware.parts()]
    assert names == [
        "copies", "kernels", "memcheck", "racecheck", "initcheck", "sync", "graphs", "tests",
        "build", "scans", "weights", "pack", "enqueue", "credit", "sums", "logprobs", "moves",
        "dense", "shapes",
    ]  # fmt: skip
    assert all(0 < part.limit_s <= 480 for part in hardware.parts())


def test_each_benchmark_of_a_device_belongs_to_one_part() -> None:
    for file in (machine.ROOT / "benchmarks").glob("*/bench_*_gpu.py"):
        for name in re.findall(r"^def (bench_\w+)", file.read_text(), re.MULTILINE):
            chosen = [
                part
                for part, words in hardware.BENCHMARKS.items()
                if any(word in name for word in words.split(" or "))
            ]
            assert len(chosen) == 1, name


# --- rehearsals


def rows_of(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


@pytest.mark.slow
def test_shares_of_a_part_make_one_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert device_checks.main(["copies", str(file), "--rehearse", "--shares", "2"]) == 0
    assert [row["writes"] for row in rows_of(file)] == [1 / 2, 6 / 7]
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("part", slow_after(4, ["copies", "sync", "graphs", "dense", "kernels"]))
def test_a_part_is_rehearsed_on_the_executor(part: str, tmp_path: Path) -> None:
    assert device_checks.main([part, str(tmp_path / "rows.json"), "--rehearse"]) == 0
    assert {row["outcome"] for row in rows_of(tmp_path / "rows.json")} == {"passed"}


@pytest.mark.slow
def test_parts_that_time_are_rehearsed_with_the_runner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    once = "4000 or 512 or 1024 or logits"  # each contest with one workload or size
    monkeypatch.setattr(hardware, "BENCHMARKS", {"every": once})
    monkeypatch.setattr(hardware, "LOGS", tmp_path)
    asked = ["--rehearse", "--results", str(tmp_path), "--parts", "shapes", "every"]
    assert hardware.main(asked) == 0, (tmp_path / "every.log").read_text()[-2000:]
    (shape,) = rows_of(tmp_path / "hardware" / "shapes.json")
    assert shape["tiny"].keys() == set(device_checks.VARIED["credit_scan"])
    records = json.loads((tmp_path / "hardware" / "every" / "gpu.json").read_text())["contests"]
    for record in records:
        for entry in record["entries"]:
            assert entry["best_ms"] or re.search("not installed|not load", entry["note"]), entry
    for job in predictions.CALLS:
        predicted = [one["predicted"] for one in records if one["job"] == job]
        assert any(predictions.COUNTED in one for one in predicted), job


def test_a_row_is_written_before_the_next_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that a part that is stopped leaves what it had."""
    file, seen = tmp_path / "rows.json", []

    def fails() -> dict[str, Any]:
        raise RuntimeError("no")

    def looks() -> dict[str, Any]:
        seen.extend(rows_of(file))
        return {}

    monkeypatch.setitem(
        device_checks.PARTS, "copies", lambda _: iter([({"a": 1}, fails), ({"a": 2}, looks)])
    )
    assert device_checks.main(["copies", str(file), "--rehearse"]) == 1
    assert seen == [{"a": 1, "outcome": "failed: no"}]


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
