"""What the compiler makes of every kernel variant, and of some scans (see `test_scan_spills`).

The interpreter sees neither the width of a memory access nor registers, so this looks at the
machine code: SASS for NVIDIA, the assembly for AMD. Every test runs once for each version of
Triton; what holds for one kernel alone is in `test_compiled_copies` and `test_compiled_returns`.
"""

from __future__ import annotations

from typing import Any

import pytest

TARGETS = ("80", "90", "gfx942")
REGISTERS = {
    ("build_kernel", "80"): 48,  # five blocks of 256 threads share the 65,536 registers
    ("build_kernel", "90"): 48,
    ("build_kernel", "gfx942"): 64,  # eight waves share the 512 registers of a SIMD lane
    ("gather_fields_kernel", "80"): 32,  # eight blocks of 256 threads: all that an SM holds
    ("gather_fields_kernel", "90"): 32,
    ("gather_fields_kernel", "gfx942"): 64,
    ("select_tokens_kernel", "80"): 40,  # six blocks of 256 threads
    ("select_tokens_kernel", "90"): 40,
    ("select_tokens_kernel", "gfx942"): 64,
    ("gather_words_kernel", "80"): 56,  # nine blocks of 128 threads
    ("gather_words_kernel", "90"): 56,
    ("gather_words_kernel", "gfx942"): 64,
    ("pad_kernel", "80"): 96,  # five blocks of 128 threads, for rows of odd bytes
    ("pad_kernel", "90"): 96,
    ("pad_kernel", "gfx942"): 128,
    ("unpad_kernel", "80"): 128,  # four blocks
    ("unpad_kernel", "90"): 128,
    ("unpad_kernel", "gfx942"): 168,  # three waves
    ("walk_kernel", "80"): 96,  # five blocks of 128 threads; ptxas is held to it
    ("walk_kernel", "90"): 96,
    ("walk_kernel", "gfx942"): 128,  # four waves
    ("block_steps_kernel", "80"): 80,  # six blocks
    ("block_steps_kernel", "90"): 80,
    ("block_steps_kernel", "gfx942"): 96,
    ("block_states_kernel", "80"): 96,
    ("block_states_kernel", "90"): 96,
    ("block_states_kernel", "gfx942"): 112,
    ("group_advantages_kernel", "80"): 128,  # two blocks of 256 threads; ptxas is held to it
    ("group_advantages_kernel", "90"): 128,
    ("group_advantages_kernel", "gfx942"): 72,
    ("segment_reduce_kernel", "80"): 40,
    ("segment_reduce_kernel", "90"): 40,
    ("segment_reduce_kernel", "gfx942"): 64,
    ("chunk_partials_kernel", "80"): 40,
    ("chunk_partials_kernel", "90"): 40,
    ("chunk_partials_kernel", "gfx942"): 64,
    ("chunk_fold_kernel", "80"): 40,
    ("chunk_fold_kernel", "90"): 40,
    ("chunk_fold_kernel", "gfx942"): 64,
    ("chunk_moments_kernel", "80"): 112,  # two blocks of 256 threads
    ("chunk_moments_kernel", "90"): 112,
    ("chunk_moments_kernel", "gfx942"): 128,
    ("merge_chunks_kernel", "80"): 112,
    ("merge_chunks_kernel", "90"): 112,
    ("merge_chunks_kernel", "gfx942"): 128,
    ("whiten_kernel", "80"): 112,
    ("whiten_kernel", "90"): 112,
    ("whiten_kernel", "gfx942"): 128,
    ("whiten_by_sums_kernel", "80"): 112,
    ("whiten_by_sums_kernel", "90"): 112,
    ("whiten_by_sums_kernel", "gfx942"): 128,
    ("spread_kernel", "80"): 128,  # two blocks of 256 threads
    ("spread_kernel", "90"): 128,
    ("spread_kernel", "gfx942"): 128,
    ("scores_kernel", "80"): 64,
    ("scores_kernel", "90"): 64,
    ("scores_kernel", "gfx942"): 64,
}
MORE_REGISTERS = {("3.6.0", "build_kernel", "gfx942"): 72}
"""Where one version takes more: past 2 GiB, seven waves instead of eight."""

MOST_SCALARS_SPILLED = {"walk_kernel": 24, "block_steps_kernel": 24, "block_states_kernel": 24}
"""On gfx942 scalars that do not fit go to lanes of vector registers, and never to memory."""

