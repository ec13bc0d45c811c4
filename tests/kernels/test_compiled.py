"""What the compiler makes of every kernel variant that the launchers can launch.

The interpreter sees neither the width of a memory access nor registers, so this looks at the
machine code: SASS for NVIDIA, the assembly for AMD.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from trajpack.kernels import build_triton, discounted_returns_triton
from trajpack.kernels.build import FIELD_DTYPES

TARGETS = ("80", "90", "gfx942")
REGISTERS = {
    ("build_kernel", "80"): 48,  # five blocks of 256 threads share the 65,536 registers
    ("build_kernel", "90"): 48,
    ("build_kernel", "gfx942"): 64,  # eight waves share the 512 registers of a SIMD lane
    ("discounted_returns_kernel", "80"): 168,  # three blocks of 128 threads
    ("discounted_returns_kernel", "90"): 168,
    ("discounted_returns_kernel", "gfx942"): 128,  # four waves; 104 with Triton 3.6 past 2 GiB
}
WIDEST = 16
"""Bytes that one memory instruction of a thread moves at most."""

Variant = dict[str, Any]


def variants_of(compiled: dict[str, Any], kernel: str, target: str) -> list[Variant]:
    return [v for v in compiled["variants"] if (v["kernel"], v["target"]) == (kernel, target)]


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
    scanned = variants_of(compiled, "discounted_returns_kernel", target)
    expected = {(kind, dtype) for kind in inputs for dtype in ("*fp32", "*fp64")}
    assert sorted((v["inputs"], v["rewards"]) for v in scanned) == sorted(expected)


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
def test_returns_are_stored_once_each_behind_a_mask(compiled: dict[str, Any], target: str) -> None:
    """Rows end where segments end, so these stores are masked, and one float32 wide."""
    entries = discounted_returns_triton.ROWS * discounted_returns_triton.BLOCK
    for variant in variants_of(compiled, "discounted_returns_kernel", target):
        stores = entries // variant["threads"]
        assert counts(variant["stores"]) == {4: stores}, variant
        assert variant["masked_stores"] in (stores, None), variant


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
