"""Compiled code of every kernel variant: registers, spills, atomics, shuffles and barriers.

The executor sees neither the width of a memory access nor registers, so these tests look at the
machine code: SASS for NVIDIA, the assembly for AMD. Every test runs once for each build of
`tests.kernels.conftest.BUILDS`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest

from tests.kernels.conftest import builds

Variant = dict[str, Any]


class Bounds(NamedTuple):
    """Bounds of a kernel's compiled code."""

    variants: int
    """Number of variants for an NVIDIA target; twice as many for gfx942, past 2 GiB too."""
    registers: int
    """Most registers of a thread on sm_80 to sm_100."""
    registers_of_amd: int


KERNELS = {
    "build_kernel": Bounds(2, 48, 64),  # five blocks of 256 threads; eight waves
    "gather_fields_kernel": Bounds(12, 64, 96),  # eight blocks of 128 threads; five waves
    "select_tokens_kernel": Bounds(6, 40, 64),  # six blocks of 256 threads
    "pad_kernel": Bounds(15, 96, 128),  # five blocks of 128 threads, for rows of odd bytes
    "unpad_kernel": Bounds(15, 128, 168),  # four blocks; three waves
    "effects_kernel": Bounds(10, 240, 256),  # eight blocks of 32 threads; two waves
    "scan_kernel": Bounds(20, 255, 256),  # eight blocks of 32 threads; two waves
    "group_advantages_kernel": Bounds(9, 224, 256),  # two blocks of 128 threads; two waves
    "moments_kernel": Bounds(4, 168, 240),  # a block of 256 threads requests 20 KB; two waves
    "whiten_kernel": Bounds(8, 168, 128),  # with moments of its own, of one block; else 80
    "sum_slots_kernel": Bounds(8, 96, 96),  # a warp, or 20 of them on an SM
    "weigh_kernel": Bounds(8, 128, 128),  # two blocks of 256 threads; four waves
    "merge_kernel": Bounds(2, 128, 128),
    "slot_shares_kernel": Bounds(2, 40, 48),
    "share_kernel": Bounds(5, 24, 32),
    "spread_kernel": Bounds(4, 72, 64),  # a warp, or 28 of them on an SM
    "scores_kernel": Bounds(3, 40, 40),  # an SM is full
    "fold_kernel": Bounds(8, 128, 128),  # four blocks of 128 threads
    "slope_kernel": Bounds(8, 128, 128),
}
"""An SM has 65,536 registers; a SIMD of gfx942 has 512 per lane."""
MORE_REGISTERS = {("3.6.0", "gfx942", "build_kernel"): 72}
"""Kernels that need more with one version: past 2 GiB, seven waves instead of eight."""
MORE_FOR_INPUTS = {("fold_kernel", "float64, all"): 168}
"""Kernels that need more for some inputs: sums in float64 of an entropy, three blocks."""
ADDS_INTEGERS = {"sum_slots_kernel", "moments_kernel"}
"""Kernels with atomic additions: of integers, which are the same in any order."""
MOST_SCALARS_SPILLED = {
    "effects_kernel": 32,
    "scan_kernel": 40,
    "weigh_kernel": 32,
    "group_advantages_kernel": 40,
    "sum_slots_kernel": 2,
}
"""On gfx942 scalars that do not fit go to lanes of vector registers, and never to memory. Scans of
turns have the most, since they have two paths."""
MOST_SPILLED = {"scan_kernel": 64, "weigh_kernel": 8}
"""Most bytes that a thread keeps in memory for lack of registers, and instructions that move them.
The limit of a scan's registers lets an SM hold more warps; `test_compiled_scans` has more of it."""

COPIES = ("build_kernel", "gather_fields_kernel", "pad_kernel", "unpad_kernel")
COPIES += ("select_tokens_kernel",)
BARRIERS_OF_LAYOUTS = {("build_kernel", 2): 6, ("gather_fields_kernel", 8): 4}
BARRIERS_OF_LAYOUTS |= {("select_tokens_kernel", 2): 4, ("select_tokens_kernel", 4): 6}
"""Barriers that move tokens between layouts through shared memory, by kernel and searches."""


