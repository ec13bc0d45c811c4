"""What the compiler makes of the segment reductions."""

from __future__ import annotations

from typing import Any

import pytest

from trajpack.kernels.reduce import segment_reduce_triton

TARGETS = ("80", "90", "gfx942")
ROWS = {
    "sum of float32",
    "sum of float64, masked",
    "sum of bool",
    "mean of float32, masked",
    "max of float32, masked",
    "max of int64",
}
CHUNKS = {"sum of float32", "mean of float32, masked"}
KERNELS = {
    "segment_reduce_kernel": ROWS,
    "chunk_partials_kernel": CHUNKS,
    "chunk_fold_kernel": CHUNKS,
}
REGISTERS = {"80": 40, "90": 40, "gfx942": 64}
"""Twelve blocks of 128 threads share the 65,536 registers; eight waves those of a SIMD lane."""


def label_of(variant: dict[str, Any]) -> str:
    return str(variant["inputs"]).removesuffix(", past 2 GiB")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_variant_is_compiled(compiled: Any, kernel: str, target: str) -> None:
    expected = set(KERNELS[kernel])
    if target == "gfx942":
        expected |= {f"{label}, past 2 GiB" for label in expected}
    variants = compiled.variants(kernel, target)
    assert sorted(v["inputs"] for v in variants) == sorted(expected)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_threads_are_light_and_keep_everything_in_registers(
    compiled: Any, kernel: str, target: str
) -> None:
    for variant in compiled.variants(kernel, target):
        assert variant["registers"] <= REGISTERS[target], variant
        assert not any(variant["memory_of_a_thread"].values()), variant
        assert variant["atomics"] == 0, variant


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", ["segment_reduce_kernel", "chunk_fold_kernel"])
def test_a_row_leaves_one_result(compiled: Any, kernel: str, target: str) -> None:
    for variant in compiled.variants(kernel, target):
        width = 4 if "of float32" in variant["inputs"] else 8
        assert variant["stores"] == {width: 1}, variant


@pytest.mark.parametrize("target", TARGETS)
def test_a_chunk_leaves_one_sum_and_one_count_of_a_lane(compiled: Any, target: str) -> None:
    lanes = segment_reduce_triton.ROWS * segment_reduce_triton.LANES
    for variant in compiled.variants("chunk_partials_kernel", target):
        assert variant["threads"] == lanes
        expected = {8: 1, 4: 1} if label_of(variant).startswith("mean") else {8: 1}
        assert variant["stores"] == expected, variant


@pytest.mark.parametrize("target", TARGETS)
def test_entries_are_loaded_once_and_several_are_under_way(compiled: Any, target: str) -> None:
    for variant in compiled.variants("segment_reduce_kernel", target):
        label, steps = label_of(variant), segment_reduce_triton.STEPS
        width = 8 if "64" in label else 1 if "bool" in label else 4
        expected = {width: steps}
        expected[4] = expected.get(4, 0) + 2  # where the segment begins, and where it ends
        if "masked" in label:
            expected[1] = steps
        assert variant["loads"] == expected, variant
