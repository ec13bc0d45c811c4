"""Everything that needs a CUDA device, in three calls, the most valuable first: `make hardware`.

An item runs in a process of its own, which has a time limit: one that fails or takes too long stops
no other. Each row is printed as a line of JSON, and is in ``call1.json`` to ``call3.json`` of the
results, as soon as it is known; ``call1.log`` has what an item printed. ``--rehearse`` runs all
items at tiny sizes on the host. With ``--base`` kernels of another checkout are timed in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from benchmarks import (
    hardware_items as items,
    hardware_models as models,
    hardware_rivals as rivals,
    machine,
)
from benchmarks.hardware_items import Row, Setting
from benchmarks.report import RESULTS

TOOLS = (os.environ.get("PATH", ""), "/usr/local/cuda/bin")
TOOLS += tuple(map(str, Path("/opt/nvidia/nsight-compute").glob("*")))


class Item(NamedTuple):
    """What is run."""

    name: str
    limit_s: float
    run: Callable[[Setting], Iterator[Row]]


CALLS = {
    1: [
        Item("rates", 30, items.rates),
        Item("logprobs", 60, rivals.logprobs),
        Item("trees", 150, models.trees),
        Item("step", 80, models.step),
        Item("grpo", 60, items.grpo),
        Item("scans", 60, items.scans),
        Item("micro-batches", 45, rivals.micro_batches),
        Item("racecheck of scans", 90, items.racecheck),
    ],
    2: [
        Item("tests", 120, items.tests),
        Item("host", 70, items.host),
        Item("weights", 50, items.weights),
        Item("fields", 30, items.fields),
        Item("ncu", 50, items.counters),
        Item("dense", 25, items.dense),
        Item("memcheck", 60, items.memcheck),
    ],
    3: [
        Item("logprobs", 60, rivals.logprobs),
        Item("grpo", 25, items.grpo),
        Item("rivals", 90, rivals.rivals),
        Item("host", 50, items.host),
    ],
}
LIMITS = {1: 350.0, 2: 260.0, 3: 200.0}
"""Seconds of a call. An item that has less than `LEAST_S` left is left out."""
LEAST_S = 8.0
WITHIN = {"checks": items.checks, "counted": items.counted}
"""Items that run below a tool."""


class Call:
    """The results of one call: a row is written when it is known."""

    def __init__(self, number: int, folder: Path, said: Row) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"call{number}.json"
        self.log = folder / f"call{number}.log"
        self.log.unlink(missing_ok=True)
        self.results = said | {"items": [], "rows": []}
        self.begin = time.monotonic()

    def add(self, kind: str, row: Row) -> None:
        row = rounded(row | {"at_s": time.monotonic() - self.begin})
        self.results[kind].append(row)
        print(json.dumps(row), flush=True)
        unfinished = self.file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.results, indent=1) + "\n")
        unfinished.replace(self.file)

    def run(self, item: Item, setting: Setting, limit_s: float) -> None:
        """Run an item and keep its rows, and how it ended."""
        begin = time.monotonic()
        outcome = "passed"
        for row in rows_of(item, setting, self.log, limit_s):
            if "ended" in row:
                outcome = row["ended"]
            else:
                self.add("rows", {"item": item.name} | row)
        took = time.monotonic() - begin
        self.add("items", {"item": item.name, "outcome": outcome, "seconds": took})


def rounded(value: Any) -> Any:
    """Return a value with five digits of each float."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def rows_of(item: Item, setting: Setting, log: Path, limit_s: float) -> Iterator[Row]:
    """Yield the rows of an item, which runs in a process of its own, and last how it ended."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of threads: none of them is waited for
        process = os.fork()  # it has not used the device; what is imported is imported once
    if not process:
        os.close(reading)
        _child(item, setting, log, writing)
    os.close(writing)
    end, waiting, ended = time.monotonic() + limit_s, b"", None
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while ended is None:
            ready, *_ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                ended = f"stopped after {limit_s:.0f} s"
                break
            read = pipe.read(2**16)
            if not read:
                ended = "its process died"
            waiting += read
            *lines, waiting = waiting.split(b"\n")
            for line in lines:
                row = json.loads(line)
                if "ended" in row:
                    ended = row["ended"]
                else:
                    yield row
    with suppress(ProcessLookupError):  # also those that it started
        os.killpg(process, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    yield {"ended": ended}


def _child(item: Item, setting: Setting, log: Path, writing: int) -> NoReturn:
    """Run an item, write its rows to a pipe, and end the process."""
    os.setpgid(0, 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))

    def write(row: Row) -> None:
        os.write(writing, json.dumps(row).encode() + b"\n")

    try:
        print(f"== {item.name}", flush=True)
        for row in item.run(setting):
            write(row)
        write({"ended": "passed"})
    except BaseException as error:  # noqa: BLE001 - the others are of worth without it
        traceback.print_exc()
        write({"error": f"{type(error).__name__}: {error}"[:1000]})
        write({"ended": "failed"})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def described(setting: Setting, log: Path, command: str) -> Row:
    """Return hardware, versions, commit and command: in a process that may ask for the device."""

    def ask(_: Setting) -> Iterator[Row]:
        yield machine.describe(command) | {"device": torch.cuda.is_available()}

    found: Row = {}
    for row in rows_of(Item("machine", 60, ask), setting, log, 60):
        found |= row
    return found


def run_call(number: int, wanted: Sequence[Item], setting: Setting, call: Call) -> bool:
    """Run the items of a call while there is time; return whether all passed."""
    for item in wanted:
        left = LIMITS[number] - (time.monotonic() - call.begin)
        if left < LEAST_S and not setting.rehearse:
            call.add("items", {"item": item.name, "outcome": "left out: no time"})
        else:
            limit_s = 600.0 if setting.rehearse else min(item.limit_s, left)
            call.run(item, setting, limit_s)
    return all(ended["outcome"] == "passed" for ended in call.results["items"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--call", nargs="+", type=int, choices=CALLS, default=[*CALLS])
    parser.add_argument("--items", help="expression of the names of items, such as 'trees|step'")
    parser.add_argument("--results", type=Path, help="folder of the results")
    parser.add_argument("--base", type=Path, help="checkout whose kernels are timed in turn")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the host")
    parser.add_argument("--within", choices=WITHIN, help=argparse.SUPPRESS)
    parser.add_argument("--again", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help=argparse.SUPPRESS)
    parser.add_argument("--share", nargs=2, type=int, default=(0, 1), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    os.environ["PATH"] = os.pathsep.join(TOOLS)
    setting = Setting(asked.rehearse, asked.base, asked.only, tuple(asked.share))
    if asked.within or asked.again:
        run = WITHIN.get(asked.within) or getattr(items, asked.again)
        for row in run(setting):
            print(json.dumps(row), flush=True)
        return 0
    # answers without a context, which would not survive a fork
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    folder = asked.results or RESULTS / "hardware"
    if asked.rehearse and asked.results is None:
        folder = machine.ROOT / "build" / "hardware"
    given = sys.argv[1:] if arguments is None else arguments
    command = " ".join(["python", "-m", "benchmarks.hardware", *given])
    folder.mkdir(parents=True, exist_ok=True)
    said = described(setting, folder / "machine.log", command)
    (folder / "machine.log").unlink(missing_ok=True)
    if not said.pop("device", False) and not asked.rehearse:
        print("hardware: there is no CUDA device here", file=sys.stderr)
        return 2
    passed = True
    for number in asked.call:
        wanted = [one for one in CALLS[number] if re.search(asked.items or "", one.name)]
        if wanted:
            call = Call(number, folder, {"call": number, "rehearsed": asked.rehearse} | said)
            passed &= run_call(number, wanted, setting, call)
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
