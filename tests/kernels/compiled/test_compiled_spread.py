"""What the compiler makes of the kernels of trajectories' scores, and of spreading over tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from trajpack.kernels.block_shapes import DEFAULT, block_shape
from trajpack.kernels.reduce import whiten_triton

TARGETS = ("80", "90", "gfx942")
SHARE = whiten_triton.CHUNK // block_shape("spread_kernel", DEFAULT).threads
"""Tokens of a thread."""
INPUTS = {
    "spread_kernel": {"trajectories", "trajectories and steps", "turns"},
    "scores_kernel": {"turns"},
}
READS = {"trajectories": 2, "trajectories and steps": 3, "turns": 4}
"""What is loaded of each token: its turn; its trajectory's row, its turn's step; or where its
turn begins, and what stands there twice."""
REGISTERS = {"spread_kernel": 128, "scores_kernel": 40}
"""Two blocks of 256 threads share the 65,536 registers; of scores an SM is full."""
MOMENTS = 5


def label(variant: dict[str, Any]) -> str:
    return str(variant["inputs"]).removesuffix(", past 2 GiB")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", INPUTS)
def test_every_variant_is_compiled(compiled: Any, kernel: str, target: str) -> None:
    inputs = INPUTS[kernel]
    if target == "gfx942":
        inputs = inputs | {f"{kind}, past 2 GiB" for kind in inputs}
    variants = compiled.variants(kernel, target)
    assert sorted(v["inputs"] for v in variants) == sorted(inputs)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", INPUTS)
def test_a_thread_fits_and_adds_nothing_atomically(compiled: Any, kernel: str, target: str) -> None:
    for variant in compiled.variants(kernel, target):
        assert 0 < variant["registers"] <= REGISTERS[kernel], variant
        assert set(variant["memory_of_a_thread"].values()) == {0}, variant
        assert variant["atomics"] == 0, variant


@pytest.mark.parametrize("target", TARGETS)
def test_tokens_are_stored_at_full_width_and_a_chunk_leaves_its_moments(
    compiled: Any, target: str
) -> None:
    """Room is allocated in whole chunks, so no store of tokens is masked."""
    for variant in compiled.variants("spread_kernel", target):
        outputs = 2 if label(variant) == "turns" else 1
        assert variant["stores"] == Counter({16: outputs * SHARE // 4, 8: MOMENTS}), variant
        assert (variant["masked_stores"] or 0) <= MOMENTS, variant


@pytest.mark.parametrize("target", TARGETS)
def test_a_token_is_read_once_and_a_search_reads_little(compiled: Any, target: str) -> None:
    """Beside the tokens, boundaries of trajectories: of the first, of the last, of each token's."""
    for variant in compiled.variants("spread_kernel", target):
        kind = label(variant)
        searched = 0 if kind == "turns" else SHARE + 2
        assert variant["loads"] == Counter({4: READS[kind] * SHARE + searched}), variant


@pytest.mark.parametrize("target", TARGETS)
def test_a_chunk_shuffles_and_waits_no_more_than_it_did(compiled: Any, target: str) -> None:
    """Five moments; and for trajectories the first and last turn, the ends of their searches."""
    for variant in compiled.variants("spread_kernel", target):
        assert 0 < variant["shuffles"] <= (84 if target == "gfx942" else 60), variant
        assert variant["barriers"] <= (14 if label(variant) == "turns" else 26), variant


@pytest.mark.parametrize("target", TARGETS)
def test_a_trajectory_is_stored_once(compiled: Any, target: str) -> None:
    """Its score, its length, and whether it counts."""
    for variant in compiled.variants("scores_kernel", target):
        assert variant["stores"] == {8: 1, 4: 1, 1: 1}, variant
