"""What the compiler makes of the kernels of discounted returns."""

from __future__ import annotations

from typing import Any

import pytest

from trajpack.kernels.scan import discounted_returns_triton

TARGETS = ("80", "90", "gfx942")
SCANS = {
    "discounted_returns_kernel": 2,
    "superblock_sums_kernel": 1,
    "superblock_returns_kernel": 2,
}
"""Scans in each kernel of discounted returns: of blocks, and of superblocks."""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", SCANS)
def test_every_variant_is_compiled(compiled: Any, kernel: str, target: str) -> None:
    inputs = {"aligned", "unaligned"}
    if target == "gfx942":
        inputs |= {f"{kind}, past 2 GiB" for kind in inputs}
    expected = {(kind, dtype) for kind in inputs for dtype in ("*fp32", "*fp64")}
    variants = compiled.variants(kernel, target)
    assert sorted((v["inputs"], v["rewards"]) for v in variants) == sorted(expected)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", ["discounted_returns_kernel", "superblock_returns_kernel"])
def test_returns_are_stored_once_each_behind_a_mask(
    compiled: Any, kernel: str, target: str
) -> None:
    """Rows end where segments end, so these stores are masked, and one float32 wide."""
    entries = discounted_returns_triton.ROWS * discounted_returns_triton.BLOCK
    for variant in compiled.variants(kernel, target):
        stores = entries // variant["threads"]
        assert variant["stores"] == {4: stores}, variant
        assert variant["masked_stores"] in (stores, None), variant


@pytest.mark.parametrize("target", TARGETS)
def test_a_superblock_leaves_one_sum(compiled: Any, target: str) -> None:
    for variant in compiled.variants("superblock_sums_kernel", target):
        assert variant["stores"] == {8: 1}, variant


@pytest.mark.parametrize("target", TARGETS)
def test_every_scan_of_returns_has_the_same_layout(compiled: Any, target: str) -> None:
    """So sums are made in the same order, however a segment is cut and whatever its dtype."""
    layouts = set()
    for kernel, scans in SCANS.items():
        for variant in compiled.variants(kernel, target):
            assert len(variant["scans"]) == scans, variant
            layouts |= {(variant["threads"], scan) for scan in variant["scans"]}
    ((_, layout),) = layouts
    shape = f"tensor<{discounted_returns_triton.ROWS}x{discounted_returns_triton.BLOCK}xf64, #ttg"
    assert layout.count(shape) == 2, "gains and sums"


def test_returns_take_one_launch_where_no_segment_is_long(compiled: Any) -> None:
    segments = ["discounted_returns_kernel", 1]  # three segments
    superblocks = [["superblock_sums_kernel", 2], ["superblock_returns_kernel", 3]]  # 9 windows
    assert {(c["entries"], c["max_seqlen"]): c["launches"] for c in compiled["returns"]} == {
        (8192, None): [segments],
        (8193, None): superblocks,
        (8193, 4096): [segments],
        (8193, 4097): superblocks,
        (0, None): [],
    }
