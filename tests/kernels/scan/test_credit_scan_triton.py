"""The two regimes of the scan kernels: the same bits, and the choice between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.kernels.credit.token_loops import OBSERVATIONS, Batch, batch_of, small_blocks
from trajpack.kernels.credit.gae import gae
from trajpack.kernels.scan import credit_scan_triton
from trajpack.kernels.scan.credit_scan import credit_scan_reference
from trajpack.kernels.scan.credit_scan_triton import (
    LONGEST_WALK,
    launch,
    scan_blocks,
    walk_segments,
)
from trajpack.kernels.scan.scan_inputs import KINDS, Limits, Scan
from trajpack.testing import assert_same_bits, boundaries

SMALL = 8
EDGES = [7, 8, 9, 0, 15, 16, 17, 1, 0, 25, 2]
"""Lengths around the edges of small blocks; their ends fall anywhere in a window."""
SHORT = [5, 0, 1, 12, 3, 0, 0, 32, 4, 33, 2, 2, 9, 31, 1, 0]
"""Lengths of which several fit in a block of 32, and around its edge."""


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks(SMALL):
        yield


def random_masks(lengths: list[int], seed: int = 0) -> list[str]:
    """Return masks; every second one is context for more than a block."""
    rng = np.random.default_rng(seed)
    letters = [["g", "g", "."], ["g", *["."] * 12]]
    return ["".join(rng.choice(letters[index % 2], length)) for index, length in enumerate(lengths)]


def scan_of(batch: Batch, kind: str, observation: str, slack: int = 0) -> Scan:
    num = len(batch.rewards)
    scan = Scan(
        batch.cu_seqlens, num, num + slack, batch.rewards, batch.values, batch.loss_mask,
        1.0, 1.0, observation, batch.gammas, batch.lams, batch.bootstrap, kind=kind,
    )  # fmt: skip
    if kind == "vtrace":
        weights = batch.logprobs, batch.rollout_logprobs
        return scan._replace(weights=weights, limits=Limits(rho_clip=0.875, c_clip=0.75))
    return scan._replace(values=None, bootstrap=None) if kind in ("returns", "adjoint") else scan


def results_of(scan: Scan, regime: Any) -> list[torch.Tensor]:
    """Return the outputs of a scan; V-trace first runs the scan of next values."""
    before = None
    if scan.kind == "vtrace":
        (before,) = results_of(scan._replace(kind="next_values", weights=None), regime)
    dtype = torch.float64 if scan.kind == "next_values" else torch.float32
    main = torch.full((scan.num_tokens,), math.nan, dtype=dtype)
    other = (
        None
        if scan.kind in ("returns", "next_values", "adjoint")
        else torch.full_like(main, math.nan)
    )
    regime(scan, before, (main, other))
    assert not main.isnan().any()
    return [main] if other is None else [main, other]


def assert_regimes_agree(scan: Scan) -> None:
    for actual, expected in zip(
        results_of(scan, scan_blocks), results_of(scan, walk_segments), strict=True
    ):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_both_regimes_give_the_same_bits(kind: str, observation: str) -> None:
    batch = batch_of(random_masks(EDGES))
    assert_regimes_agree(scan_of(batch, kind, observation))


@pytest.mark.parametrize("kind", KINDS)
def test_one_rate_and_no_bootstrap_give_the_same_bits(kind: str) -> None:
    scan = scan_of(batch_of(random_masks(EDGES), dtype=torch.float64), kind, "carry", slack=9)
    scan = scan._replace(gamma=0.99, lam=0.9, gammas=None, lams=None, bootstrap=None)
    assert_regimes_agree(scan._replace(loss_mask=None) if kind == "gae" else scan)


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    kind=st.sampled_from(KINDS),
    observation=st.sampled_from(OBSERVATIONS),
)
@settings(max_examples=8)
def test_both_regimes_give_the_same_bits_for_any_lengths(
    lengths: list[int], kind: str, observation: str
) -> None:
    assert_regimes_agree(scan_of(batch_of(random_masks(lengths, 3)), kind, observation))


@pytest.mark.parametrize("kind", KINDS)
def test_both_regimes_give_the_same_bits_beside_any_segments(kind: str) -> None:
    alone = batch_of(random_masks([19], 1), seed=1)
    expected = results_of(scan_of(alone, kind, "carry"), walk_segments)
    for shift in (1, 6):  # moves the sequence over the windows
        company = batch_of(random_masks([shift, 11], 2), seed=2)
        parts = [
            torch.cat([rows[:at], own, rows[at:]])
            for rows, own, at in zip(
                company[1:], alone[1:], [shift] * 3 + [1] * 3 + [shift] * 2, strict=True
            )
        ]
        together = Batch([shift, 19, 11], *parts)
        for regime in (walk_segments, scan_blocks):
            rows = results_of(scan_of(together, kind, "carry"), regime)
            for actual, wanted in zip(rows, expected, strict=True):
                assert_same_bits(actual[shift : shift + 19], wanted)


@pytest.mark.parametrize(
    ("kind", "observation"),
    [
        ("gae", "carry"), ("returns", "reset"), ("next_values", "ignore"), ("vtrace", "multiply"),
        ("adjoint", "compact"),
    ],
)  # fmt: skip
def test_segments_that_share_a_block_have_the_same_bits(kind: str, observation: str) -> None:
    with small_blocks(32):
        scan = scan_of(batch_of(random_masks(SHORT)), kind, observation)
        assert_regimes_agree(scan._replace(lam=0.9, lams=None))


def test_a_nan_stays_in_its_segment_of_a_shared_block() -> None:
    batch = batch_of(["gg", "g.ggg", "g", "ggg.gg.gg"])
    spoiled = batch.rewards.clone()
    spoiled[2:7] = math.nan
    with small_blocks(32):
        results = [
            torch.stack(gae(rewards, batch.values, batch.cu_seqlens, impl="triton"))
            for rewards in (batch.rewards, spoiled)
        ]
    assert results[1][:, 2:7].isnan().all()
    for own in (slice(2), slice(7, None)):
        assert_same_bits(results[1][:, own], results[0][:, own])


def test_segments_of_many_rows_equal_the_reference_beside_any_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of 4 blocks of 8: lengths around a row, and of more rows than are folded at once."""
    monkeypatch.setattr(credit_scan_triton, "ROW", 4)
    lengths = [32, 33, 64, 65, 72, 73, 201]
    scan = scan_of(batch_of(random_masks(lengths)), "gae", "carry")
    together = results_of(scan, scan_blocks)
    for actual, expected in zip(together, credit_scan_reference(scan), strict=True):
        torch.testing.assert_close(actual, expected)
    begin = sum(lengths[:-1])
    last = {name: getattr(scan, name)[begin:] for name in ("rewards", "values", "loss_mask")} | {
        name: getattr(scan, name)[-1:] for name in ("gammas", "lams", "bootstrap")
    }
    alone = scan._replace(cu_seqlens=boundaries([201]), num_tokens=201, num_positions=201, **last)
    for actual, expected in zip(together, results_of(alone, scan_blocks), strict=True):
        assert_same_bits(actual[begin:], expected)


