"""What the compiler makes of the kernels that copy: every store full width, no load too wide."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from trajpack.kernels.block_shapes import block_shape
from trajpack.kernels.fields.build import FIELD_DTYPES
from trajpack.kernels.fields.gather_fields import UNITS as UNITS_OF

TARGETS = ("80", "90", "gfx942")
ARCHITECTURES = {"80": "sm_80", "90": "sm_90", "gfx942": "gfx942"}
ROW_KERNELS = ("pad_kernel", "unpad_kernel")
WIDEST = 16
"""Bytes that one memory instruction of a thread moves at most."""

UNITS = (1, 2, 4, 8, 16)
"""Bytes that the row kernels move together."""


def unit_of(variant: dict[str, Any]) -> int:
    return int(variant["inputs"].split(",")[0].split()[2])


def fields_of(variant: dict[str, Any]) -> list[int]:
    """Return the units of a variant of gather_fields, field by field."""
    fields = variant["inputs"].split(",")[0].split(" and ")
    return [int(field.split(" x ")[1]) for field in fields]


def block_of(variant: dict[str, Any], element: int | None = None) -> int:
    """Return the elements of a tile, as the table has it for the variant's target."""
    of_element = "" if element is None else f", elements of {element}"
    target = ARCHITECTURES[variant["target"]]
    shape = block_shape(variant["kernel"] + of_element, target)
    assert shape.threads == variant["threads"]
    return shape.block


def with_far(inputs: set[str], target: str) -> set[str]:
    """Return ``inputs`` and, where offsets of more than 32 bits are compiled apart, those."""
    return inputs | {f"{kind}, past 2 GiB" for kind in inputs if target == "gfx942"}


