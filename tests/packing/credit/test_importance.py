"""Off-policy corrections of packed batches: by loops over turns, the same in both layouts."""

import math

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
from trajpack import StaticBatch, TrajectoryBuffer, pack
from trajpack.kernels import Correction, Rejection
from trajpack.kernels.corrections.importance_weights import IMPORTANCE_METRICS
from trajpack.testing import assert_same_bits, trajectory_lists

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
    """Logarithms of the ratios of what was generated, by turn or by trajectory."""
    rows = iter(beside.logprobs)
    segments = []
    for trajectory in trajectories:
        turns = []
        for turn, context in zip(trajectory.turns, new_context(trajectory), strict=True):
            pairs = zip(next(rows)[context:], turn.completion_logprobs, strict=True)
            turns.append([now - float(then) for now, then in pairs])
        segments += turns if per == "turn" else [[x for turn in turns for x in turn]]
    return segments


def ratios(segment, level):
    """A ratio for each token of a segment."""
    if level == "token":
        return [math.exp(x) for x in segment]
    total = math.fsum(segment)
    total = total if level == "segment" or not segment else total / len(segment)
    return [math.exp(max(-20.0, min(total, 20.0)))] * len(segment)


def bounded(ratio, rule):
    if rule.outside == "truncate":
        return max(rule.low, min(ratio, rule.high))
    return ratio if rule.outside == "keep" or rule.low <= ratio <= rule.high else 0.0


def weights_of(segments, rule):
    weights = [[bounded(ratio, rule) for ratio in ratios(s, rule.level)] for s in segments]
    if rule.normalize:
        spoken = [row[0] for row in weights if row]
        weights = [[w / (sum(spoken) / len(spoken)) for w in row] for row in weights]
    if (drop := rule.rejection) is not None:
        looked_at = (ratios(segment, drop.level) for segment in segments)
        weights = [
            [w if drop.low <= r <= drop.high else 0.0 for w, r in zip(row, at, strict=True)]
            for row, at in zip(weights, looked_at, strict=True)
        ]
    return [weight for row in weights for weight in row]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per", ["trajectory", "turn"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_are_those_of_a_loop(name, per, layout):
    rule, trajectories = CORRECTIONS[name], some_trajectories(30)
    beside = given_beside(trajectories)
    batch = pack(trajectories, layout, device="cpu")
    weights, metrics = batch.importance_weights(laid_out(batch, beside.logprobs), rule, per=per)
    expected = weights_of(segments_of(trajectories, beside, per), rule)
    torch.testing.assert_close(
        generated(batch, weights), torch.tensor(expected), rtol=2e-5, atol=1e-6
    )
    named = dict(zip(IMPORTANCE_METRICS, metrics.tolist(), strict=True))
    assert named["tokens"] == batch.num_generated
    assert named["weight_mean"] == pytest.approx(sum(expected) / len(expected), rel=1e-4)


def test_segments_of_turns_and_trajectories_are_not_the_same():
    trajectories = some_trajectories(30)
    batch = pack(trajectories, device="cpu")
    logprobs = laid_out(batch, given_beside(trajectories).logprobs)
    pair = [
        batch.importance_weights(logprobs, Correction.mis(), per=per)[0]
        for per in ("trajectory", "turn")
    ]
    assert not torch.equal(*pair)


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


@pytest.mark.parametrize("per", ["trajectory", "turn"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_padding_weighs_nothing(name, per):
    trajectories = some_trajectories(8)
    buffer = TrajectoryBuffer(device="cpu")
    buffer.extend(trajectories)
    plain = buffer.pack()
    padded = buffer.pack_into(StaticBatch(plain.num_tokens + 50, 60, device="cpu"))
    logprobs = laid_out(plain, given_beside(trajectories).logprobs)
    expected, metrics = plain.importance_weights(logprobs, CORRECTIONS[name], per=per)
    more = torch.cat([logprobs, torch.full((50,), torch.nan)])
    weights, same = padded.importance_weights(more, CORRECTIONS[name], per=per)
    torch.testing.assert_close(weights[: plain.num_tokens], expected, rtol=1e-6, atol=1e-6)
    assert not weights[plain.num_tokens :].any()
    torch.testing.assert_close(same, metrics, rtol=1e-9, atol=1e-9)


def test_wrong_input_is_named():
    batch = pack(some_trajectories(), device="cpu")
    logprobs = torch.zeros(batch.num_tokens)
    with pytest.raises(ValueError, match="per must be 'trajectory' or 'turn', got 'token'"):
        batch.importance_weights(logprobs, Correction(), per="token")
    for correction in (Correction.tis(), Correction.mis()):
        with pytest.raises(ValueError, match="must have one entry for each of"):
            batch.importance_weights(logprobs[1:], correction)
        with pytest.raises(TypeError, match="logprobs must be"):
            batch.importance_weights(logprobs.long(), correction)
    with pytest.raises(TypeError, match="correction must be a Correction, got 'tis'"):
        batch.importance_weights(logprobs, "tis")