@pytest.mark.parametrize("regime", [walk_segments, scan_blocks])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_a_state_of_zero_stays_zero_though_decays_overflow(regime: Any) -> None:
    batch = batch_of(["g" * 33])
    rewards = torch.zeros(33)
    rewards[:3] = torch.tensor([1.0, 2.0, 4.0])
    scan = scan_of(batch._replace(rewards=rewards), "gae", "carry")
    scan = scan._replace(values=None, bootstrap=None, gammas=torch.tensor([1e30]).double())
    advantages, _ = results_of(scan._replace(lams=None), regime)
    assert_same_bits(advantages[3:], torch.zeros(30))
    assert_same_bits(advantages[1:3], torch.tensor([4e30, 4.0]))


@pytest.mark.parametrize(
    ("entries", "max_seqlen", "launched"),
    [
        (LONGEST_WALK, None, ["walk_segments"]),
        (LONGEST_WALK + 1, None, ["scan_blocks"]),
        (LONGEST_WALK + 1, LONGEST_WALK, ["walk_segments"]),
        (LONGEST_WALK + 1, LONGEST_WALK + 1, ["scan_blocks"]),
        (LONGEST_WALK, LONGEST_WALK + 1, ["walk_segments"]),
        (0, None, []),
    ],
)
def test_the_bound_decides_what_is_launched(
    monkeypatch: pytest.MonkeyPatch, entries: int, max_seqlen: int | None, launched: list[str]
) -> None:
    called: list[str] = []
    for name in ("walk_segments", "scan_blocks"):
        monkeypatch.setattr(credit_scan_triton, name, lambda *_, n=name: called.append(n))
    tokens = torch.zeros(entries)
    scan = Scan(boundaries([entries]), entries, entries, tokens, tokens, None, 1.0, 1.0, "carry")
    launch(scan._replace(max_seqlen=max_seqlen), None, (tokens, tokens))
    assert called == launched


def test_a_wrong_bound_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are the same within a row; gradients take the bound too."""
    monkeypatch.setattr(credit_scan_triton, "LONGEST_WALK", 12)
    batch = batch_of(random_masks([30, 3, 9]))
    results = []
    for bound in (None, 1, 12, 13, 30):
        rewards = batch.rewards.clone().requires_grad_()
        inputs = rewards, batch.values, batch.cu_seqlens
        rows = gae(*inputs, impl="triton", max_seqlen=bound, **batch.options())
        (gradient,) = torch.autograd.grad((rows[0] * rows[1].detach()).sum(), rewards)
        results.append(torch.stack([*rows, gradient]).detach())
    for result in results[1:]:
        assert_same_bits(result, results[0])
