"""Advantages on the host, rows side by side: the reference's bits, whatever is walked together."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from trajpack.kernels.credit.gae import gae
from trajpack.kernels.scan import credit_scan_host
from trajpack.kernels.scan.credit_scan import Scan, credit_scan_reference
from trajpack.kernels.scan.credit_scan_host import ROW, advantages_on_host
from trajpack.kernels.scan.observations import OBSERVATIONS
from trajpack.testing import assert_same_bits, boundaries

pytestmark = pytest.mark.usefixtures("poisoned_memory")
EDGES = [ROW + more for more in (-1, 0, 1)] + [2 * ROW + more for more in (-1, 0, 1)]


def scan_of(lengths: list[int], observation: str = "carry", seed: int = 0, **changed: Any) -> Scan:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    rewards, values = torch.randn(2, tokens, generator=generator)
    mask = torch.rand(tokens, generator=generator) < 0.6
    cu_seqlens = boundaries(lengths)
    scan = Scan(cu_seqlens, tokens, tokens, rewards, values, mask, 0.99, 0.95, observation)
    return scan._replace(**changed)


def assert_like_reference(scan: Scan) -> None:
    for got, wanted in zip(advantages_on_host(scan), credit_scan_reference(scan), strict=True):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.parametrize("lengths", [[], [0, 0], [1], [0, 3, 0, 1, 2, 0], EDGES, [5 * ROW + 7]])
def test_all_observations_have_the_bits_of_the_reference(
    observation: str, lengths: list[int]
) -> None:
    scan = scan_of(lengths, observation)
    assert_like_reference(scan)
    assert_like_reference(scan._replace(loss_mask=None))


@pytest.mark.parametrize("rows_at_once", [1, 3, 7])
def test_it_does_not_matter_how_many_rows_are_walked_together(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credit_scan_host, "ROWS_AT_ONCE", rows_at_once)
    assert_like_reference(scan_of([0, 700, 3, *EDGES, 64 * ROW + 1]))


def test_rates_and_bootstraps_are_those_of_each_segment() -> None:
    lengths = [200, 0, 1, 65, 300]
    each = torch.rand(3, len(lengths), dtype=torch.float64)
    scan = scan_of(lengths, gammas=each[0], lams=each[1], bootstrap=each[2].float())
    assert_like_reference(scan)
    assert_like_reference(scan._replace(gammas=None, loss_mask=None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_may_be_left_out_and_rewards_be_more_precise(dtype: torch.dtype) -> None:
    scan = scan_of([300, 70])
    assert scan.rewards is not None
    assert_like_reference(scan._replace(values=None, rewards=scan.rewards.to(dtype)))


def test_what_was_not_generated_may_be_nan_where_it_counts_nowhere() -> None:
    scan = scan_of([300, 70], "carry_drop")
    assert scan.rewards is not None
    assert scan.values is not None
    assert scan.loss_mask is not None
    for tensor in (scan.rewards, scan.values):
        tensor[~scan.loss_mask] = float("nan")
    assert_like_reference(scan)
    assert all(rows.isfinite().all() for rows in advantages_on_host(scan))


def test_a_gain_that_overflows_leaves_a_state_of_nothing() -> None:
    scan = scan_of([5 * ROW], gamma=1e12, lam=1.0, loss_mask=None)
    assert scan.rewards is not None
    assert scan.values is not None
    scan.rewards[:-3] = 0
    for tensor in (scan.rewards, scan.values):
        tensor[ROW:] = 0  # behind the first row there is nothing
    assert_like_reference(scan)
    advantages, _ = advantages_on_host(scan)
    assert not advantages[ROW:].any()
    assert not advantages.isnan().any()


def test_bits_do_not_depend_on_company() -> None:
    lengths = [130, 0, 64, 1, 3000, 63]
    scan = scan_of(lengths)
    packed = advantages_on_host(scan)
    bounds = np.append(0, np.cumsum(lengths))
    for begin, end in pairwise(bounds):
        part = slice(int(begin), int(end))
        tensors = (scan.rewards, scan.values, scan.loss_mask)
        rewards, values, mask = (None if t is None else t[part] for t in tensors)
        alone = scan_of([int(end - begin)], rewards=rewards, values=values, loss_mask=mask)
        for one, all_of_them in zip(advantages_on_host(alone), packed, strict=True):
            assert_same_bits(one, all_of_them[part])


def test_it_is_what_gae_runs_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    real = credit_scan_host.advantages_on_host
    monkeypatch.setattr(
        "trajpack.kernels.scan.credit_scan.advantages_on_host",
        lambda scan: ran.append(1) or real(scan),
    )
    scan = scan_of([10, 5])
    assert scan.rewards is not None
    assert scan.values is not None
    gae(scan.rewards, scan.values, scan.cu_seqlens, loss_mask=scan.loss_mask)
    assert ran == [1]
