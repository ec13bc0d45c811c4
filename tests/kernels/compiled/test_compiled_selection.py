"""What the compiler makes of the kernel that selects tokens: full width out, unit by unit in."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.kernels.compiled.test_compiled_copies import TARGETS, block_of, full_width, with_far
from trajpack.kernels.fields.gather_fields import UNITS

EXPERTS = "own and 3 x 1 and 3 x 2 and 3 x 4 and 3 x 8"
INPUTS = {"own", "own, positions of 0", "own, unaligned", EXPERTS, "1 x 4", "3 x 2"}
OWN = (8, 4, 1, 1, 4, 4, 4, 4)
"""Units of a micro-batch's own tensors, as `compile_selection` has them."""
PLACES = (torch.int64, torch.int32)
"""Positions and sequences."""


def outputs_of(variant: dict[str, Any]) -> list[torch.dtype]:
    """Return the units of what a variant writes."""
    label = str(variant["inputs"]).removesuffix(", past 2 GiB")
    rows = [int(row.split(" x ")[1]) for row in label.split(" and ") if " x " in row]
    own = [UNITS[unit] for unit in OWN] + list(PLACES) if label.startswith("own") else []
    return own + [UNITS[unit] for unit in rows]


@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_is_compiled(compiled: Any, target: str) -> None:
    variants = compiled.variants("select_tokens_kernel", target)
    assert sorted(v["inputs"] for v in variants) == sorted(with_far(INPUTS, target))


@pytest.mark.parametrize("target", TARGETS)
def test_every_field_is_stored_at_full_width_once_and_unmasked(compiled: Any, target: str) -> None:
    for variant in compiled.variants("select_tokens_kernel", target):
        stores = full_width(outputs_of(variant), block_of(variant), variant["threads"])
        assert variant["stores"] == stores, variant
        assert variant["masked_stores"] in (0, None), variant


@pytest.mark.parametrize("target", TARGETS)
def test_sources_are_loaded_unit_by_unit_and_no_wider(compiled: Any, target: str) -> None:
    """A sequence may begin at any token: a wider load would fault where it is not aligned."""
    for variant in compiled.variants("select_tokens_kernel", target):
        share = block_of(variant) // variant["threads"]
        loaded = Counter(dtype.itemsize for dtype in outputs_of(variant))
        if variant["inputs"].startswith("own"):
            loaded -= Counter(dtype.itemsize for dtype in PLACES)  # made, not loaded
        for unit in UNITS:
            if unit != 4:  # as the table's entries
                assert variant["loads"][unit] == share * loaded[unit], variant
        assert set(variant["loads"]) <= {*loaded, 4}, variant
        assert variant["loads"][4] >= share * loaded[4], variant