COPIES = ("build_kernel", "gather_fields_kernel", "gather_words_kernel", "pad_kernel")
COPIES += ("unpad_kernel", "select_tokens_kernel")
SHUFFLES_OF_A_SEARCH = {"80": 1, "90": 1, "gfx942": 6}
"""CUDA adds within a warp in one instruction, then up two warps; a wave takes six halvings."""
BARRIERS_OF_A_SEARCH = {"80": 3, "90": 3, "gfx942": 0}
"""Its 64 lanes are two warps, who meet in shared memory, or one wave."""
BARRIERS_OF_LAYOUTS = {("build_kernel", 2): 6, ("gather_fields_kernel", 8): 2}
BARRIERS_OF_LAYOUTS |= {("select_tokens_kernel", 2): 4, ("select_tokens_kernel", 10): 6}
"""By searches, what passes tokens from one layout to another through shared memory, in all."""
Variant = dict[str, Any]


def searches_of(variant: Variant) -> int:
    """Return how many searches a copy kernel's code has: all that its lanes do together."""
    fields = variant["inputs"].count(" x ")
    searches = {"build_kernel": 2, "gather_fields_kernel": 2 * fields, "gather_words_kernel": 1}
    searches["select_tokens_kernel"] = 2 * fields + 2 * variant["inputs"].startswith("own")
    return (searches | {"pad_kernel": 0, "unpad_kernel": 2})[variant["kernel"]]


@pytest.fixture(params=REGISTERS, ids="-".join)
def variants(request: pytest.FixtureRequest, compiled: Any) -> list[Variant]:
    """All variants of one kernel for one target."""
    return list(compiled.variants(*request.param))


def test_the_version_of_triton_is_the_one_asked_for(compiled: Any) -> None:
    assert compiled["triton"] == compiled.version


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_is_compiled(compiled: Any, target: str) -> None:
    """A kernel that nobody listed here would go without assertions."""
    measured = [v for v in compiled["variants"] if v["inputs"] != "planted"]
    kernels = {v["kernel"] for v in measured if v["target"] == target}
    assert kernels == {kernel for kernel, of in REGISTERS if of == target}


def test_no_thread_spills_or_has_a_stack(variants: list[Variant]) -> None:
    for variant in variants:
        memory = dict(variant["memory_of_a_thread"])
        scalars = MOST_SCALARS_SPILLED.get(variant["kernel"], 0)
        assert memory.pop("sgpr_spill_count", 0) <= scalars, variant
        assert set(memory.values()) == {0}, variant


def test_registers_stay_under_the_ceiling(compiled: Any, variants: list[Variant]) -> None:
    for variant in variants:
        kernel = variant["kernel"], variant["target"]
        ceiling = MORE_REGISTERS.get((compiled.version, *kernel), REGISTERS[kernel])
        assert 0 < variant["registers"] <= ceiling, variant


def test_nothing_is_added_atomically(variants: list[Variant]) -> None:
    for variant in variants:
        assert variant["atomics"] == 0, variant


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", COPIES)
def test_copies_hand_nothing_from_lane_to_lane_but_in_searches(
    compiled: Any, kernel: str, target: str
) -> None:
    """A shuffle for each token would be four or more beside those of the searches."""
    for variant in compiled.variants(kernel, target):
        searches = searches_of(variant)
        most = searches * SHUFFLES_OF_A_SEARCH[target]
        again = target != "gfx942" and searches > 0  # 3.9 shares the first search's sum twice
        assert most <= variant["shuffles"] <= most + again, variant


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", COPIES)
def test_warps_of_a_copy_hardly_wait_for_each_other(
    compiled: Any, kernel: str, target: str
) -> None:
    for variant in compiled.variants(kernel, target):
        searches = searches_of(variant)
        layouts = BARRIERS_OF_LAYOUTS.get((kernel, searches), 0)
        most = searches * BARRIERS_OF_A_SEARCH[target] + layouts
        assert variant["barriers"] <= most, variant


@pytest.mark.parametrize("target", ["80", "90"])
def test_a_spill_would_be_noticed(compiled: Any, target: str) -> None:
    (planted,) = compiled.variants("crowded_kernel", target)
    assert planted["memory_of_a_thread"]["spills"] > 0
    assert max(planted["memory_of_a_thread"]["stack"], planted["memory_of_a_thread"]["local"]) > 0


@pytest.mark.parametrize("target", TARGETS)
def test_shuffles_and_barriers_would_be_noticed(compiled: Any, target: str) -> None:
    (planted,) = compiled.variants("shuffled_kernel", target)
    assert planted["shuffles"] > SHUFFLES_OF_A_SEARCH[target]
    assert planted["barriers"] > 0
