"""Importance weights of packed batches: the kernel's on tokens lined up by turn or trajectory."""

import pytest
import torch
from hypothesis import given, strategies as st

from tests.packing.credit.credit_cases import (
    LAYOUTS,
    generated,
    given_beside,
    laid_out,
    new_context,
    some_trajectories,
)
from trajpack import pack
from trajpack.kernels import Correction, Rejection, importance_weights
from trajpack.kernels.corrections.importance_weights import IMPORTANCE_METRICS
from trajpack.testing import assert_same_bits, boundaries, trajectory_lists

CORRECTIONS = {
    "tis": Correction.tis(1.5),
    "tis of segments": Correction.tis(1.5, "segment"),
    "icepop": Correction.icepop(0.5, 2.0),
    "mis": Correction.mis(0.1, 3.0),
    "mis, geometric": Correction.mis(0.7, 1.6, "geometric"),
    "rejected": Correction(high=2.0, rejection=Rejection(0.7, 1.6)),
    "normalized": Correction("geometric", high=2.0, normalize=True),
}


def segments_of(trajectories, beside, per):
    """Log-probabilities of both policies for the generated tokens, by turn or by trajectory."""
    rows = iter(beside.logprobs)
    segments = []
    for trajectory in trajectories:
        turns = []
        for turn, context in zip(trajectory.turns, new_context(trajectory), strict=True):
            pairs = zip(next(rows)[context:], map(float, turn.completion_logprobs), strict=True)
            turns.append(list(pairs))
        segments += turns if per == "turn" else [[pair for turn in turns for pair in turn]]
    return segments


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per", ["trajectory", "turn"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_are_those_of_the_tokens_lined_up(name, per, layout):
    rule, trajectories = CORRECTIONS[name], some_trajectories(30)
    beside = given_beside(trajectories)
    batch = pack(trajectories, layout, device="cpu")
    weights, metrics = batch.importance_weights(laid_out(batch, beside.logprobs), rule, per=per)
    segments = segments_of(trajectories, beside, per)
    pairs = torch.tensor([pair for segment in segments for pair in segment])
    lined_up = importance_weights(
        pairs[:, 0],
        pairs[:, 1],
        torch.ones(len(pairs), dtype=torch.bool),
        rule,
        segments=boundaries([len(segment) for segment in segments]),
    )
    torch.testing.assert_close(generated(batch, weights), lined_up[0], rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(metrics, lined_up[1], rtol=1e-6, atol=1e-6)
    assert metrics[IMPORTANCE_METRICS.index("tokens")] == batch.num_generated


@given(trajectory_lists(), st.sampled_from([*CORRECTIONS]), st.sampled_from(["trajectory", "turn"]))
def test_both_layouts_weigh_a_token_the_same(trajectories, name, per):
    beside, rows = given_beside(trajectories), []
    for layout in LAYOUTS:
        batch = pack(trajectories, layout, device="cpu")
        logprobs = laid_out(batch, beside.logprobs)
        weights, _ = batch.importance_weights(logprobs, CORRECTIONS[name], per=per)
        rows.append(generated(batch, weights))
    if CORRECTIONS[name].normalize:
        torch.testing.assert_close(*rows, rtol=1e-6, atol=1e-6)
    else:
        assert_same_bits(*rows)


@pytest.mark.parametrize("per", ["trajectory", "turn"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_batches_without_tokens_and_devices_without_values_are_fine(name, per):
    empty = pack([], device="cpu")
    weights, metrics = empty.importance_weights(torch.zeros(0), CORRECTIONS[name], per=per)
    assert weights.shape == (0,)
    assert not metrics.any()
    batch = pack(some_trajectories(), device="meta")
    logprobs = torch.zeros(batch.num_tokens, device="meta")
    weights, metrics = batch.importance_weights(logprobs, CORRECTIONS[name], per=per)
    assert weights.is_meta
    assert metrics.shape == (len(IMPORTANCE_METRICS),)


def test_wrong_input_is_named():
    batch = pack(some_trajectories(), device="cpu")
    logprobs = torch.zeros(batch.num_tokens)
    with pytest.raises(ValueError, match="per must be one of 'trajectory', 'turn', got 'token'"):
        batch.importance_weights(logprobs, Correction(), per="token")
    for correction in (Correction.tis(), Correction.mis()):
        with pytest.raises(
            ValueError, match="importance_weights: logprobs must have one entry for each of"
        ):
            batch.importance_weights(logprobs[1:], correction)
        with pytest.raises(TypeError, match="logprobs must be"):
            batch.importance_weights(logprobs.long(), correction)
    with pytest.raises(TypeError, match="correction must be a Correction, got 'tis'"):
        batch.importance_weights(logprobs, "tis")