def full_width(dtypes: list[torch.dtype], block: int, threads: int) -> Counter[int]:
    """Stores of a thread, by bytes, when it writes its tokens of each field as wide as can be."""
    stores: Counter[int] = Counter()
    for dtype in dtypes:
        share = dtype.itemsize * block // threads
        stores[min(share, WIDEST)] += max(share // WIDEST, 1)
    return stores


@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_is_compiled(compiled: Any, target: str) -> None:
    inputs = sorted(with_far({"aligned", "unaligned"}, target))
    for kernel in ("build_kernel", "gather_words_kernel"):
        assert sorted(v["inputs"] for v in compiled.variants(kernel, target)) == inputs
    rows = {f"{kind} x {unit}" for unit in UNITS for kind in ("1", "3")}
    rows |= {f"3 x {unit} unaligned" for unit in UNITS}
    for kernel in ROW_KERNELS:
        variants = compiled.variants(kernel, target)
        assert sorted(v["inputs"] for v in variants) == sorted(with_far(rows, target))
    fields = {f"{width} x {unit}" for unit in (1, 2, 4, 8) for width in (1, 3)}
    fields |= {"1 x 1, all tokens", "1 x 2, generated"}
    several = "1 x 1 and 3 x 2 and 1 x 4 and 1 x 8"
    fields |= {several, f"{several}, unaligned"}
    variants = compiled.variants("gather_fields_kernel", target)
    assert sorted(v["inputs"] for v in variants) == sorted(with_far(fields, target))


@pytest.mark.parametrize("target", TARGETS)
def test_build_stores_every_field_at_full_width_once_in_each_branch(
    compiled: Any, target: str
) -> None:
    for variant in compiled.variants("build_kernel", target):
        branch = full_width(
            list(FIELD_DTYPES.values()), block_of(variant), variant["threads"]
        )  # a tile inside one run is one branch, a tile over several the other
        assert variant["stores"] == branch + branch, variant


@pytest.mark.parametrize("target", ["80", "90"])
def test_build_stores_are_not_masked(compiled: Any, target: str) -> None:
    for variant in compiled.variants("build_kernel", target):
        assert variant["masked_stores"] == 0, variant


@pytest.mark.parametrize("target", ["80", "90"])
def test_build_reads_the_stream_word_by_word(compiled: Any, target: str) -> None:
    """A run may begin at any word: a wider load would fault where it is not aligned."""
    for variant in compiled.variants("build_kernel", target):
        assert set(variant["loads"]) == {4}, variant


@pytest.mark.parametrize("target", TARGETS)
def test_gathered_fields_are_stored_at_full_width_once_and_unmasked(
    compiled: Any, target: str
) -> None:
    elements = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for variant in compiled.variants("gather_fields_kernel", target):
        dtypes = [elements[unit] for unit in fields_of(variant)]
        stores = full_width(dtypes, block_of(variant), variant["threads"])
        assert variant["stores"] == stores, variant
        assert variant["masked_stores"] in (0, None), variant


@pytest.mark.parametrize("target", ["80", "90"])
def test_rows_of_fields_are_loaded_unit_by_unit_and_no_wider(compiled: Any, target: str) -> None:
    """A run's rows may begin at any unit: a wider load would fault where it is not aligned."""
    for variant in compiled.variants("gather_fields_kernel", target):
        share = block_of(variant) // variant["threads"]
        units = fields_of(variant)
        tables = {4, 8}  # of runs and of sources: their own entries
        loads = variant["loads"]
        assert set(loads) == {*units, *tables}, variant
        for unit in {1, 2} & set(units):
            assert loads[unit] == share * units.count(unit), variant
        # for each lane of each field, where its run's row begins; then the unit itself
        assert loads[8] == share * (len(units) + units.count(8)), variant


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", ROW_KERNELS)
def test_rows_are_stored_at_full_width_once_and_unmasked(
    compiled: Any, kernel: str, target: str
) -> None:
    for variant in compiled.variants(kernel, target):
        element = UNITS_OF[min(unit_of(variant), 8)]
        block = block_of(variant, element.itemsize)
        stores = full_width([element], block, variant["threads"])
        assert set(stores) == {WIDEST}
        assert variant["stores"] == stores, variant
        assert variant["masked_stores"] in (0, None), variant


@pytest.mark.parametrize("target", ["80", "90"])
@pytest.mark.parametrize("kernel", ROW_KERNELS)
def test_rows_are_loaded_unit_by_unit_and_no_wider(compiled: Any, kernel: str, target: str) -> None:
    """Units are as wide as rows lie: a wider load would fault, a narrower one be slow."""
    for variant in compiled.variants(kernel, target):
        unit = unit_of(variant)
        element = min(unit, 8)
        units = element * block_of(variant, element) // unit // variant["threads"]
        loads = variant["loads"]
        assert max(loads) == max(unit, 4), variant  # boundaries are read by 4 bytes
        assert set(loads) == {unit, 4}, variant
        assert loads[unit] == units or unit == 4, variant


@pytest.mark.parametrize("target", ["80", "90"])
@pytest.mark.parametrize("kernel", ROW_KERNELS)
def test_rows_of_words_leave_room_for_eight_blocks(compiled: Any, kernel: str, target: str) -> None:
    for variant in compiled.variants(kernel, target):
        if unit_of(variant) > 1:
            assert variant["registers"] <= 64, variant


@pytest.mark.parametrize("target", TARGETS)
def test_gathered_words_are_stored_at_full_width_once_and_unmasked(
    compiled: Any, target: str
) -> None:
    for variant in compiled.variants("gather_words_kernel", target):
        stores = full_width([torch.int32], block_of(variant), variant["threads"])
        assert variant["stores"] == stores, variant
        assert variant["masked_stores"] in (0, None), variant


@pytest.mark.parametrize("target", ["80", "90"])
def test_pieces_are_loaded_entry_by_entry(compiled: Any, target: str) -> None:
    """An address says nothing of alignment: a load wider than an entry would fault."""
    for variant in compiled.variants("gather_words_kernel", target):
        share = block_of(variant) // variant["threads"]
        loads = variant["loads"]
        assert set(loads) == {1, 2, 4, 8}, variant
        # int8 and uint8; int16, bfloat16 and float16; int32; int64 and float64 and the table
        assert (loads[1], loads[2]) == (2 * share, 3 * share), variant
        assert loads[4] >= share, variant


@pytest.mark.parametrize("target", TARGETS)
def test_a_store_behind_an_unknown_mask_would_be_noticed(compiled: Any, target: str) -> None:
    (planted,) = compiled.variants("masked_kernel", target)
    assert planted["stores"] != full_width([torch.int32], 1024, planted["threads"])
    assert planted["masked_stores"] != 0


@pytest.mark.parametrize("target", ["80", "90"])
def test_a_promised_alignment_would_be_noticed(compiled: Any, target: str) -> None:
    (planted,) = compiled.variants("hinted_kernel", target)
    assert planted["stores"] == full_width([torch.int32], 1024, planted["threads"])
    assert set(planted["loads"]) != {4}
