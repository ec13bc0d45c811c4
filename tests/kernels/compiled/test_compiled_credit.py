"""What the compiler makes of the kernels of scans over tokens."""

from __future__ import annotations

from typing import Any

import pytest

from trajpack.kernels.block_shapes import DEFAULT, block_shape
from trajpack.kernels.scan import credit_scan_triton

TARGETS = ("80", "90", "gfx942")
KERNELS = ("walk_kernel", "block_steps_kernel", "block_states_kernel")
WRITING = ("walk_kernel", "block_states_kernel")
SCANS = {
    "carry": 2,
    "reset, float64, a rate each": 2,
    "returns": 1,
    "returns of turns, float64, a rate each": 1,
    "gradient": 1,
    "next values": 1,
    "vtrace, multiply": 2,
    "chunks, vtrace": 2,
    "chunks, k3": 2,
    "chunks, by turn": 2,
}
"""What is scanned, and how many tensors it puts out."""


def scan_of(variant: dict[str, Any]) -> str:
    return str(variant["inputs"]).removesuffix(", past 2 GiB")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_variant_is_compiled(compiled: Any, kernel: str, target: str) -> None:
    expected = set(SCANS)
    if target == "gfx942":
        expected |= {f"{scan}, past 2 GiB" for scan in SCANS}
    found = [variant["inputs"] for variant in compiled.variants(kernel, target)]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("target", TARGETS)
def test_every_scan_has_the_same_layout(compiled: Any, target: str) -> None:
    """So sums are made in the same order, however a segment is cut and whatever is scanned."""
    layouts = set()
    for kernel in KERNELS:
        for variant in compiled.variants(kernel, target):
            assert len(variant["scans"]) == 1, variant
            layouts.add((variant["threads"], *variant["scans"]))
    ((threads, layout),) = layouts
    assert threads == block_shape("credit_scan", DEFAULT).threads
    lanes = credit_scan_triton.BLOCK // 4
    assert layout.count(f"tensor<{lanes}xf64, #ttg") == 2, "gains and gifts of four tokens"


@pytest.mark.parametrize("target", TARGETS)
def test_a_block_leaves_a_gain_and_a_gift(compiled: Any, target: str) -> None:
    for variant in compiled.variants("block_steps_kernel", target):
        stored = sum(width * count for width, count in variant["stores"].items())
        assert stored == 2 * 8, variant


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", WRITING)
def test_tokens_are_stored_once_each(compiled: Any, kernel: str, target: str) -> None:
    """Segments end anywhere and are walked backward, so a store is one token wide."""
    for variant in compiled.variants(kernel, target):
        scan = scan_of(variant)
        width = 8 if scan == "next values" else 4
        stores = SCANS[scan] * credit_scan_triton.BLOCK // variant["threads"]
        if "chunks" in scan and "by turn" not in scan:
            stores *= 2  # of tokens that no chunk holds, too
        assert variant["stores"] == {width: stores}, variant


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_reads(compiled: Any, kernel: str, target: str) -> None:
    """Rewards and, where there are any, values and a mask; float64 where rewards are."""
    share = credit_scan_triton.BLOCK // block_shape("credit_scan", DEFAULT).threads
    for variant in compiled.variants(kernel, target):
        scan = scan_of(variant)
        loads = variant["loads"]
        if "returns of turns" not in scan:
            assert loads[4] >= share, variant
        if "chunks" not in scan and "turns" not in scan:
            assert loads[1] >= share, variant
        if "float64" in scan:
            assert loads[8] >= share, variant


def test_returns_take_one_launch_where_no_segment_is_long(compiled: Any) -> None:
    walk = [["walk_kernel", 3]]  # three segments
    blocks = [["block_steps_kernel", 17], ["block_states_kernel", 20]]  # 17 windows
    assert {(c["entries"], c["max_seqlen"]): c["launches"] for c in compiled["returns"]} == {
        (8192, None): walk,
        (8193, None): blocks,
        (8193, 4096): walk,
        (8193, 4097): blocks,
        (0, None): [],
    }
