"""Everything that needs a CUDA device, part by part: `make hardware`.

First the rates of copies, then the GPU tests, then a few of them under compute-sanitizer, then the
benchmarks of the device path. Each part has a time limit, and a part that fails stops no other. A
part of benchmarks writes its results to ``hardware/<part>``. ``hardware.json`` has the outcome of
each part, with GPU, versions, commit and command. ``build/hardware`` gets what each part printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import machine
from benchmarks.report import RESULTS

LOGS = machine.ROOT / "build" / "hardware"
SANITIZED = (
    "test_device_path.py::test_build_takes_words_at_any_address",
    "test_pad.py::test_memory_at_any_address_is_read_right",
    "test_pad.py::test_gathered_words_are_those_of_the_host",
    "test_discounted_returns.py::test_a_segment_has_the_same_bits_whatever_it_is_packed_with",
    "test_micro_batches.py::test_gradients_of_merged_outputs_are_those_of_the_host",
    "test_credit.py::test_the_reference_runs_on_the_device_too",
)
"""Small tests that launch most kernels between them, none in a graph."""
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor then has memory of its own, so that an access beside it is noticed."""
FOUND = "86"
"""Exit status of compute-sanitizer where it found something."""


class Part(NamedTuple):
    """What is run."""

    name: str
    limit_s: float
    command: Sequence[str]
    environment: dict[str, str] = {}  # noqa: RUF012 - it is not changed


BENCHMARKS = {
    "build": "bench_build_on_the_device",
    "scans": "bench_discounted_returns or bench_gae",
    "sums": "bench_group or bench_reductions",
    "moves": "bench_pad or bench_gather or bench_unpad or bench_micro",
    "pack": "bench_pack_on_the_device",
    "weights": "bench_weights",
    "enqueue": "bench_size_on_the_device",
}
"""Benchmarks of each part, as an expression of pytest."""
LIMIT_S = 480
"""Seconds of a part at most."""


def parts(results: Path = RESULTS) -> list[Part]:
    """Return all parts, those with the cheapest evidence first."""
    python = sys.executable
    tests = (python, "-m", "pytest", "-q", "-m", "gpu")
    few = [f"tests/gpu/{name}" for name in SANITIZED]
    benchmarks = sorted(
        str(path.relative_to(machine.ROOT))
        for path in (machine.ROOT / "benchmarks").glob("*/bench_*_gpu.py")
    )

    def sanitized(tool: str) -> Part:
        command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", FOUND, *tests, *few)
        return Part(tool, LIMIT_S, command, UNCACHED)

    def timed(name: str, chosen: str) -> Part:
        kept = str(results / "hardware" / name)
        command = (python, "-m", "pytest", *benchmarks, "-q", "-k", chosen, "--results", kept)
        return Part(name, LIMIT_S, command)

    copies = (python, "-m", "benchmarks.copy_rates", str(results / "hardware" / "copies.json"))
    return [
        Part("copies", LIMIT_S, copies),
        Part("tests", LIMIT_S, (*tests, "tests/gpu")),
        *(sanitized(tool) for tool in ("memcheck", "racecheck", "initcheck")),
        *(timed(name, chosen) for name, chosen in BENCHMARKS.items()),
    ]


def run(part: Part, logs: Path) -> dict[str, Any]:
    """Run a part, print and log its output, and return its record."""
    found: dict[str, Any] = {
        "part": part.name,
        "command": " ".join([*(f"{k}={v}" for k, v in part.environment.items()), *part.command]),
        "limit_s": part.limit_s,
    }
    if shutil.which(part.command[0]) is None:
        return found | {"outcome": f"left out: {part.command[0]} is not on the PATH"}
    logs.mkdir(parents=True, exist_ok=True)
    begin, last = time.perf_counter(), ""
    process = subprocess.Popen(
        part.command,
        cwd=machine.ROOT,
        env=os.environ | part.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    over = threading.Event()

    def stop() -> None:
        over.set()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(part.limit_s, stop)
    timer.start()
    assert process.stdout is not None
    with process.stdout, (logs / f"{part.name}.log").open("w") as log:
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
            last = line.strip() or last
    status = process.wait()
    timer.cancel()
    outcome = "passed" if status == 0 else f"failed with status {status}"
    if over.is_set():
        outcome = f"stopped after {part.limit_s:g} s"
    took = round(time.perf_counter() - begin, 1)
    return found | {"outcome": outcome, "seconds": took, "last_line": last}


def run_all(wanted: Sequence[Part], command: str, results: Path, logs: Path) -> int:
    """Run parts, write their records after each, and return 0 if none failed."""
    found: list[dict[str, Any]] = []
    for part in wanted:
        print(f"== {part.name}: at most {part.limit_s:g} s", flush=True)
        found.append(run(part, logs))
        results.mkdir(parents=True, exist_ok=True)
        said = machine.describe(command) | {"parts": found}
        (results / "hardware.json").write_text(json.dumps(said, indent=1) + "\n")
    print(f"== in {results / 'hardware.json'}:")
    for each in found:
        print(f"{each['part']:12} {each['outcome']}")
    return int(any(not each["outcome"].startswith(("passed", "left out")) for each in found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; return the exit status."""
    every = parts()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[part.name for part in every])
    parser.add_argument(
        "--limit", type=float, help="seconds of a part at most, if fewer than its own"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("hardware: there is no CUDA device here", file=sys.stderr)
        return 2
    every = parts(asked.results)
    wanted = [part for part in every if asked.only is None or part.name in asked.only]
    if asked.limit is not None:
        wanted = [part._replace(limit_s=min(part.limit_s, asked.limit)) for part in wanted]
    words = [
        "python",
        "-m",
        "benchmarks.hardware",
        *(sys.argv[1:] if arguments is None else arguments),
    ]
    return run_all(wanted, " ".join(words), asked.results, LOGS)


if __name__ == "__main__":
    sys.exit(main())
