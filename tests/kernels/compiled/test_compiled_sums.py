"""Compiled code of the kernels that sum: groups, segments, moments, scores and spreads."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from trajpack.kernels.block_shapes import DEFAULT, block_shape
from trajpack.kernels.corrections import importance_weights_triton
from trajpack.kernels.reduce import whiten_triton

MOMENTS = 5


def label_of(variant: dict[str, Any]) -> str:
    return str(variant["inputs"]).removesuffix(", past 2 GiB")


def stored_bytes(variant: dict[str, Any]) -> int:
    return sum(width * count for width, count in variant["stores"].items())


# --- groups: a thread each, a warp each, or long


def test_a_member_is_stored_once(compiled: Any) -> None:
    for variant in compiled.variants("group_advantages_kernel"):
        label = label_of(variant)
        kinds = {"long": ", long", "each": ""}
        kind = next((kind for end, kind in kinds.items() if label.endswith(end)), ", small")
        members = block_shape(f"group_advantages_kernel{kind}", DEFAULT).block
        assert variant["stores"] == {4: members // variant["threads"]}, variant


def test_the_warp_of_a_group_waits_for_no_other(compiled: Any) -> None:
    for variant in compiled.variants("group_advantages_kernel"):
        assert variant["barriers"] == 0 or "a warp each" not in variant["inputs"], variant


def test_members_of_small_groups_stay_in_their_thread(compiled: Any) -> None:
    """Shuffles find the largest group of the program, and whether a share is needed."""
    for variant in compiled.variants("group_advantages_kernel"):
        if label_of(variant) in ("mean by std, valid", "second_best by std"):
            assert variant["shuffles"] <= (2 if compiled.is_nvidia else 12), variant


# --- moments and whitening

OF_ENTRIES = ("moments_kernel", "whiten_kernel")
OF_A_THREAD = whiten_triton.CHUNK // block_shape("whiten", DEFAULT).threads


def test_whitened_entries_are_stored_at_full_width_once_and_unmasked(compiled: Any) -> None:
    for variant in compiled.variants("whiten_kernel"):
        own = MOMENTS if "own" in variant["inputs"] else 0
        assert stored_bytes(variant) == OF_A_THREAD * 4 + 8 * own, variant
        assert variant["stores"][16] >= OF_A_THREAD // 4, variant
        assert (variant["masked_stores"] or 0) <= own, variant


@pytest.mark.parametrize("kernel", OF_ENTRIES)
def test_whole_chunks_are_loaded_at_full_width(compiled: Any, kernel: str) -> None:
    """The last chunk, which may have an end, is loaded entry by entry in a branch of its own.

    Moments of float32 under a mask load the first chunk, and in the loop the one that follows.
    """
    for variant in compiled.variants(kernel):
        size = 8 if variant["inputs"].startswith("float64") else 4
        numbers = 4 if "numbers" in variant["inputs"] else 0
        places = 2 if (kernel, label_of(variant)) == ("moments_kernel", "float32") else 1
        expected = places * OF_A_THREAD * (size + numbers) // 16
        assert variant["loads"][16] == expected, variant


def test_sums_shuffle_and_wait_within_their_bounds(compiled: Any) -> None:
    """Two sums of a chunk, the first of four numbers, and five of the parts.

    Each is made within a warp, then between warps.
    """
    for variant in compiled.variants("moments_kernel"):
        assert 0 < variant["shuffles"] <= 168, variant
        assert variant["barriers"] <= 24, variant


def test_moments_of_a_program_and_those_of_all_are_stored_once(compiled: Any) -> None:
    for variant in compiled.variants("moments_kernel"):
        assert stored_bytes(variant) == 8 * 2 * MOMENTS, variant


# --- scores of trajectories, and values of their tokens


def test_spread_tokens_are_stored_at_full_width_and_unmasked(compiled: Any) -> None:
    """Memory is allocated in whole tiles. A tile within one run has a branch of its own, which may
    share its stores with the other."""
    for variant in compiled.variants("spread_kernel"):
        outputs = 2 if label_of(variant) == "two of turns" else 1
        once = outputs * block_shape("spread_kernel", DEFAULT).block // variant["threads"] // 4
        assert variant["stores"] in ({16: once}, {16: 2 * once}), variant
        assert not variant["masked_stores"], variant
        assert variant["barriers"] <= 6, variant


def test_a_trajectory_is_stored_once(compiled: Any) -> None:
    """Its score and its length; and two numbers of all."""
    for variant in compiled.variants("scores_kernel"):
        assert variant["stores"] == {8: 1, 4: 3}, variant


# --- importance weights


def test_weights_are_stored_at_full_width_and_a_chunk_leaves_its_sums(compiled: Any) -> None:
    for variant in compiled.variants("weigh_kernel"):
        measures = "no metrics" not in variant["inputs"]
        partials = importance_weights_triton.PARTIALS if measures else 0
        assert variant["stores"] == Counter({16: 1, 8: partials}), variant
        assert bool(variant["shuffles"]) == measures, variant
        assert (variant["masked_stores"] or 0) <= partials, variant


def test_whole_tiles_are_weighed_by_loads_of_full_width(compiled: Any) -> None:
    """Two of log-probabilities and one of ids; those of the last tile are in a branch."""
    for variant in compiled.variants("weigh_kernel"):
        size = 2 if variant["inputs"].startswith("float64") else 1
        assert variant["loads"][16] == 2 * size + ("ids" in variant["inputs"]), variant
        assert variant["loads"][1] == importance_weights_triton.EACH, variant  # the last mask


def test_a_slot_is_summed_by_a_warp_in_atomic_additions_alone(compiled: Any) -> None:
    for variant in compiled.variants("sum_slots_kernel"):
        assert not variant["stores"], variant
        if "bounds" not in variant["inputs"]:  # whose search is of 64 lanes
            assert variant["barriers"] == 0, variant


# --- loss weights


def test_loss_weights_are_stored_at_full_width_and_unmasked(compiled: Any) -> None:
    for variant in compiled.variants("share_kernel"):
        assert variant["stores"] == {16: 1}, variant
        assert not variant["masked_stores"], variant
