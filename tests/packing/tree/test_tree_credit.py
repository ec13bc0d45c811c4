"""Entries get the bits that the tokens have in the layout ``"merged"``."""

import pytest
import torch

from tests.packing.credit.credit_cases import (
    EVERY,
    generated,
    given_beside,
    inputs_of,
    is_whitened,
    small_scans,
    some_trajectories,
)
from trajpack import Correction, pack, pack_tree
from trajpack.kernels.scan.observations import PASSING
from trajpack.testing import assert_same_bits

TRAJECTORIES = some_trajectories(12, 9, seed=3)
PER_TOKEN = ("values", "logprobs", "ref_logprobs")
SERVED = {
    name: estimator
    for name, estimator in EVERY.items()
    if getattr(estimator, "observation", "carry") in PASSING
}

OF_EACH_KERNEL = ("GAE", "TurnGAE", "VTrace, carry", "GRPO", "GiGPO")


def at_entries(merged, rows):
    """Move a tensor over tokens to the entries."""
    return torch.cat([rows[:0], *(rows[begin:end] for begin, end in merged.turn_spans.tolist())])


@pytest.mark.parametrize(
    ("name", "impl"),
    [*((name, "torch") for name in SERVED), *((name, "triton") for name in OF_EACH_KERNEL)],
)
def test_advantages_are_those_of_the_merged_layout(name, impl):
    estimator, merged = SERVED[name], pack(TRAJECTORIES)
    inputs = inputs_of(merged, estimator, given_beside(TRAJECTORIES))
    moved = {
        key: at_entries(merged, rows) if key in PER_TOKEN else rows for key, rows in inputs.items()
    }
    with small_scans():
        expected = merged.with_advantages(estimator, impl=impl, **inputs)
        tree = pack_tree(TRAJECTORIES).with_advantages(estimator, impl=impl, **moved)
    for key in ("advantages", "returns"):
        got, want = getattr(tree, key), generated(expected, getattr(expected, key))
        if is_whitened(estimator):
            torch.testing.assert_close(got, want)
        else:
            assert_same_bits(got, want, key)
    torch.testing.assert_close(tree.entries.metrics, expected.metrics)


@pytest.mark.parametrize("name", sorted(set(EVERY) - set(SERVED)))
def test_steps_that_were_not_generated_are_refused(name):
    with pytest.raises(ValueError, match="a tree has no entries for observation='"):
        pack_tree(TRAJECTORIES).with_advantages(EVERY[name])


@pytest.mark.parametrize("truncated", ["keep", "mask"])
@pytest.mark.parametrize(
    ("aggregation", "per"),
    [
        ("token_mean", "trajectory"),
        ("prompt_mean", "trajectory"),
        *(
            (f"sequence_mean_token_{kind}", per)
            for kind in ("mean", "sum")
            for per in ("trajectory", "turn", "row")
        ),
    ],
)
def test_loss_weights_are_those_of_the_merged_layout(aggregation, per, truncated):
    merged, tree = pack(TRAJECTORIES), pack_tree(TRAJECTORIES)
    options = {"per": per, "truncated": truncated}
    expected = merged.loss_weights(aggregation, **options)
    assert_same_bits(tree.loss_weights(aggregation, **options), generated(merged, expected))
    by_ten = merged.loss_weights(aggregation, denominator=10.0, **options)
    got = tree.loss_weights(aggregation, denominator=10.0, **options)
    assert_same_bits(got, generated(merged, by_ten))
    counts = [of.loss_denominator(aggregation, **options) for of in (tree, merged)]
    assert_same_bits(*counts)


@pytest.mark.parametrize("per", ["trajectory", "turn"])
@pytest.mark.parametrize(
    "correction",
    [Correction.tis(2.0), Correction(level="segment"), Correction(level="geometric")],
    ids=["token", "segment", "geometric"],
)
def test_corrections_are_those_of_the_merged_layout(correction, per):
    merged, tree = pack(TRAJECTORIES), pack_tree(TRAJECTORIES)
    generator = torch.Generator().manual_seed(0)
    logprobs = merged.rollout_logprobs + 0.1 * torch.randn(merged.num_tokens, generator=generator)
    expected, metrics = merged.importance_weights(logprobs, correction, per=per)
    got, others = tree.importance_weights(at_entries(merged, logprobs), correction, per=per)
    assert_same_bits(got, at_entries(merged, expected))
    torch.testing.assert_close(others, metrics)
