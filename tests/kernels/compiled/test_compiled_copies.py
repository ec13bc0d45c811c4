"""Compiled code of the kernels that copy: every store is full width, no load is too wide."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.kernels.conftest import builds
from trajpack.kernels.block_shapes import block_shape
from trajpack.kernels.fields.build import FIELD_DTYPES
from trajpack.kernels.fields.units import UNITS

ARCHITECTURES = {"80": "sm_80", "90": "sm_90", "100": "sm_100", "gfx942": "gfx942"}
ROW_KERNELS = ("pad_kernel", "unpad_kernel")
WIDEST = 16
"""Most bytes that one memory instruction of a thread moves."""
OWN = (8, 4, 1, 1, 4, 4, 4, 4)
"""Units of a micro-batch's own tensors, as `compile_launches` has them."""
PLACES = (torch.int64, torch.int32)
"""Positions and sequences."""


def unit_of(variant: dict[str, Any]) -> int:
    return int(variant["inputs"].split(",")[0].split()[2])


def fields_of(variant: dict[str, Any]) -> list[int]:
    """Return the units of a variant of gather_fields, field by field."""
    fields = variant["inputs"].split(",")[0].split(" and ")
    return [int(field.split(" x ")[1]) for field in fields]


def selected_by(variant: dict[str, Any]) -> list[torch.dtype]:
    """Return the units of the outputs of a variant of select_tokens."""
    label = str(variant["inputs"]).removesuffix(", past 2 GiB")
    rows = [int(row.split(" x ")[1]) for row in label.split(" and ") if " x " in row]
    own = [UNITS[unit] for unit in OWN] + list(PLACES) if label.startswith("own") else []
    return own + [UNITS[unit] for unit in rows]


def block_of(variant: dict[str, Any], element: int | None = None) -> int:
    """Return the elements of a tile by the table of block shapes."""
    of_element = "" if element is None else f", elements of {element}"
    shape = block_shape(variant["kernel"] + of_element, ARCHITECTURES[variant["target"]])
    assert shape.threads == variant["threads"]
    return shape.block


def assert_full_width(
    variant: dict[str, Any],
    dtypes: list[torch.dtype],
    element: int | None = None,
) -> None:
    """Assert that a thread writes its share of each field once, as wide as can be, unmasked."""
    stores: Counter[int] = Counter()
    for dtype in dtypes:
        share = dtype.itemsize * block_of(variant, element) // variant["threads"]
        stores[min(share, WIDEST)] += max(share // WIDEST, 1)
    assert variant["stores"] == stores, variant
    assert variant["masked_stores"] in (0, None), variant


def test_every_field_of_a_batch_is_stored_once_in_each_branch(compiled: Any) -> None:
    """A tile inside one run is one branch, a tile over several runs the other.

    For gfx942 the compiler joins the stores that end both: those of the masks, and with small
    offsets those of three fields more.
    """
    masks = ("prompt_mask", "loss_mask")
    more = ("rollout_logprobs", "policy_versions", "returns")
    fields = [*FIELD_DTYPES.values()]
    for variant in compiled.variants("build_kernel"):
        joined = masks if "past 2 GiB" in variant["inputs"] else (*masks, *more)
        if compiled.is_nvidia:
            joined = ()
            # a run may begin at any word: a wider load would fault
            assert set(variant["loads"]) == {4}, variant
        again = [dtype for name, dtype in FIELD_DTYPES.items() if name not in joined]
        assert_full_width(variant, fields + again)


def test_gathered_fields_are_stored_at_full_width(compiled: Any) -> None:
    for variant in compiled.variants("gather_fields_kernel"):
        assert_full_width(variant, [UNITS[unit] for unit in fields_of(variant)])


@builds("80", "90", "100")
def test_rows_of_fields_are_loaded_unit_by_unit(compiled: Any) -> None:
    """A run's rows may begin at any unit: a wider load would fault where it is not aligned."""
    for variant in compiled.variants("gather_fields_kernel"):
        share = block_of(variant) // variant["threads"]
        units, loads = fields_of(variant), variant["loads"]
        assert set(loads) == {*units, 4, 8}, variant  # tables have entries of 4 and 8 bytes
        for unit in {1, 2} & set(units):
            assert loads[unit] == share * units.count(unit), variant
        # the begin of its run's row for each lane of each field; then the unit itself
        assert loads[8] == share * (len(units) + units.count(8)), variant


@pytest.mark.parametrize("kernel", ROW_KERNELS)
def test_rows_are_stored_at_full_width(compiled: Any, kernel: str) -> None:
    for variant in compiled.variants(kernel):
        element = min(unit_of(variant), 8)
        assert_full_width(variant, [UNITS[element]], element)
        assert set(variant["stores"]) == {WIDEST}


@builds("80", "90", "100")
@pytest.mark.parametrize("kernel", ROW_KERNELS)
def test_rows_are_loaded_unit_by_unit(compiled: Any, kernel: str) -> None:
    """Units are as wide as rows allow: a wider load would fault, a narrower one be slow."""
    for variant in compiled.variants(kernel):
        unit, loads = unit_of(variant), variant["loads"]
        element = min(unit, 8)
        units = element * block_of(variant, element) // unit // variant["threads"]
        assert set(loads) == {unit, 4}, variant  # boundaries have 4 bytes
        assert loads[unit] == units or unit == 4, variant
        if unit > 1:
            assert variant["registers"] <= 64, "room for eight blocks"


def test_selected_tokens_are_stored_at_full_width_and_loaded_unit_by_unit(compiled: Any) -> None:
    """A sequence may begin at any token: a wider load would fault where it is not aligned."""
    for variant in compiled.variants("select_tokens_kernel"):
        assert_full_width(variant, selected_by(variant))
        share = block_of(variant) // variant["threads"]
        loaded = Counter(dtype.itemsize for dtype in selected_by(variant))
        if variant["inputs"].startswith("own"):
            loaded -= Counter(dtype.itemsize for dtype in PLACES)  # computed, not loaded
        for unit in UNITS:
            if unit != 4:  # the size of the table's entries
                assert variant["loads"][unit] == share * loaded[unit], variant
        assert set(variant["loads"]) <= {*loaded, 4}, variant
        assert variant["loads"][4] >= share * loaded[4], variant


def test_a_store_behind_an_unknown_mask_would_be_noticed(compiled: Any) -> None:
    (planted,) = compiled.variants("masked_kernel")
    assert planted["stores"] != {WIDEST: 2}
    assert planted["masked_stores"] != 0


@builds("80", "90", "100")
def test_a_promised_alignment_would_be_noticed(compiled: Any) -> None:
    (planted,) = compiled.variants("hinted_kernel")
    assert planted["stores"] == {WIDEST: 2}
    assert set(planted["loads"]) != {4}
