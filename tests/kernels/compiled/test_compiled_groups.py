"""What the compiler makes of the kernel of group statistics."""

from __future__ import annotations

from typing import Any

import pytest

from trajpack.kernels.block_shapes import DEFAULT, block_shape
from trajpack.kernels.groups import group_advantages_triton

KERNEL = "group_advantages_kernel"
TARGETS = ("80", "90", "gfx942")
INPUTS = {
    "mean by std",
    "mean by std, valid",
    "length_weighted",
    "mean by nonzero, valid",
    "second_best by std",
    "leave_one_out by leave_one_out_std, valid",
    "none by std_about_baseline",
}
REGISTERS = {"80": 128, "90": 128, "gfx942": 72}
"""Two blocks of 256 threads share the 65,536 registers; seven waves those of a SIMD lane."""
SHUFFLES = {"80": 260, "90": 260, "gfx942": 330}
BARRIERS = {"80": 38, "90": 38, "gfx942": 18}
"""Whether a chunk holds a member, three times, and sums over a tile at the end of each walk."""


@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_is_compiled(compiled: Any, target: str) -> None:
    inputs = INPUTS
    if target == "gfx942":
        inputs = inputs | {f"{kind}, past 2 GiB" for kind in inputs}
    assert {v["inputs"] for v in compiled.variants(KERNEL, target)} == inputs


@pytest.mark.parametrize("target", TARGETS)
def test_a_thread_fits_and_adds_nothing_atomically(compiled: Any, target: str) -> None:
    for variant in compiled.variants(KERNEL, target):
        assert 0 < variant["registers"] <= REGISTERS[target], variant
        assert set(variant["memory_of_a_thread"].values()) == {0}, variant
        assert variant["atomics"] == 0, variant


@pytest.mark.parametrize("target", TARGETS)
def test_warps_wait_no_more_than_they_did(compiled: Any, target: str) -> None:
    for variant in compiled.variants(KERNEL, target):
        assert variant["shuffles"] <= SHUFFLES[target], variant
        assert variant["barriers"] <= BARRIERS[target], variant


@pytest.mark.parametrize("target", TARGETS)
def test_a_member_is_stored_by_the_row_of_its_group_or_by_none(compiled: Any, target: str) -> None:
    """Each pair of the tile stores behind its own mask, and then the members of no group."""
    block = block_shape(KERNEL, DEFAULT).block
    for variant in compiled.variants(KERNEL, target):
        groups = group_advantages_triton.GROUPS
        if "leave_one_out_std" in variant["inputs"]:
            groups = group_advantages_triton.GROUPS_OF_OTHERS
        stores = groups * block // variant["threads"] + 1
        assert variant["stores"] == {4: stores}, variant
        assert variant["masked_stores"] in (stores, None), variant


def test_any_groups_are_one_launch(compiled: Any) -> None:
    launches = compiled["launches_on_meta"]["launches"]
    assert launches[KERNEL] == len(INPUTS)
