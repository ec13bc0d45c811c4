"""Rates of copies on a device, by the share of writes: ``python -m benchmarks.copy_rates FILE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.contest import Contender
from benchmarks.timing import copy_of, measure

WRITES = (1, 6)
"""Bytes written for each byte read: 50 and 86 % of all."""
NUM_BYTES = 2**30


def rates(num_bytes: int, device: str) -> list[dict[str, Any]]:
    """Return a row for each share of writes; each copy is checked before it is measured."""
    rows = []
    for writes in WRITES:
        copy, check = copy_of(num_bytes, device, writes)
        check(copy())
        found = measure(Contender("copy", copy, "all", check), device)
        took = found.get("cold_ms") or found["wall_ms"]
        share = writes / (1 + writes)
        rows.append({"writes": share, "bytes": num_bytes, "gb_per_s": num_bytes / took / 1e6})
        rows[-1] |= found
    return rows


def main(file: str) -> None:
    """Measure on the CUDA device, write the file, and print the rates."""
    found = rates(NUM_BYTES, "cuda" if torch.cuda.is_available() else "cpu")
    said = machine.describe("python -m benchmarks.copy_rates") | {"copies": found}
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(json.dumps(said, indent=1) + "\n")
    for row in found:
        print(f"{row['writes']:.0%} writes: {row['gb_per_s']:,.0f} GB/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
