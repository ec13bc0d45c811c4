"""What the compiler makes of every kernel variant that the launchers can launch.

The interpreter sees neither the width of a memory access nor registers, so this looks at the
machine code: SASS for NVIDIA, the assembly for AMD.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from trajpack.kernels import (
    build_triton,
    discounted_returns_triton,
    gather_words_triton,
    pad_triton,
)
from trajpack.kernels.build import FIELD_DTYPES

TARGETS = ("80", "90", "gfx942")
REGISTERS = {
    ("build_kernel", "80"): 48,  # five blocks of 256 threads share the 65,536 registers
    ("build_kernel", "90"): 48,
    ("build_kernel", "gfx942"): 64,  # eight waves share the 512 registers of a SIMD lane
    ("discounted_returns_kernel", "80"): 96,  # five blocks of 128 threads
    ("discounted_returns_kernel", "90"): 96,
    ("discounted_returns_kernel", "gfx942"): 80,  # six waves
    ("superblock_sums_kernel", "80"): 64,  # eight blocks
    ("superblock_sums_kernel", "90"): 64,
    ("superblock_sums_kernel", "gfx942"): 64,
    ("superblock_returns_kernel", "80"): 80,  # six blocks
    ("superblock_returns_kernel", "90"): 80,
    ("superblock_returns_kernel", "gfx942"): 64,
    ("gather_words_kernel", "80"): 56,  # nine blocks of 128 threads
    ("gather_words_kernel", "90"): 56,
    ("gather_words_kernel", "gfx942"): 64,
    ("pad_kernel", "80"): 96,  # five blocks of 128 threads, for rows of odd bytes
    ("pad_kernel", "90"): 96,
    ("pad_kernel", "gfx942"): 128,
    ("unpad_kernel", "80"): 128,  # four blocks
    ("unpad_kernel", "90"): 128,
    ("unpad_kernel", "gfx942"): 168,  # three waves
}
SCANS = {
    "discounted_returns_kernel": 2,
    "superblock_sums_kernel": 1,
    "superblock_returns_kernel": 2,
}
"""Scans in each kernel of discounted returns: of blocks, and of superblocks."""
ROW_KERNELS = ("pad_kernel", "unpad_kernel")
WIDEST = 16
"""Bytes that one memory instruction of a thread moves at most."""

UNITS = (1, 2, 4, 8, 16)
"""Bytes that the row kernels move together."""

Variant = dict[str, Any]


def variants_of(compiled: dict[str, Any], kernel: str, target: str) -> list[Variant]:
    return [v for v in compiled["variants"] if (v["kernel"], v["target"]) == (kernel, target)]


def unit_of(variant: Variant) -> int:
    return int(variant["inputs"].split(",")[0].split()[2])


def counts(accesses: dict[str, int]) -> Counter[int]:
    return Counter({int(width): count for width, count in accesses.items()})


def full_width(dtypes: list[torch.dtype], block: int, threads: int) -> Counter[int]:
    """Stores of a thread, by bytes, when it writes its tokens of each field as wide as can be."""
    stores: Counter[int] = Counter()
    for dtype in dtypes:
        share = dtype.itemsize * block // threads
        stores[min(share, WIDEST)] += max(share // WIDEST, 1)
    return stores


@pytest.fixture(params=REGISTERS, ids="-".join)
def variants(request: pytest.FixtureRequest, compiled: dict[str, Any]) -> list[Variant]:
    """All variants of one kernel for one target."""
    return variants_of(compiled, *request.param)


@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_is_compiled(compiled: dict[str, Any], target: str) -> None:
    inputs = {"aligned", "unaligned"}
    if target == "gfx942":
        inputs |= {f"{kind}, past 2 GiB" for kind in inputs}
    built = variants_of(compiled, "build_kernel", target)
    assert sorted(v["inputs"] for v in built) == sorted(inputs)
    expected = {(kind, dtype) for kind in inputs for dtype in ("*fp32", "*fp64")}
    for kernel in SCANS:
        scanned = variants_of(compiled, kernel, target)
        assert sorted((v["inputs"], v["rewards"]) for v in scanned) == sorted(expected)
    assert {v["inputs"] for v in variants_of(compiled, "gather_words_kernel", target)} == inputs
    rows = {f"{kind} x {unit}" for unit in UNITS for kind in ("1", "3")}
    rows |= {f"3 x {unit} unaligned" for unit in UNITS}
    if target == "gfx942":
        rows |= {f"{kind}, past 2 GiB" for kind in rows}
    for kernel in ROW_KERNELS:
        assert sorted(v["inputs"] for v in variants_of(compiled, kernel, target)) == sorted(rows)


def test_no_thread_spills_or_has_a_stack(variants: list[Variant]) -> None:
    for variant in variants:
        assert set(variant["memory_of_a_thread"].values()) == {0}, variant


def test_registers_stay_under_the_ceiling(variants: list[Variant]) -> None:
    for variant in variants:
        ceiling = REGISTERS[variant["kernel"], variant["target"]]
        assert 0 < variant["registers"] <= ceiling, variant


def test_nothing_is_added_atomically(variants: list[Variant]) -> None:
    for variant in variants:
        assert variant["atomics"] == 0, variant


@pytest.mark.parametrize("target", TARGETS)
def test_build_stores_every_field_at_full_width_once_in_each_branch(
    compiled: dict[str, Any], target: str
) -> None:
    for variant in variants_of(compiled, "build_kernel", target):
        branch = full_width(
            list(FIELD_DTYPES.values()), build_triton.BLOCK, variant["threads"]
        )  # a tile inside one run is one branch, a tile over several the other
        assert counts(variant["stores"]) == branch + branch, variant


@pytest.mark.parametrize("target", ["80", "90"])
def test_build_stores_are_not_masked(compiled: dict[str, Any], target: str) -> None:
    for variant in variants_of(compiled, "build_kernel", target):
        assert variant["masked_stores"] == 0, variant


@pytest.mark.parametrize("target", ["80", "90"])
def test_build_reads_the_stream_word_by_word(compiled: dict[str, Any], target: str) -> None:
    """A run may begin at any word: a wider load would fault where it is not aligned."""
    for variant in variants_of(compiled, "build_kernel", target):
        assert set(counts(variant["loads"])) == {4}, variant


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", ["discounted_returns_kernel", "superblock_returns_kernel"])
def test_returns_are_stored_once_each_behind_a_mask(
    compiled: dict[str, Any], kernel: str, target: str
) -> None:
    """Rows end where segments end, so these stores are masked, and one float32 wide."""
    entries = discounted_returns_triton.ROWS * discounted_returns_triton.BLOCK
    for variant in variants_of(compiled, kernel, target):
        stores = entries // variant["threads"]
        assert counts(variant["stores"]) == {4: stores}, variant
        assert variant["masked_stores"] in (stores, None), variant


@pytest.mark.parametrize("target", TARGETS)
def test_a_superblock_leaves_one_sum(compiled: dict[str, Any], target: str) -> None:
    for variant in variants_of(compiled, "superblock_sums_kernel", target):
        assert counts(variant["stores"]) == {8: 1}, variant


@pytest.mark.parametrize("target", TARGETS)
def test_every_scan_of_returns_has_the_same_layout(compiled: dict[str, Any], target: str) -> None:
    """So sums are made in the same order, however a segment is cut and whatever its dtype."""
    layouts = set()
    for kernel, scans in SCANS.items():
        for variant in variants_of(compiled, kernel, target):
            assert len(variant["scans"]) == scans, variant
            layouts |= {(variant["threads"], scan) for scan in variant["scans"]}
    ((_, layout),) = layouts
    shape = f"tensor<{discounted_returns_triton.ROWS}x{discounted_returns_triton.BLOCK}xf64, #ttg"
    assert layout.count(shape) == 2, "gains and sums"


def test_returns_take_one_launch_where_no_segment_is_long(compiled: dict[str, Any]) -> None:
    segments = ["discounted_returns_kernel", 1]  # three segments
    superblocks = [["superblock_sums_kernel", 2], ["superblock_returns_kernel", 3]]  # 9 windows
    assert {(c["entries"], c["max_seqlen"]): c["launches"] for c in compiled["returns"]} == {
        (8192, None): [segments],
        (8193, None): superblocks,
        (8193, 4096): [segments],
        (8193, 4097): superblocks,
        (0, None): [],
    }


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", ROW_KERNELS)
def test_rows_are_stored_at_full_width_once_and_unmasked(
    compiled: dict[str, Any], kernel: str, target: str
) -> None:
    for variant in variants_of(compiled, kernel, target):
        element = pad_triton.ELEMENTS[min(unit_of(variant), 8)]
        block = pad_triton.BLOCKS[element.itemsize]
        stores = full_width([element], block, variant["threads"])
        assert set(stores) == {WIDEST}
        assert counts(variant["stores"]) == stores, variant
        assert variant["masked_stores"] in (0, None), variant


@pytest.mark.parametrize("target", ["80", "90"])
@pytest.mark.parametrize("kernel", ROW_KERNELS)
def test_rows_are_loaded_unit_by_unit_and_no_wider(
    compiled: dict[str, Any], kernel: str, target: str
) -> None:
    """Units are as wide as rows lie: a wider load would fault, a narrower one be slow."""
    for variant in variants_of(compiled, kernel, target):
        unit = unit_of(variant)
        element = min(unit, 8)
        units = element * pad_triton.BLOCKS[element] // unit // variant["threads"]
        loads = counts(variant["loads"])
        assert max(loads) == max(unit, 4), variant  # boundaries are read by 4 bytes
        assert set(loads) == {unit, 4}, variant
        assert loads[unit] == units or unit == 4, variant


@pytest.mark.parametrize("target", ["80", "90"])
@pytest.mark.parametrize("kernel", ROW_KERNELS)
def test_rows_of_words_leave_room_for_eight_blocks(
    compiled: dict[str, Any], kernel: str, target: str
) -> None:
    for variant in variants_of(compiled, kernel, target):
        if unit_of(variant) > 1:
            assert variant["registers"] <= 64, variant


@pytest.mark.parametrize("target", TARGETS)
def test_gathered_words_are_stored_at_full_width_once_and_unmasked(
    compiled: dict[str, Any], target: str
) -> None:
    for variant in variants_of(compiled, "gather_words_kernel", target):
        stores = full_width([torch.int32], gather_words_triton.BLOCK, variant["threads"])
        assert counts(variant["stores"]) == stores, variant
        assert variant["masked_stores"] in (0, None), variant


@pytest.mark.parametrize("target", ["80", "90"])
def test_pieces_are_loaded_entry_by_entry(compiled: dict[str, Any], target: str) -> None:
    """An address says nothing of alignment: a load wider than an entry would fault."""
    for variant in variants_of(compiled, "gather_words_kernel", target):
        share = gather_words_triton.BLOCK // variant["threads"]
        loads = counts(variant["loads"])
        assert set(loads) == {1, 2, 4, 8}, variant
        # int8 and uint8; int16, bfloat16 and float16; int32; int64 and float64 and the table
        assert (loads[1], loads[2]) == (2 * share, 3 * share), variant
        assert loads[4] >= share, variant


@pytest.mark.parametrize("target", TARGETS)
def test_a_store_behind_an_unknown_mask_would_be_noticed(
    compiled: dict[str, Any], target: str
) -> None:
    (planted,) = variants_of(compiled, "masked_kernel", target)
    assert counts(planted["stores"]) != full_width([torch.int32], 1024, planted["threads"])
    assert planted["masked_stores"] != 0


@pytest.mark.parametrize("target", ["80", "90"])
def test_a_promised_alignment_would_be_noticed(compiled: dict[str, Any], target: str) -> None:
    (planted,) = variants_of(compiled, "hinted_kernel", target)
    assert counts(planted["stores"]) == full_width([torch.int32], 1024, planted["threads"])
    assert set(counts(planted["loads"])) != {4}
