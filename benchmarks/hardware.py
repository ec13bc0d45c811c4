"""Everything that needs a CUDA device, part by part, the cheapest evidence first: `make hardware`.

`benchmarks.device_checks` has rates of copies, every kernel beside its reference (also under
compute-sanitizer), waits, graphs and block shapes. Then come the GPU tests, and the benchmarks of
the device path. Parts that time run alone, others beside each other. Each part has a time limit,
and a part that fails stops no other. A part writes its results to ``hardware/<part>``, row by row.
``hardware.json`` has the outcome of each part, and GPU, versions, commit and command;
``build/hardware`` gets what each part printed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import device_checks, machine
from benchmarks.report import RESULTS

LOGS = machine.ROOT / "build" / "hardware"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Of processes beside others, whose references would else take every core."""
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor then has memory of its own, so that an access beside it is noticed."""
TOOLS = [*os.environ.get("PATH", "").split(os.pathsep), "/usr/local/cuda/bin"]
TOLD = re.compile(r"(\[gw\d+\].*|tests/.* )?\b(FAILED|ERROR)\b|=========")
"""Begins the lines that say what failed."""


class Part(NamedTuple):
    """What is run."""

    name: str
    limit_s: float
    command: Sequence[str]
    environment: dict[str, str] = {}  # noqa: RUF012 - it is not changed
    needs: Sequence[str] = ("triton", "pytest")
    """Modules; torch is there."""
    program: str = sys.executable
    """What is needed beside them."""
    beside: bool = False
    """Whether it runs beside its neighbours: it times nothing."""


BENCHMARKS = {
    "build": "bench_build_on_the_device",
    "scans": "bench_discounted_returns or bench_gae",
    "weights": "bench_weights",
    "pack": "bench_pack_on_the_device",
    "enqueue": "bench_size_on_the_device",
    "credit": "bench_estimators",
    "sums": "bench_group or bench_reductions",
    "logprobs": "bench_logprobs",
    "moves": "bench_pad or bench_gather or bench_unpad or bench_micro",
}
"""Benchmarks of each part, as an expression of pytest."""
LIMIT_S = 480
"""Seconds of a part at most."""


def parts(results: Path = RESULTS, *, rehearse: bool = False) -> list[Part]:
    """Return all parts, those with the cheapest evidence first; tiny ones for a rehearsal."""
    tiny = ["--rehearse"] if rehearse else []
    cores = os.cpu_count() or 1
    tests = (sys.executable, "-m", "pytest", "-W", "default", "-p", "no:cacheprovider")
    workers = ("-n", str(cores - 4)) if find_spec("xdist") and cores > 8 else ()
    benchmarks = sorted(
        str(path.relative_to(machine.ROOT))
        for path in (machine.ROOT / "benchmarks").glob("*/bench_*_gpu.py")
    )

    def checked(name: str, *more: str, checks: str = "", **options: Any) -> Part:
        file = str(results / "hardware" / f"{name}.json")
        command = (sys.executable, "-m", "benchmarks.device_checks", checks or name, file)
        return Part(name, LIMIT_S, (*command, *more, *tiny), **options)

    def in_shares(count: int) -> tuple[str, ...]:
        return "--shares", str(max(1, min(count, cores)))

    def sanitized(tool: str) -> Part:
        more = (*in_shares(4), "--sanitizer", tool)
        rest = {"program": device_checks.SANITIZER, "beside": True}
        return checked(tool, *more, checks="kernels", environment=ONE_THREAD | UNCACHED, **rest)

    def timed(name: str, chosen: str) -> Part:
        kept = str(results / "hardware" / name)
        command = (*tests, "-q", *benchmarks, "-k", chosen, "--results", kept, *tiny)
        return Part(name, LIMIT_S, command)

    timings = [timed(name, chosen) for name, chosen in BENCHMARKS.items()]
    return [
        checked("copies"),
        # compiles what the others find in Triton's cache
        checked("kernels", *in_shares(12), environment=ONE_THREAD),
        *(sanitized(tool) for tool in ("memcheck", "racecheck", "initcheck")),
        *(checked(name, environment=ONE_THREAD, beside=True) for name in ("sync", "graphs")),
        Part(
            "tests",
            LIMIT_S,
            (*tests, "-v", *workers, "-m", "gpu", "tests/gpu"),  # names at once what fails
            ONE_THREAD,
            beside=True,
        ),
        *timings,
        checked("dense"),
        checked("shapes", *in_shares(len(device_checks.candidates()))),
    ]


def lacks(part: Part) -> str:
    """Say what a part needs and is not there; nothing where all is."""
    if shutil.which(part.program, path=os.pathsep.join(TOOLS)) is None:
        return f"{part.program} is not on the PATH"
    return ", ".join(f"{one} is not installed" for one in part.needs if find_spec(one) is None)


def command_of(part: Part) -> str:
    """Return the command of a part as one would give it in the repository."""
    words = [*(f"{name}={value}" for name, value in part.environment.items()), *part.command]
    return " ".join(words).replace(sys.executable, "python").replace(f"{machine.ROOT}/", "")


def run(part: Part, logs: Path) -> dict[str, Any]:
    """Run a part, print and log its output, and return its record."""
    found: dict[str, Any] = {
        "part": part.name,
        "command": command_of(part),
        "limit_s": part.limit_s,
    }
    if lacking := lacks(part):
        return found | {"outcome": f"left out: {lacking}"}
    logs.mkdir(parents=True, exist_ok=True)
    begin, last, told = time.perf_counter(), "", []
    process = subprocess.Popen(
        part.command,
        cwd=machine.ROOT,
        env=os.environ | part.environment | {"PATH": os.pathsep.join(TOOLS)},
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
            print(f"{part.name}: {line}", end="", flush=True)
            log.write(line)
            last = line.strip() or last
            if TOLD.match(line):
                told.append(line.rstrip())
    status = process.wait()
    timer.cancel()
    outcome = "passed" if status == 0 else f"failed with status {status}"
    if over.is_set():
        outcome = f"stopped after {part.limit_s:g} s"
    took = round(time.perf_counter() - begin, 1)
    found |= {"outcome": outcome, "seconds": took, "last_line": last}
    return found | ({"told": told[:40]} if told and outcome != "passed" else {})


def run_all(wanted: Sequence[Part], command: str, results: Path, logs: Path) -> int:
    """Run parts, write their records after each, and return 0 if none failed.

    The records of parts that are not run again stay.
    """
    file = results / "hardware.json"
    kept = json.loads(file.read_text())["parts"] if file.exists() else []
    found: list[dict[str, Any]] = []
    neighbours = itertools.groupby(enumerate(wanted), lambda one: one[1].beside or one[0])
    for _, group in neighbours:
        together = [part for _, part in group]
        print("==", *(f"{part.name}: at most {part.limit_s:g} s;" for part in together), flush=True)
        with ThreadPoolExecutor(len(together)) as pool:
            for record in pool.map(functools.partial(run, logs=logs), together):
                found.append(record | {"commit": machine.commit()})
        results.mkdir(parents=True, exist_ok=True)
        again = {one["part"] for one in found}
        said = machine.describe(command)
        said["parts"] = [*(one for one in kept if one["part"] not in again), *found]
        file.write_text(json.dumps(said, indent=1) + "\n")
    print(f"== in {file}:")
    for each in found:
        print(f"{each['part']:12} {each['outcome']}")
    return int(any(not each["outcome"].startswith(("passed", "left out")) for each in found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in parts()])
    parser.add_argument(
        "--limit", type=float, help="seconds of a part at most, if fewer than its own"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the host")
    asked = parser.parse_args(arguments)
    if not asked.rehearse and not torch.cuda.is_available():
        print("hardware: there is no CUDA device here", file=sys.stderr)
        return 2
    if asked.rehearse and asked.results == RESULTS:
        parser.error("a rehearsal needs --results: what it writes was not measured")
    every = parts(asked.results.absolute(), rehearse=asked.rehearse)
    wanted = [part for part in every if asked.parts is None or part.name in asked.parts]
    if asked.limit is not None:
        wanted = [part._replace(limit_s=min(part.limit_s, asked.limit)) for part in wanted]
    given = sys.argv[1:] if arguments is None else arguments
    command = " ".join(["python", "-m", "benchmarks.hardware", *given])
    return run_all(wanted, command, asked.results, LOGS)


if __name__ == "__main__":
    sys.exit(main())
