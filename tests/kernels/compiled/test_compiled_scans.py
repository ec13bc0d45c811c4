"""Compiled code of the scans over tokens.

Every kind of scan with every observation, with the least and the most inputs, makes 60 variants of
the first kernel of long scans and 120 of the scan. None spills more than a few words. `make
variants` compiles all of them, with every Triton and for every target; without `--full` the
installed Triton compiles a few for sm_90.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.kernels.compiled.test_compiled import MOST_SPILLED
from tests.kernels.conftest import INSTALLED, TARGETS, VERSIONS
from trajpack.kernels.block_shapes import DEFAULT, block_shape
from trajpack.kernels.scan import credit_scan_triton

KERNELS = ("effects_kernel", "scan_kernel")
ONE_OUTPUT = {"returns", "returns of turns, float64, a rate each", "gradient"}
"""Scans with one output; the others have two."""
NUM_VARIANTS = 180
MOST_SCALARS = 112
"""Scalars that do not fit go to lanes of vector registers on gfx942, and not to memory."""


def share_of(variant: dict[str, Any]) -> int:
    """Return the entries of a thread."""
    return int(credit_scan_triton.BLOCK // variant["threads"])


def scan_of(variant: dict[str, Any]) -> str:
    return str(variant["inputs"]).removesuffix(", past 2 GiB").removesuffix(", in rows")


def test_a_block_is_a_warp_of_eight_entries_a_lane(compiled: Any) -> None:
    """So sums are made in the same order, whatever is scanned."""
    wave = 32 if compiled.is_nvidia else 64
    for kernel in KERNELS:
        for variant in compiled.variants(kernel):
            assert variant["threads"] == max(block_shape("credit_scan", DEFAULT).threads, wave)


def test_a_row_leaves_a_decay_and_an_increment_of_each_state(compiled: Any) -> None:
    for variant in compiled.variants("effects_kernel"):
        stored = sum(width * count for width, count in variant["stores"].items())
        assert stored == (5 if "vtrace" in variant["inputs"] else 2) * 8, variant


def test_tokens_are_stored_once_each(compiled: Any) -> None:
    """Segments end anywhere and are walked backward, so a store is one token wide."""
    for variant in compiled.variants("scan_kernel"):
        scan = scan_of(variant)
        stores = share_of(variant) * (1 if scan in ONE_OUTPUT else 2)
        fills = "chunks" in scan and "by turn" not in scan
        filled = credit_scan_triton.FILLED.value * stores * fills
        assert variant["stores"] == {4: stores + filled}, variant


def test_loads_of_a_block_are_in_flight_together(compiled: Any) -> None:
    """Those of tokens, and of the rows' effects in the kernel that folds them."""
    for variant in compiled.variants("effects_kernel") + compiled.variants("scan_kernel"):
        if compiled.is_nvidia and "chunks" not in scan_of(variant):
            folds = variant["kernel"] == "scan_kernel" and "in rows" in variant["inputs"]
            tokens = 2 * share_of(variant) if variant["loads"][1] else share_of(variant)
            assert variant["in_flight"] >= (6 if folds else tokens), variant


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_reads(compiled: Any, kernel: str) -> None:
    """Rewards, and values and a mask where there are any; float64 where rewards are."""
    for variant in compiled.variants(kernel):
        scan, loads, share = scan_of(variant), variant["loads"], share_of(variant)
        if "returns of turns" not in scan:
            assert loads[4] >= share, variant
        if "chunks" not in scan and "turns" not in scan:
            assert loads[1] >= share, variant
        if "float64" in scan:
            assert loads[8] >= share, variant


MOST_BYTES, MOST_SPILLS = MOST_SPILLED["scan_kernel"], 32
"""Most bytes that a scan keeps in a thread's memory, and the instructions that move them. With the
limit of registers that makes some scans keep so many, an SM holds more warps: an H200 is faster."""


def memory_of(variant: dict[str, Any]) -> list[int]:
    """Return the bytes that a thread keeps in memory, and the instructions that move them."""
    memory = variant["memory_of_a_thread"]
    if "stack" in memory:
        return [memory["stack"] + memory["local"], memory["spills"]]
    assert memory["sgpr_spill_count"] <= MOST_SCALARS, variant
    return [memory["private_segment_fixed_size"], memory["vgpr_spill_count"]]


def spilled(measured: list[dict[str, Any]]) -> dict[str, list[int]]:
    found = {
        f"{variant['kernel']}: {variant['inputs']}": memory_of(variant) for variant in measured
    }
    return {name: memory for name, memory in found.items() if any(memory)}


def much_of(measured: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Return what keeps more than a few words in memory."""
    return {
        name: memory
        for name, memory in spilled(measured).items()
        if memory[0] > MOST_BYTES or memory[1] > MOST_SPILLS
    }


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [(INSTALLED, "90", "every")], indirect=True, ids="-".join)
def test_some_scans_spill_a_few_words_at_most(compiled: Any) -> None:
    assert compiled["scans"]
    assert much_of(compiled["scans"]) == {}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("version", VERSIONS)
def test_no_scan_spills_more_than_a_few_words(
    request: pytest.FixtureRequest, compile_scans: Callable[..., Any], version: str, target: str
) -> None:
    if not request.config.getoption("--full"):
        pytest.skip("takes a quarter of an hour; `make variants` runs it")
    measured = compile_scans(version, target)
    near = [variant for variant in measured if not variant["inputs"].endswith(", past 2 GiB")]
    assert len(near) == NUM_VARIANTS
    assert much_of(measured) == {}
