"""What the compiler makes of the kernels of moments and whitening."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from trajpack.kernels.block_shapes import DEFAULT, block_shape
from trajpack.kernels.reduce import whiten_triton

TARGETS = ("80", "90", "gfx942")
OF_ENTRIES = ("chunk_moments_kernel", "whiten_kernel", "whiten_by_sums_kernel")
KERNELS = (*OF_ENTRIES, "merge_chunks_kernel")
WHITENING = ("whiten_kernel", "whiten_by_sums_kernel")
SHARE = whiten_triton.CHUNK // block_shape("whiten", DEFAULT).threads
"""Entries of a thread."""
REGISTERS = {"80": 112, "90": 112, "gfx942": 128}
"""Two blocks of 256 threads at least, 40 KB of loads; a SIMD of gfx942 holds four waves."""
MOMENTS = 5
SUMS = 3


def itemsize(variant: dict[str, Any]) -> int:
    return 8 if variant["inputs"].startswith("float64") else 4


@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_is_compiled(compiled: Any, target: str) -> None:
    for kernel in KERNELS:
        inputs = {"float32", "float64"} if kernel in OF_ENTRIES else {"partials"}
        if target == "gfx942":
            inputs |= {f"{kind}, past 2 GiB" for kind in inputs}
        variants = compiled.variants(kernel, target)
        assert sorted(v["inputs"] for v in variants) == sorted(inputs)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_thread_fits_and_adds_nothing_atomically(compiled: Any, kernel: str, target: str) -> None:
    for variant in compiled.variants(kernel, target):
        assert 0 < variant["registers"] <= REGISTERS[target], variant
        assert set(variant["memory_of_a_thread"].values()) == {0}, variant
        assert variant["atomics"] == 0, variant


@pytest.mark.parametrize("target", ["80", "90"])
@pytest.mark.parametrize("kernel", WHITENING)
def test_whitened_entries_are_stored_at_full_width_once_and_unmasked(
    compiled: Any, kernel: str, target: str
) -> None:
    """Beside them the first program alone stores moments, one by one."""
    moments = MOMENTS if kernel == "whiten_kernel" else 0
    for variant in compiled.variants(kernel, target):
        assert variant["stores"] == Counter({16: SHARE // 4}) + Counter({8: moments}), variant
        assert variant["masked_stores"] <= moments, variant


@pytest.mark.parametrize("target", ["gfx942"])
@pytest.mark.parametrize("kernel", WHITENING)
def test_whitened_entries_are_stored_at_full_width_on_amd_too(
    compiled: Any, kernel: str, target: str
) -> None:
    """There moments may be stored two by two."""
    for variant in compiled.variants(kernel, target):
        assert set(variant["stores"]) <= {8, 16}, variant
        assert SHARE // 4 <= variant["stores"][16] <= SHARE // 4 + 2, variant
        assert sum(variant["stores"].values()) <= SHARE // 4 + MOMENTS, variant


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", OF_ENTRIES)
def test_whole_chunks_are_loaded_at_full_width(compiled: Any, kernel: str, target: str) -> None:
    """The last chunk, which may have an end, is loaded entry by entry in a branch of its own."""
    for variant in compiled.variants(kernel, target):
        size, loads = itemsize(variant), variant["loads"]
        assert loads[16] == SHARE * size // 16, variant
        assert loads[1] == SHARE, variant  # the last mask
        assert loads[4] == SHARE // 4 + (SHARE if size == 4 else 0), variant  # masks, last entries


@pytest.mark.parametrize("target", TARGETS)
def test_whitening_by_sums_shares_nothing_between_threads(compiled: Any, target: str) -> None:
    """So what is loaded stands where it is stored from."""
    for variant in compiled.variants("whiten_by_sums_kernel", target):
        assert (variant["shuffles"], variant["barriers"]) == (0, 0), variant


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kernel", "shuffles"),
    [("chunk_moments_kernel", 72), ("merge_chunks_kernel", 80), ("whiten_kernel", 80)],
)
def test_sums_shuffle_and_wait_no_more_than_they_did(
    compiled: Any, kernel: str, shuffles: int, target: str
) -> None:
    """Five sums, each within a warp, then between warps."""
    for variant in compiled.variants(kernel, target):
        assert 0 < variant["shuffles"] <= shuffles, variant
        assert variant["barriers"] <= 14, variant


@pytest.mark.parametrize("target", TARGETS)
def test_merged_moments_and_sums_are_stored_once(compiled: Any, target: str) -> None:
    for variant in compiled.variants("merge_chunks_kernel", target):
        stored = sum(width * count for width, count in variant["stores"].items())
        assert stored == 8 * (MOMENTS + SUMS), variant
