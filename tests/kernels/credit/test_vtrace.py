"""`vtrace` against the sums that define it, and against GAE and torchrl where they are the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels.credit.token_loops import (
    MASKS,
    OBSERVATIONS,
    Batch,
    Ratios,
    assert_rounds,
    batch_of,
    joined,
    small_blocks,
    vtrace_by_loop,
)
from tests.support.slow import slow_after
from trajpack.kernels.credit.vtrace import vtrace
from trajpack.testing import assert_same_bits

CLIPS = {"rho_clip": 0.875, "c_clip": 0.75, "advantage_rho_clip": 1.25}
"""All different, on both sides of 1, and exact in float32, as Triton's kernels get them."""


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


def traced(batch: Batch, impl: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return vtrace(
        batch.rewards, batch.values, batch.cu_seqlens, batch.logprobs, batch.rollout_logprobs,
        impl=impl, **batch.options() | options,
    )  # fmt: skip


def expected_of(batch: Batch, observation: str, clips: dict[str, float]) -> Any:
    logprobs = (rows.double() for rows in (batch.logprobs, batch.rollout_logprobs))
    ratios = (next(logprobs) - next(logprobs)).exp().split(batch.lengths)
    pairs = zip(batch.walks(), ratios, strict=True)
    return joined([vtrace_by_loop(w, Ratios(r.tolist(), **clips), observation) for w, r in pairs])


@pytest.mark.parametrize("observation", slow_after(2, OBSERVATIONS))
def test_it_is_the_sum_that_defines_it(observation: Any, impl: Any) -> None:
    batch = batch_of(MASKS)
    actual = traced(batch, impl, observation=observation, **CLIPS)
    for rows, exact in zip(actual, expected_of(batch, observation, CLIPS), strict=True):
        assert_rounds(rows, exact)


@pytest.mark.parametrize("name", CLIPS)
def test_every_clip_counts(name: str, impl: Any) -> None:
    batch = batch_of(["gg..gggg", "ggg"])
    clips = CLIPS | {name: math.inf}
    actual = traced(batch, impl, **clips)
    for rows, exact in zip(actual, expected_of(batch, "carry", clips), strict=True):
        assert_rounds(rows, exact)
    clipped = torch.cat(traced(batch, impl, **CLIPS))
    assert not torch.allclose(torch.cat(actual), clipped)


def test_it_equals_torchrl(impl: Any) -> None:
    torchrl = pytest.importorskip("torchrl.objectives.value.functional")
    batch = batch_of(["g" * 30])
    following = torch.cat([batch.values[1:], batch.bootstrap])
    columns = [rows.double()[:, None] for rows in (
        batch.logprobs, batch.rollout_logprobs, batch.values, following, batch.rewards
    )]  # fmt: skip
    done = torch.zeros(30, 1, dtype=torch.bool)
    expected = torchrl.vtrace_advantage_estimate(
        0.9, *columns, done, rho_thresh=torch.tensor(1.1), c_thresh=torch.tensor(0.8)
    )
    actual = traced(
        batch, impl, gamma=0.9, lam=1.0, rho_clip=1.1, c_clip=0.8, advantage_rho_clip=1.1
    )
    for rows, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(rows.double(), other[:, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("observation", ["carry", "carry_drop", "compact", "multiply"])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_values_and_logprobs_of_observations_do_not_count(observation: Any, impl: Any) -> None:
    """Neither its value nor its log-probabilities."""
    batch = batch_of(MASKS[:4])
    spoilt = batch._replace(
        **{
            name: torch.where(batch.loss_mask, getattr(batch, name), math.nan)
            for name in ("values", "logprobs", "rollout_logprobs")
        }
    )
    for rows, clean in zip(
        traced(spoilt, impl, observation=observation),
        traced(batch, impl, observation=observation),
        strict=True,
    ):
        assert_same_bits(rows, clean)
