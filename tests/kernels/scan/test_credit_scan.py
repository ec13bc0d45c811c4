"""The recurrence behind every scan, in doubling rounds and in rows on the host; and the op."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import TypeAlias

import numpy as np
import pytest
import torch

from tests.kernels.credit.token_loops import batch_of, small_blocks
from tests.support.slow import slow_after
from trajpack.kernels.scan import credit_scan
from trajpack.kernels.scan.credit_scan import (
    ENTRIES_AT_ONCE,
    ROW,
    EntryIndex,
    exclusive_scan_on_host,
    exclusive_scan_reference,
)
from trajpack.kernels.scan.scan_inputs import KINDS, Limits, Scan
from trajpack.testing import assert_same_bits, boundaries

OP = torch.ops.trajpack.credit_scan.default
Recurrence: TypeAlias = Callable[..., torch.Tensor]
SCANS = pytest.mark.parametrize("scan", [exclusive_scan_on_host, exclusive_scan_reference])


def inputs_of(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    rng = np.random.default_rng(seed)
    decay, increment = rng.uniform(-1, 1, sum(lengths)), rng.standard_normal(sum(lengths))
    decay[rng.random(len(decay)) < 0.5] = 1.0  # tokens that were not generated
    start = torch.from_numpy(rng.standard_normal(len(lengths)))
    return torch.from_numpy(decay), torch.from_numpy(increment), start, boundaries(lengths)


def by_loop(
    decay: torch.Tensor, increment: torch.Tensor, start: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    decays, increments, states = decay.tolist(), increment.tolist(), [0.0] * len(decay)
    bounds = cu_seqlens.tolist()
    for begin, end, behind in zip(bounds[:-1], bounds[1:], start.tolist(), strict=True):
        state = behind
        for entry in reversed(range(begin, end)):
            states[entry] = state
            state = decays[entry] * state + increments[entry]
    return torch.tensor(states, dtype=torch.float64)


@SCANS
@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [0],
        [0, 0],
        [1],
        [3, 0, 1, 2],
        [ROW - 1, ROW, ROW + 1, 0],
        [2 * ROW, 2 * ROW + 1],
        [5000],
    ],
)
def test_it_equals_the_loop(scan: Recurrence, lengths: list[int]) -> None:
    inputs = inputs_of(lengths)
    torch.testing.assert_close(scan(*inputs), by_loop(*inputs), rtol=1e-12, atol=1e-12)


def test_the_host_takes_rows_of_rows_and_more_than_at_once() -> None:
    lengths = [ROW**2, 3, ROW**2 + 1, 0, 2 * ROW**2 + ROW, *[1] * (ENTRIES_AT_ONCE // ROW), 70]
    inputs = inputs_of(lengths)
    actual = exclusive_scan_on_host(*inputs)
    torch.testing.assert_close(actual, by_loop(*inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("at_once", [1, 3 * ROW, 7 * ROW])
def test_the_number_of_rows_walked_together_changes_no_bit(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of([0, 700, 3, ROW - 1, ROW, ROW + 1, ROW**2 + 1])
    expected = exclusive_scan_on_host(*inputs)
    monkeypatch.setattr(credit_scan, "ENTRIES_AT_ONCE", at_once)
    assert_same_bits(exclusive_scan_on_host(*inputs), expected)


def test_short_segments_are_the_loop_to_the_bit() -> None:
    """The host walks a row as the loop does, with nothing fused and nothing reordered."""
    inputs = inputs_of(list(range(ROW + 1)))
    assert_same_bits(exclusive_scan_on_host(*inputs), by_loop(*inputs))


@SCANS
def test_a_segment_has_the_same_bits_beside_any_segments(scan: Recurrence) -> None:
    lengths = [ROW, 3, 5 * ROW + 1, 0, 1, 999, *range(0, 150, 7)]
    decay, increment, start, cu_seqlens = inputs_of(lengths)
    together = scan(decay, increment, start, cu_seqlens).split(lengths)
    for at, (decays, increments) in enumerate(
        zip(decay.split(lengths), increment.split(lengths), strict=True)
    ):
        alone = scan(
            decays.clone(), increments.clone(), start[at : at + 1], boundaries([len(decays)])
        )
        assert_same_bits(together[at], alone)


@SCANS
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_no_number_leaks_into_another_segment(scan: Recurrence, poison: float) -> None:
    decay, increment, start, cu_seqlens = inputs_of([70, 90, 5])
    clean = scan(decay, increment, start, cu_seqlens)
    decay[70:160], increment[70:160], start[1] = poison, poison, poison
    spoilt = scan(decay, increment, start, cu_seqlens)
    assert_same_bits(spoilt[:70], clean[:70])
    assert_same_bits(spoilt[160:], clean[160:])


@SCANS
def test_a_state_of_zero_stays_zero_though_decays_overflow(scan: Recurrence) -> None:
    decay = torch.full((300,), 1e30, dtype=torch.float64)
    states = scan(decay, torch.zeros(300).double(), torch.zeros(1).double(), boundaries([300]))
    assert_same_bits(states, torch.zeros(300, dtype=torch.float64))


def test_entries_have_a_segment_and_mark_its_ends() -> None:
    index = EntryIndex(boundaries([0, 2, 0, 1, 0]), 3)
    assert index.segment.tolist() == [1, 1, 3]
    assert index.is_first.tolist() == [True, False, True]
    assert index.is_last.tolist() == [False, True, True]


def test_entries_behind_the_last_segment_belong_to_it() -> None:
    assert EntryIndex(boundaries([1, 2]), 5).segment.tolist() == [0, 1, 1, 1, 1]


@pytest.fixture
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    slow_after(
        1,
        [
            ("returns", torch.float64),
            ("gae", torch.float32),
            ("gae", torch.float64),
            *((kind, torch.float32) for kind in KINDS if kind != "gae"),
        ],
    ),
)
def test_the_operator_is_registered_right(kind: str, dtype: torch.dtype, impl: str) -> None:
    batch = batch_of(["gg.g", "", "g"], dtype=dtype)
    leaves = [batch.rewards]
    if kind in ("gae", "returns"):
        leaves.append(batch.rewards.clone().requires_grad_())
    scan = Scan(
        batch.cu_seqlens, lam=0.5, observation="reset", gammas=batch.gammas, limits=[*Limits()],
        kind=kind,
    )  # fmt: skip
    if kind in ("gae", "vtrace"):
        scan = scan._replace(values=batch.values, lams=batch.lams, bootstrap=batch.bootstrap)
    if kind == "vtrace":
        limits = [*Limits(rho_clip=0.875, c_clip=0.75, advantage_rho_clip=1.25)]
        weights = {"logprobs": batch.logprobs, "rollout_logprobs": batch.rollout_logprobs}
        scan = scan._replace(limits=limits, **weights)
    for leaf, (mask, bound) in product(leaves, ((batch.loss_mask, 4), (None, None))):
        given = scan._replace(rewards=leaf, loss_mask=mask, max_seqlen=bound)
        torch.library.opcheck(OP, (*given, "op", impl))
