"""The scan kernels: bits that depend on a segment alone, and the choice of launches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.kernels.credit.token_loops import OBSERVATIONS, Batch, batch_of, small_blocks
from tests.ptx.executor import on_executor
from tests.support.slow import slow_after
from trajpack.kernels.scan import credit_scan_triton
from trajpack.kernels.scan.credit_scan import credit_scan_reference
from trajpack.kernels.scan.credit_scan_triton import LONGEST_WALK, credit_scan_forward, launch
from trajpack.kernels.scan.scan_inputs import Limits, Scan
from trajpack.testing import assert_same_bits, boundaries

EDGES = [15, 16, 17, 0, 31, 32, 33, 1, 0, 47, 2, 65]
"""Lengths around the edges of blocks and of rows; their ends fall anywhere in a window."""


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


def random_masks(lengths: list[int], seed: int = 0) -> list[str]:
    """Return masks; every second one is context for more than a block."""
    rng = np.random.default_rng(seed)
    letters = [["g", "g", "."], ["g", *["."] * 12]]
    return ["".join(rng.choice(letters[index % 2], length)) for index, length in enumerate(lengths)]


def scan_of(batch: Batch, kind: str, observation: str, slack: int = 0) -> Scan:
    scan = Scan(
        batch.cu_seqlens, batch.rewards, batch.values, batch.loss_mask, 1.0, 1.0, observation,
        batch.gammas, batch.lams, batch.bootstrap, num_positions=len(batch.rewards) + slack,
        kind=kind,
    )  # fmt: skip
    if kind == "vtrace":
        limits = Limits(rho_clip=0.875, c_clip=0.75)
        weights = {"logprobs": batch.logprobs, "rollout_logprobs": batch.rollout_logprobs}
        return scan._replace(limits=limits, **weights)
    if kind == "returns":
        scan = scan._replace(lams=None)
    return scan._replace(values=None, bootstrap=None) if kind in ("returns", "adjoint") else scan


def results_of(scan: Scan) -> list[torch.Tensor]:
    return [rows for rows in credit_scan_forward(scan) if len(rows)]


def alone(scan: Scan, index: int) -> Scan:
    """Return the scan of one segment, in memory of its own."""
    begin, end = scan.cu_seqlens[index : index + 2].tolist()

    def cut(rows: torch.Tensor | None, part: slice) -> torch.Tensor | None:
        return None if rows is None else rows[part].clone()

    tokens, own = slice(begin, end), slice(index, index + 1)
    names = {"rewards": tokens, "values": tokens, "loss_mask": tokens}
    names |= {"gammas": own, "lams": own, "bootstrap": own}
    names |= {"logprobs": tokens, "rollout_logprobs": tokens}
    rows = {name: cut(getattr(scan, name), part) for name, part in names.items()}
    return scan._replace(cu_seqlens=boundaries([end - begin]), num_positions=None, **rows)


def assert_bits_of_segments_alone(scan: Scan) -> None:
    """Compare a scan with its segments one by one, and with the reference."""
    together = results_of(scan)
    for actual, expected in zip(together, credit_scan_reference(scan), strict=False):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    bounds = scan.cu_seqlens.tolist()
    for index, (begin, end) in enumerate(pairwise(bounds)):
        for actual, own in zip(together, results_of(alone(scan, index)), strict=False):
            assert_same_bits(actual[begin:end], own)


PAIRS = [
    ("gae", "carry"), ("returns", "ignore"), ("vtrace", "multiply"), ("adjoint", "compact"),
    *(("gae", observation) for observation in OBSERVATIONS[1:]),
    ("returns", "carry_drop"), ("vtrace", "carry"), ("adjoint", "reset"),
]  # fmt: skip
"""Each kind with some meanings of observations, and each meaning with some kinds."""


@pytest.mark.parametrize(("kind", "observation"), slow_after(4, PAIRS))
def test_a_segment_has_the_bits_that_it_has_alone(kind: str, observation: str) -> None:
    assert_bits_of_segments_alone(scan_of(batch_of(random_masks(EDGES)), kind, observation))


@pytest.mark.parametrize("kind", slow_after(1, ["gae", "returns"]))
def test_so_it_has_with_one_rate_and_no_bootstrap(kind: str) -> None:
    scan = scan_of(batch_of(random_masks(EDGES), dtype=torch.float64), kind, "carry", slack=9)
    scan = scan._replace(gamma=0.99, lam=0.9, gammas=None, lams=None, bootstrap=None)
    assert_bits_of_segments_alone(scan._replace(loss_mask=None) if kind == "gae" else scan)


@pytest.mark.slow
@given(lengths=st.lists(st.integers(0, 80), min_size=1, max_size=5), pair=st.sampled_from(PAIRS))
@settings(max_examples=8)
def test_so_it_has_with_any_lengths(lengths: list[int], pair: tuple[str, str]) -> None:
    assert_bits_of_segments_alone(scan_of(batch_of(random_masks(lengths, 3)), *pair))


LAYOUTS = {
    "an empty segment first": (64, [0, 5, 3, 1], 0),
    "one longer than a block among short ones": (64, [0, 70, 2, 1, 1, 0], 0),
    "an empty segment in between": (64, [3, 0, 0, 9, 2], 0),
    "more short segments than a program has lanes": (256, [1, 2] * 40, 0),
    "long segments that end with a row": (16, [32, 96, 5, 27, 64], 0),
    "long segments and room behind them": (16, [32, 96, 5, 27, 64], 9),
}
"""Entries of a block, lengths, and tokens behind the last segment."""


@pytest.mark.parametrize(("block", "lengths", "slack"), LAYOUTS.values(), ids=LAYOUTS)
def test_segments_have_them_in_any_layout(block: int, lengths: list[int], slack: int) -> None:
    with small_blocks(block):
        assert_bits_of_segments_alone(
            scan_of(batch_of(random_masks(lengths)), "gae", "carry", slack)
        )


def test_more_long_segments_than_programs_that_are_ordered_together() -> None:
    """A program takes one segment; each 32 neighbours among the programs take theirs by length."""
    scan = scan_of(batch_of(random_masks([17, 9, 12] * 23)), "gae", "carry")
    for actual, exact in zip(results_of(scan), credit_scan_reference(scan), strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-5, atol=1e-5)


def test_the_longest_walk_has_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("BLOCK", 8), ("ROW", 8), ("LONGEST_WALK", 32)):
        monkeypatch.setattr(credit_scan_triton, name, size)
    lengths = [31, 32, 33, 40, 64]
    assert_bits_of_segments_alone(scan_of(batch_of(random_masks(lengths)), "gae", "carry"))


@pytest.mark.parametrize("observation", ["carry", "reset"])
def test_a_row_may_end_with_context(observation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates and ratios are 1, so that what is left behind by context is not decayed away."""
    with small_blocks(8):
        monkeypatch.setattr(credit_scan_triton, "ROW", 8)
        batch = batch_of(["g" * 16 + ".", "g" * 8 + "." + "g" * 8])
        scan = scan_of(batch, "vtrace", observation)
        scan = scan._replace(gammas=None, lams=None, rollout_logprobs=scan.logprobs)
        assert_bits_of_segments_alone(scan)


