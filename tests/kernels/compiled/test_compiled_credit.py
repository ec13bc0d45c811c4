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
    "gradient": 1,
    "next values": 1,
    "vtrace, multiply": 2,
    "pieces, vtrace": 2,
    "pieces, k3": 2,
    "pieces, by turn": 2,
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
        if "pieces" in scan and "by turn" not in scan:
            stores *= 2  # of tokens that no piece holds, too
        assert variant["stores"] == {width: stores}, variant


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_reads(compiled: Any, kernel: str, target: str) -> None:
    """Rewards and, where there are any, values and a mask; float64 where rewards are."""
    share = credit_scan_triton.BLOCK // block_shape("credit_scan", DEFAULT).threads
    for variant in compiled.variants(kernel, target):
        scan = scan_of(variant)
        loads = variant["loads"]
        assert loads[4] >= share, variant
        if "pieces" not in scan:
            assert loads[1] >= share, variant
        if "float64" in scan:
            assert loads[8] >= share, variant
