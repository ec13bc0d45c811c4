"""Compiled code of the scans over tokens.

Every kind of scan with every observation, with the least and the most inputs, makes 216 variants,
and none spills. `make variants` compiles all of them, with every Triton and for every target;
without `--full` the installed Triton compiles a twelfth for sm_90.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.kernels.conftest import INSTALLED, TARGETS, VERSIONS, builds
from trajpack.kernels.block_shapes import DEFAULT, block_shape
from trajpack.kernels.scan import credit_scan_triton

KERNELS = ("walk_kernel", "block_steps_kernel", "block_states_kernel")
ONE_OUTPUT = {"returns", "returns of turns, float64, a rate each", "gradient", "next values"}
"""Scans with one output; the others have two."""
NUM_VARIANTS = 216
MOST_SCALARS = 80
"""Scalars that do not fit go to lanes of vector registers on gfx942, and not to memory."""


def share_of(variant: dict[str, Any]) -> int:
    """Return the entries of a thread."""
    return int(credit_scan_triton.BLOCK // variant["threads"])


def scan_of(variant: dict[str, Any]) -> str:
    return str(variant["inputs"]).removesuffix(", past 2 GiB")


def test_every_scan_has_the_same_layout(compiled: Any) -> None:
    """So sums are made in the same order, whatever is scanned; rows are as wide as blocks.

    Segments that share a block are scanned with the lanes in which they begin, between sums of
    the lanes that they take.
    """
    layouts = set()
    for kernel in KERNELS:
        for variant in compiled.variants(kernel):
            assert variant["scans"], variant
            steps = {re.sub(r"tensor<\d+xi32, [^>]*>+, ", "", scan) for scan in variant["scans"]}
            layouts |= {(variant["threads"], scan) for scan in steps if "xf64" in scan}
    ((threads, layout),) = layouts
    wave = 32 if compiled.is_nvidia else 64
    assert threads == max(block_shape("credit_scan", DEFAULT).threads, wave)
    lanes = credit_scan_triton.BLOCK // 4
    assert layout.count(f"tensor<{lanes}xf64, #ttg") == 2, "decays and increments of four tokens"


def test_a_block_leaves_a_decay_and_an_increment(compiled: Any) -> None:
    for variant in compiled.variants("block_steps_kernel"):
        stored = sum(width * count for width, count in variant["stores"].items())
        assert stored == 2 * 8, variant


@pytest.mark.parametrize("kernel", ["walk_kernel", "block_states_kernel"])
def test_tokens_are_stored_once_each(compiled: Any, kernel: str) -> None:
    """Segments end anywhere and are walked backward, so a store is one token wide.

    A walk has its stores twice: for one segment, and for several that share a block. With a λ for
    each segment none share.
    """
    for variant in compiled.variants(kernel):
        scan = scan_of(variant)
        stores = share_of(variant) * (1 if scan in ONE_OUTPUT else 2)
        filled = stores if "chunks" in scan and "by turn" not in scan else 0
        has_lambdas = "a rate each" in variant["inputs"] and "returns" not in scan
        shares = kernel == "walk_kernel" and not has_lambdas
        stores += filled + (stores if shares else 0)
        assert variant["stores"] == {8 if scan == "next values" else 4: stores}, variant


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


@builds("90")
def test_returns_take_one_launch_where_no_segment_is_long(compiled: Any) -> None:
    walk = [["walk_kernel", 3]]  # three segments
    # 65 windows, three rows of them
    blocks = [["block_steps_kernel", 65], ["fold_rows_kernel", 6], ["block_states_kernel", 68]]
    assert {(c["entries"], c["max_seqlen"]): c["launches"] for c in compiled["returns"]} == {
        (4096, None): walk,
        (8193, None): blocks,
        (8193, 4096): walk,
        (8193, 4097): blocks,
        (0, None): [],
    }


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


@pytest.mark.parametrize("compiled", [(INSTALLED, "90")], indirect=True, ids="-".join)
def test_some_scans_do_not_spill(compiled: Any) -> None:
    assert compiled["scans"]
    assert spilled(compiled["scans"]) == {}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("version", VERSIONS)
def test_no_scan_spills(
    request: pytest.FixtureRequest, compile_scans: Callable[..., Any], version: str, target: str
) -> None:
    if not request.config.getoption("--full"):
        pytest.skip("takes a quarter of an hour; `make variants` runs it")
    measured = compile_scans(version, target)
    near = [variant for variant in measured if not variant["inputs"].endswith(", past 2 GiB")]
    assert len(near) == NUM_VARIANTS
    assert spilled(measured) == {}