def test_a_ratio_that_is_nan_is_not_clipped() -> None:
    batch = batch_of(["ggg.g", "gg"])
    logprobs = batch.logprobs.clone()
    logprobs[2] = math.nan
    scan = scan_of(batch._replace(logprobs=logprobs), "vtrace", "carry")
    for found, exact in zip(results_of(scan), credit_scan_reference(scan), strict=True):
        assert exact.isnan().any()
        assert torch.equal(found.isnan(), exact.isnan())


def test_twenty_orders_of_programs_give_the_same_bits() -> None:
    scan = scan_of(batch_of(random_masks([*EDGES, 700])), "gae", "carry")
    first = results_of(scan)
    for seed in range(20):
        with on_executor(order=seed):
            for actual, expected in zip(results_of(scan), first, strict=True):
                assert_same_bits(actual, expected)


@pytest.mark.parametrize("kind", ["gae", "vtrace"])
def test_more_rows_than_are_folded_at_once(kind: str) -> None:
    """A fold takes 512 rows of 8 entries here."""
    with small_blocks(8), pytest.MonkeyPatch.context() as patch:
        patch.setattr(credit_scan_triton, "ROW", 8)
        lengths = [33, 8 * 512 + 3, 8 * 512 + 21]
        assert_bits_of_segments_alone(scan_of(batch_of(random_masks(lengths)), kind, "carry"))


@pytest.mark.parametrize(("block", "longest"), [(16, 16), (16, 99), (64, 99)])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_a_state_of_zero_stays_zero_though_decays_overflow(
    block: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From row to row, from block to block, and within a block from lane to lane."""
    batch = batch_of(["g" * 64])
    rewards = torch.zeros(64)
    rewards[:3] = torch.tensor([1.0, 2.0, 4.0])
    scan = scan_of(batch._replace(rewards=rewards), "gae", "carry")
    scan = scan._replace(values=None, bootstrap=None, gammas=torch.tensor([1e30]).double())
    with small_blocks(block):
        monkeypatch.setattr(credit_scan_triton, "LONGEST_WALK", longest)
        advantages, _ = results_of(scan._replace(lams=None))
    assert_same_bits(advantages[3:], torch.zeros(61))
    assert_same_bits(advantages[1:3], torch.tensor([4e30, 4.0]))


@pytest.mark.parametrize(
    ("entries", "max_seqlen", "launches"),
    [
        (LONGEST_WALK, None, 1),
        (LONGEST_WALK + 1, None, 2),
        (LONGEST_WALK + 1, LONGEST_WALK, 1),
        (LONGEST_WALK + 1, LONGEST_WALK + 1, 2),
        (LONGEST_WALK, LONGEST_WALK + 1, 1),
        (0, None, 0),
    ],
)
def test_the_bound_decides_what_is_launched(
    monkeypatch: pytest.MonkeyPatch, entries: int, max_seqlen: int | None, launches: int
) -> None:
    for name, size in (("BLOCK", 256), ("ROW", 1024), ("LONGEST_WALK", LONGEST_WALK)):
        monkeypatch.setattr(credit_scan_triton, name, size)
    tokens = torch.zeros(entries)
    scan = Scan(boundaries([entries]), tokens, tokens)
    with on_executor() as executor:
        launch(scan._replace(max_seqlen=max_seqlen), (tokens, tokens.clone()))
    assert executor.launched == ["effects_kernel", "scan_kernel"][2 - launches :]
