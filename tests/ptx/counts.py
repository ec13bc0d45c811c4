"""Counts of every kernel on small workloads A, B and C, by executing its compiled PTX.

``PYTHONPATH=src python -m tests.ptx.counts`` counts anew, and writes ``counts.json`` beside this
file and the page ``docs/benchmarks/traffic.md``.
"""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import triton

from tests.ptx.calls import SMALL, Drawn, counted_calls, other_calls
from tests.ptx.executor import Report, on_executor
from tests.ptx.machine_code import machine_code

ROOT = Path(__file__).parents[2]
COUNTS = Path(__file__).with_name("counts.json")
PAGE = ROOT / "docs" / "benchmarks" / "traffic.md"
ARCH = 90
ALSO = (
    "vtrace", "pack, with a field", "GAE", "GroupEstimator('gpg')",
    "importance weights of a batch",
)  # fmt: skip
"""Calls, beside the counted ones, whose kernels no counted call launches, or in other variants."""
COLUMNS = {
    "programs": "programs",
    "instructions": "instructions a token",
    "read": "bytes read a token",
    "written": "bytes written a token",
    "load_sectors": "sectors a load",
    "load_ideal": "at best",
    "store_sectors": "sectors a store",
    "store_ideal": "at best",
    "in_flight": "loads in flight",
    "registers": "registers",
    "spills": "spills",
}
COMPARED: dict[str, float | None] = {
    "instructions": 0.02,
    "read": 0.02,
    "written": 0.02,
    "load_sectors": 0.02,
    "store_sectors": 0.02,
    "spills": 0.0,
    "in_flight": None,
}
"""Counts that must not become worse, with an allowance; those without one must not become less."""
INTRODUCTION = """# Memory traffic of the kernels

The numbers are counted by executing the PTX that Triton {version} compiles for sm_{arch} on CPU
tensors (`tests/ptx/`). No GPU took part. `make test-slow` fails when a number becomes worse by
more than a tenth. `PYTHONPATH=src python -m tests.ptx.counts` writes this page.

The workloads are small copies of those of the benchmarks: A has {A} sequences of 50 to 4,000
tokens, B {B} of 32,768, C {C} of 1 to 64. Instructions are PTX instructions of a warp times 32.
Bytes read and written are the distinct sectors of 32 bytes that a launch touches: the least that
memory must move. Sectors a load or a store are those of one instruction of a warp, without a cache;
"at best" is the fewest that hold the bytes asked for.

Registers of a thread, spills and loads in flight are read from the machine code that `ptxas` makes
of the PTX. Loads in flight are the loads from global memory that a thread issues before an
instruction needs one of them, in the loop with the fewest; searches aside. Where a call launches
several variants of a kernel, the row has the worst.
"""


def count() -> dict[str, dict[str, float]]:
    """Return the counts of each kernel by workload, call and kernel."""
    found = {}
    for workload, lengths in SMALL.items():
        tokens = int(lengths.sum())
        given = Drawn(lengths)
        further = (one for one in other_calls(given) if one[0] in ALSO)
        for name, call in chain(counted_calls(given), further):
            with on_executor(ARCH, checks=False, counts=True) as executor:
                call("triton")
            for kernel, report in sorted(executor.reports.items()):
                found[f"{workload}: {name}: {kernel}"] = counted(report, tokens)
    return found


def counted(report: Report, tokens: int) -> dict[str, float]:
    """Return the counts of a kernel's launches, by the names of `COLUMNS`."""
    loads, stores = report.traffic["global", "load"], report.traffic["global", "store"]
    numbers = {
        "programs": report.programs,
        "instructions": report.warp_instructions * 32 / tokens,
        "read": report.touched["load"] / tokens,
        "written": report.touched["store"] / tokens,
        "load_sectors": loads.sectors / max(loads.requests, 1),
        "load_ideal": loads.ideal / max(loads.requests, 1),
        "store_sectors": stores.sectors / max(stores.requests, 1),
        "store_ideal": stores.ideal / max(stores.requests, 1),
    }
    variants = [machine_code(text, ARCH) for text in report.texts]
    numbers["in_flight"] = min(one.in_flight for one in variants)
    numbers["registers"] = max(one.registers for one in variants)
    numbers["spills"] = max(one.spills for one in variants)
    return {name: round(number, 2) for name, number in numbers.items()}


def worse(
    known: dict[str, dict[str, float]], found: dict[str, dict[str, float]]
) -> dict[str, tuple[float, float]]:
    """Return the counts that became worse by more than a tenth: what they were, what they are."""
    return {
        f"{kernel}: {name}": (known[kernel][name], numbers[name])
        for kernel, numbers in found.items()
        for name, least in COMPARED.items()
        if _is_worse(known[kernel][name], numbers[name], least)
    }


def _is_worse(known: float, found: float, least: float | None) -> bool:
    return found < 0.9 * known if least is None else found > 1.1 * known + least


def page(counts: dict[str, dict[str, float]], version: str) -> str:
    """Return the text of the page."""
    sizes = {name: f"{len(lengths):,}" for name, lengths in SMALL.items()}
    lines = [INTRODUCTION.format(version=version, arch=ARCH, **sizes)]
    for workload in SMALL:
        head = ["call", "kernel", *COLUMNS.values()]
        lines += [f"## Workload {workload}\n", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for key, numbers in counts.items():
            name, call, kernel = key.split(": ")
            if name == workload:
                cells = [call, f"`{kernel}`", *(f"{numbers[column]:,g}" for column in COLUMNS)]
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    counts = count()
    COUNTS.write_text(json.dumps(counts, indent=1) + "\n")
    PAGE.write_text(page(counts, triton.__version__))


if __name__ == "__main__":
    main()