def searches_of(variant: Variant) -> int:
    """Return the number of searches in a copy kernel's code; its lanes search together."""
    fields = variant["inputs"].count(" x ")
    searches = {"build_kernel": 2, "gather_fields_kernel": 2 * fields}
    searches["select_tokens_kernel"] = 2 * (fields > 0) + 2 * variant["inputs"].startswith("own")
    return (searches | {"pad_kernel": 0, "unpad_kernel": 2})[variant["kernel"]]


def shuffles_of_a_search(compiled: Any) -> int:
    """CUDA adds within a warp in one instruction, then over two warps; a wave halves six times."""
    return 1 if compiled.is_nvidia else 6


def test_the_version_of_triton_is_the_one_asked_for(compiled: Any) -> None:
    assert compiled["triton"] == compiled.version


def test_every_kernel_and_every_variant_is_compiled(compiled: Any) -> None:
    """A kernel without bounds would go without assertions."""
    found = Counter(v["kernel"] for v in compiled.all if v["inputs"] != "planted")
    assert found.keys() == KERNELS.keys()
    inputs = [(v["kernel"], v["inputs"]) for v in compiled.all if v["inputs"] != "planted"]
    assert len(inputs) == len(set(inputs))
    if compiled.is_complete:
        per_label = 1 if compiled.is_nvidia else 2
        assert found == {name: per_label * bounds.variants for name, bounds in KERNELS.items()}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_thread_keeps_to_its_registers_and_adds_no_float_atomically(
    compiled: Any, kernel: str
) -> None:
    _, nvidia, amd = KERNELS[kernel]
    most = nvidia if compiled.is_nvidia else amd
    most = MORE_REGISTERS.get((compiled.version, compiled.target, kernel), most)
    for variant in compiled.variants(kernel):
        inputs = variant["inputs"].removesuffix(", past 2 GiB")
        assert 0 < variant["registers"] <= MORE_FOR_INPUTS.get((kernel, inputs), most), variant
        memory = dict(variant["memory_of_a_thread"])
        assert memory.pop("sgpr_spill_count", 0) <= MOST_SCALARS_SPILLED.get(kernel, 0), variant
        assert max(memory.values()) <= MOST_SPILLED.get(kernel, 0), variant
        assert (variant["atomics"] > 0) == (kernel in ADDS_INTEGERS), variant


@pytest.mark.parametrize("kernel", COPIES)
def test_lanes_of_a_copy_communicate_in_searches_alone(compiled: Any, kernel: str) -> None:
    """A shuffle for each token would be four or more beside those of the searches."""
    for variant in compiled.variants(kernel):
        searches = searches_of(variant)
        most = searches * shuffles_of_a_search(compiled)
        again = compiled.is_nvidia and searches > 0  # 3.9 shares the first search's sum twice
        assert most <= variant["shuffles"] <= most + again, variant
        # the 64 lanes of a search are two warps, which share memory, or one wave
        most = searches * 3 * compiled.is_nvidia + BARRIERS_OF_LAYOUTS.get((kernel, searches), 0)
        assert variant["barriers"] <= most, variant


@builds("80", "90", "100")
def test_a_spill_would_be_noticed(compiled: Any) -> None:
    (planted,) = compiled.variants("crowded_kernel")
    assert planted["memory_of_a_thread"]["spills"] > 0
    assert max(planted["memory_of_a_thread"]["stack"], planted["memory_of_a_thread"]["local"]) > 0


def test_shuffles_and_barriers_would_be_noticed(compiled: Any) -> None:
    (planted,) = compiled.variants("shuffled_kernel")
    assert planted["shuffles"] > shuffles_of_a_search(compiled)
    assert planted["barriers"] > 0
