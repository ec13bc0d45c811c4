"""Laws of the scans over tokens that hold for any input, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.kernels.credit.token_loops import (
    FLAGS,
    OBSERVATIONS,
    Batch,
    assert_rounds,
    batch_of,
    gae_of,
    small_blocks,
)
from trajpack.kernels.credit.discounted_returns import discounted_returns
from trajpack.kernels.credit.gae import gae
from trajpack.kernels.credit.vtrace import vtrace
from trajpack.testing import assert_same_bits

Estimate: TypeAlias = Callable[[Batch, Any, Any], tuple[torch.Tensor, ...]]
MOST = {"torch": 40, "triton": 3}
"""Examples of a law, by implementation: the executor takes its time."""

masks = st.text(sorted(FLAGS), max_size=20) | st.text(sorted(FLAGS), min_size=60, max_size=140)
short_masks = st.text(sorted(FLAGS), max_size=20)


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


def by_gae(batch: Batch, observation: Any, impl: Any) -> tuple[torch.Tensor, ...]:
    options = batch.options() | {"observation": observation, "impl": impl}
    return gae(batch.rewards, batch.values, batch.cu_seqlens, **options)


def by_vtrace(batch: Batch, observation: Any, impl: Any) -> tuple[torch.Tensor, ...]:
    options = batch.options() | {"observation": observation, "impl": impl}
    inputs = batch.rewards, batch.values, batch.cu_seqlens
    return vtrace(*inputs, batch.logprobs, batch.rollout_logprobs, c_clip=0.75, **options)


def by_returns(batch: Batch, observation: Any, impl: Any) -> tuple[torch.Tensor, ...]:
    options = {"loss_mask": batch.loss_mask, "observation": observation, "impl": impl}
    return (discounted_returns(batch.rewards, batch.cu_seqlens, batch.gammas, **options),)


ESTIMATES = pytest.mark.parametrize("estimate", [by_gae, by_vtrace, by_returns])


def check(law: Callable[..., None], impl: str, estimate: Estimate) -> None:
    """Try a law on random sequences: their masks, a choice of observation, and an order."""
    shape = masks if impl == "torch" else short_masks

    @given(
        drawn=st.lists(shape, min_size=1, max_size=5 if impl == "torch" else 3),
        observation=st.sampled_from(OBSERVATIONS),
        seed=st.integers(0, 99),
        choice=st.data(),
    )
    @settings(max_examples=MOST[impl])
    def tried(drawn: list[str], observation: str, seed: int, choice: st.DataObject) -> None:
        batch = batch_of(drawn, seed)
        law(batch, lambda part: estimate(part, observation, impl), choice)

    tried()


def parts_of(batch: Batch, rows: torch.Tensor) -> list[torch.Tensor]:
    return list(rows.split(batch.lengths))


@ESTIMATES
def test_the_order_of_sequences_does_not_count(estimate: Estimate, impl: str) -> None:
    def law(batch: Batch, run: Any, choice: st.DataObject) -> None:
        order = choice.draw(st.permutations(range(len(batch.lengths))))
        for rows, moved in zip(run(batch), run(batch.taken(order)), strict=True):
            parts = parts_of(batch, rows)
            assert_same_bits(moved, torch.cat([parts[at] for at in order]))

    check(law, impl, estimate)


@ESTIMATES
def test_a_sequence_alone_is_the_sequence_in_company(estimate: Estimate, impl: str) -> None:
    def law(batch: Batch, run: Any, choice: st.DataObject) -> None:
        at = choice.draw(st.integers(0, len(batch.lengths) - 1))
        for rows, alone in zip(run(batch), run(batch.taken([at])), strict=True):
            assert_same_bits(alone, parts_of(batch, rows)[at])

    check(law, impl, estimate)


@ESTIMATES
def test_no_value_crosses_a_boundary(estimate: Estimate, impl: str) -> None:
    def law(batch: Batch, run: Any, choice: st.DataObject) -> None:
        changed = choice.draw(st.integers(0, len(batch.lengths) - 1))
        begin = sum(batch.lengths[:changed])
        other = batch_of(["g" * len(batch.rewards)] + [""] * (len(batch.lengths) - 1), 100)
        inside = torch.arange(len(batch.rewards)) - begin
        inside = (inside >= 0) & (inside < batch.lengths[changed])
        mixed = batch._replace(
            rewards=torch.where(inside, other.rewards, batch.rewards),
            values=torch.where(inside, other.values, batch.values),
            loss_mask=torch.where(inside, ~batch.loss_mask, batch.loss_mask),
            logprobs=torch.where(inside, other.logprobs, batch.logprobs),
        )
        for rows, moved in zip(run(batch), run(mixed), strict=True):
            pairs = zip(parts_of(batch, rows), parts_of(batch, moved), strict=True)
            for at, (before, after) in enumerate(pairs):
                if at != changed:
                    assert_same_bits(after, before)

    check(law, impl, estimate)


@ESTIMATES
def test_padding_as_a_sequence_changes_no_bit(estimate: Estimate, impl: str) -> None:
    def law(batch: Batch, run: Any, choice: st.DataObject) -> None:
        pads = choice.draw(st.lists(st.integers(0, 9), min_size=1, max_size=2))
        padding = batch_of(["." * pad for pad in pads], 1)
        fields = zip(batch[1:], padding[1:], strict=True)
        padded = Batch(batch.lengths + pads, *[torch.cat(pair) for pair in fields])
        num = len(batch.rewards)
        for rows, longer in zip(run(batch), run(padded), strict=True):
            assert_same_bits(longer[:num], rows)
            assert_same_bits(longer[num:], torch.zeros(sum(pads)))

    check(law, impl, estimate)


def test_any_batch_equals_the_loop(impl: str) -> None:
    @given(
        drawn=st.lists(masks if impl == "torch" else short_masks, max_size=4),
        observation=st.sampled_from(OBSERVATIONS),
    )
    @settings(max_examples=MOST[impl] * 2)
    def tried(drawn: list[str], observation: str) -> None:
        batch = batch_of(drawn)
        rows = by_gae(batch, observation, impl)
        if drawn:
            for actual, exact in zip(rows, gae_of(batch, observation), strict=True):
                assert_rounds(actual, exact, magnitude=100.0)

    tried()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("observation", OBSERVATIONS)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@ESTIMATES
def test_numbers_that_are_not_finite_stay_in_their_sequence(
    estimate: Estimate, observation: str, poison: float, impl: str
) -> None:
    batch = batch_of(["gg..g", "g.gg.", "..ggg."])
    expected = estimate(batch, observation, impl)
    for name in ("rewards", "values", "logprobs"):
        spoilt = getattr(batch, name).clone()
        spoilt[5:10] = poison
        actual = estimate(batch._replace(**{name: spoilt}), observation, impl)
        for rows, clean in zip(actual, expected, strict=True):
            assert_same_bits(rows[:5], clean[:5])
            assert_same_bits(rows[10:], clean[10:])
