"""Labels in the conventions in use, and shares of context parallelism."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.packing.micro_batches.micro_batch_loops import ALIGNMENTS, some_batch
from trajpack import GRPO, Trajectory, Turn, pack
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.testing import assert_same_bits, trajectory_lists


def labels_by_loop(batch, lengths, convention, ignore, counted):
    """Return labels sequence by sequence."""
    labels, start = [], 0
    for length in lengths:
        ids = [
            token if counts else ignore
            for token, counts in zip(
                batch.input_ids[start : start + length].tolist(),
                counted[start : start + length].tolist(),
                strict=True,
            )
        ]
        if convention == "own":
            ids[:1] = [ignore] * bool(ids)
        else:
            ids = ids[1:] + [ignore] * (convention == "next" and bool(ids))
        labels += ids
        start += length
    return torch.tensor(labels, dtype=torch.int64)


@given(
    drawn=trajectory_lists(max_size=3),
    alignment=st.sampled_from(list(ALIGNMENTS.values())[:6]),
    convention=st.sampled_from(["next", "own", "drop_last"]),
    generated_only=st.booleans(),
)
@settings(max_examples=30)
def test_any_labels_are_those_of_a_loop(drawn, alignment, convention, generated_only):
    batch = pack(drawn, device="cpu")
    micro_batch = batch.select(range(len(batch)), alignment)
    options = {"ignore": -7, "generated_only": generated_only}
    for one, lengths in ((batch, batch.seqlens), (micro_batch, micro_batch.padded_seqlens)):
        counted = one.loss_mask if generated_only else one.loss_mask | one.prompt_mask
        expected = labels_by_loop(one, lengths, convention, -7, counted)
        assert_same_bits(one.labels(convention, **options), expected)


def test_a_label_is_where_the_model_predicts_it():
    batch = some_batch()
    micro_batch = batch.select([4, 1], Alignment(sequence_multiple=4, total_multiple=64))
    ahead = micro_batch.labels()
    behind = micro_batch.shift(ahead, "right", -100)
    own = micro_batch.labels("own")
    assert_same_bits(behind, own)
    inputs = micro_batch.drop(micro_batch.input_ids, "last")
    assert inputs.shape == micro_batch.labels("drop_last").shape
    mask = micro_batch.shift(micro_batch.loss_mask, "left", False)
    assert ((ahead != -100) == mask).all()


def test_an_unknown_convention_is_refused():
    with pytest.raises(ValueError, match="'next', 'own' or 'drop_last', got 'roll'"):
        some_batch(1).labels("roll")


@pytest.mark.parametrize("op", ["shift", "drop"])
def test_advantages_that_are_missing_are_asked_for(op):
    batch = pack([Trajectory("a", [Turn([1], [2], [-0.5], reward=1.0)])])
    credited = batch.with_advantages(GRPO())
    direction = {"shift": "left", "drop": "last"}[op]
    for one, other in ((batch, credited), (batch.select([0]), credited.select([0]))):
        error = f"^{op}: x must be a tensor, got None; .* no advantages: call with_advantages first"
        with pytest.raises(TypeError, match=error):
            getattr(one, op)(one.advantages, direction)
        getattr(other, op)(other.advantages, direction)
        with pytest.raises(TypeError, match=r"x must be a tensor, got NoneType$"):
            getattr(other, op)(None, direction)
