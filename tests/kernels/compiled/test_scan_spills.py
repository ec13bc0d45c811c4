"""What the scans keep in memory that did not fit registers: a table, and nothing beside it.

A spill makes a scan slower and not wrong. Most variants have none; `scan_spills.json` names those
that have, by version of Triton, target, kernel and what is scanned: bytes of stack, and
instructions that store to it or load from it (on gfx942 registers that are kept there).
Every kind of scan is compiled with every observation, with the least and the most that it may be
given: 216 variants. `make variants` compiles all of them, with every Triton and for every
target; without `--full` the installed Triton compiles for sm_90 those of the table and a twelfth.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.conftest import INSTALLED, TARGETS, VERSIONS

SPILLS = Path(__file__).with_name("scan_spills.json")
NUM_VARIANTS = 216
MOST_SCALARS = 64
"""Scalars that do not fit go to lanes of vector registers on gfx942, and not to memory."""
Compile = Callable[[str, str, str], list[dict[str, Any]]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--full")
    all_of_them = [(version, target) for version in VERSIONS for target in TARGETS]
    metafunc.parametrize(
        ("version", "target"), all_of_them if full else [(INSTALLED, "90")], scope="session"
    )


def memory_of(variant: dict[str, Any]) -> list[int]:
    """Return bytes that a thread keeps in memory, and what moves them."""
    memory = variant["memory_of_a_thread"]
    if "stack" in memory:
        return [memory["stack"] + memory["local"], memory["spills"]]
    assert memory["sgpr_spill_count"] <= MOST_SCALARS, variant
    return [memory["private_segment_fixed_size"], memory["vgpr_spill_count"]]


def test_scans_spill_what_the_table_says(
    compile_scans: Compile, request: pytest.FixtureRequest, version: str, target: str
) -> None:
    full = request.config.getoption("--full")
    measured = compile_scans(version, target, "scans" if full else "some_scans")
    near = [variant for variant in measured if not variant["inputs"].endswith(", past 2 GiB")]
    if full:
        assert len(near) == NUM_VARIANTS
    found = {
        f"{variant['kernel']}: {variant['inputs']}": memory_of(variant) for variant in measured
    }
    known = json.loads(SPILLS.read_text())[version][target]
    assert {name: memory for name, memory in found.items() if any(memory)} == known
