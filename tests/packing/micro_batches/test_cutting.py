"""Micro-batches compared with slices of the batch, merged outputs, and refused input."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.packing.micro_batches.micro_batch_loops import (
    ALIGNMENTS,
    check_micro_batch,
    of_the_loss,
    some_batch,
)
from trajpack import GRPO, Trajectory, Turn, pack
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.plan.plan import plan_micro_batches, plan_ranks
from trajpack.testing import assert_same_bits, trajectory_lists


@pytest.mark.parametrize("layout", ["merged", "turns"])
@pytest.mark.parametrize("alignment", ALIGNMENTS.values(), ids=ALIGNMENTS.keys())
def test_a_selection_is_what_slices_come_to(alignment, layout):
    batch = some_batch(layout=layout).with_advantages(GRPO())
    tensors = of_the_loss(batch)
    for sequences in ([0], [5, 2, 2, 6], list(range(7)), []):
        selected = batch.select(sequences, alignment, tensors=tensors)
        check_micro_batch(selected, batch, sequences, alignment, tensors=tensors)


@pytest.mark.parametrize("alignment", [ALIGNMENTS["separate"], ALIGNMENTS["fixed, extending"]])
def test_the_kernel_selects_the_same(alignment):
    batch = some_batch(4)
    tensors = of_the_loss(batch)
    selected = batch.select([3, 1], alignment, tensors=tensors, impl="triton")
    check_micro_batch(selected, batch, [3, 1], alignment, tensors=tensors)


@given(
    drawn=trajectory_lists(max_size=5),
    layout=st.sampled_from(["merged", "turns"]),
    alignment=st.builds(
        Alignment,
        sequence_multiple=st.sampled_from([1, 2, 8]),
        total_multiple=st.sampled_from([1, 3, 16]),
        tail=st.sampled_from(["sequence", "extend", "separate"]),
        positions=st.sampled_from(["continue", "zero"]),
        max_sequences=st.none() | st.just(20),
    ),
    seed=st.integers(0, 9),
)
@settings(max_examples=25)
def test_a_plan_is_carried_out_and_outputs_come_back(drawn, layout, alignment, seed):
    batch = pack(drawn, layout, device="cpu")
    room = max([60, *batch.seqlens]) + seed
    plan = plan_micro_batches(
        batch.seqlens, room + 8, align=alignment.sequence_multiple, multiple_of=1 + seed % 4,
        max_sequences=20,
    )  # fmt: skip
    micro_batches = batch.split(plan, alignment)
    assert len(micro_batches) == len(plan)
    for micro_batch, sequences in zip(micro_batches, plan, strict=True):
        check_micro_batch(micro_batch, batch, sequences.tolist(), alignment)
    outputs = [
        torch.where(one.prompt_mask | one.loss_mask, one.input_ids + 1, 77) for one in micro_batches
    ]
    assert_same_bits(batch.merge(plan, outputs, alignment), batch.input_ids + 1)


@pytest.mark.parametrize("alignment", ALIGNMENTS.values(), ids=ALIGNMENTS.keys())
@pytest.mark.parametrize("shape", [(), (3,)])
def test_merging_brings_every_token_back_and_its_gradient(alignment, shape):
    batch = some_batch()
    plan = plan_micro_batches(batch.seqlens, 128, align=alignment.sequence_multiple)
    outputs = [
        torch.randn(one.num_tokens, *shape, requires_grad=True)
        for one in batch.micro_batches(plan, alignment)
    ]
    merged = batch.merge(plan, outputs, alignment)
    assert merged.shape == (batch.num_tokens, *shape)
    weights = torch.randn(merged.shape)
    (merged * weights).sum().backward()
    split = batch.split(plan, alignment, tensors={"weights": weights, "merged": merged.detach()})
    for output, one in zip(outputs, split, strict=True):
        real = one.prompt_mask | one.loss_mask
        assert_same_bits(output.grad, one.fields["weights"])
        assert_same_bits(output.detach()[real], one.fields["merged"][real])
        assert (output.grad[~real] == 0).all()


def test_what_a_plan_left_out_has_the_fill():
    turns = [Turn([1], [2, 3], [-1.0] * 2), Turn([1, 2, 3, 4], [5, 6, 7], [-1.0] * 3)]
    batch = pack([Trajectory("a", turns), Trajectory("b", turns[:1]), Trajectory("c", turns)])
    assert batch.turn_ends() == [[3, 7], [3], [3, 7]]
    plan = plan_micro_batches(
        batch.seqlens, 5, oversized="truncate_at_turn", turn_ends=batch.turn_ends()
    )
    assert dict(plan.truncated) == {0: 3, 2: 3}
    split = batch.split(plan)
    for one, sequences in zip(split, plan, strict=True):
        check_micro_batch(one, batch, sequences.tolist(), Alignment(), [3] * len(sequences))
    merged = batch.merge(plan, [one.input_ids for one in split], fill=-1)
    assert merged.tolist() == [1, 2, 3, -1, -1, -1, -1, 1, 2, 3, 1, 2, 3, -1, -1, -1, -1]
    dropping = plan_micro_batches(batch.seqlens, 5, oversized="drop")
    outputs = [one.rollout_logprobs for one in batch.split(dropping)]
    merged = batch.merge(dropping, outputs, fill=float("nan"))
    assert merged.isnan().tolist() == [True] * 7 + [False] * 3 + [True] * 7
    alone = plan_micro_batches(batch.seqlens, 5, oversized="own_bin", align=2)
    for one, sequences in zip(batch.split(alone, Alignment(2)), alone, strict=True):
        check_micro_batch(one, batch, sequences.tolist(), Alignment(2))


def test_dummies_have_no_loss_and_give_nothing_back():
    batch = some_batch(3)
    plan = plan_micro_batches(batch.seqlens, 500, multiple_of=4)
    split = batch.split(plan, Alignment(total_multiple=16), tensors=of_the_loss(batch))
    dummies = [one for one in split if one.is_dummy]
    assert len(dummies) == 1
    for one in dummies:
        assert (one.num_tokens, one.seqlens, one.sequences) == (16, (16,), ())
        assert not one.loss_mask.any()
        assert not one.prompt_mask.any()
        assert (one.labels() == -100).all()
        assert (one.labels(generated_only=False) == -100).all()
        assert "0 sequences; 16 tokens, 16 of padding" in repr(one)
    outputs = [one.input_ids.float() + float(one.is_dummy) for one in split]
    assert_same_bits(
        batch.merge(plan, outputs, Alignment(total_multiple=16)), batch.input_ids.float()
    )


def test_an_empty_batch_has_nothing_but_dummies():
    batch = pack([], device="cpu")
    plan = plan_micro_batches(batch.seqlens, 8)
    for one in (*batch.split(plan), batch.select([])):
        assert one.is_dummy
        assert one.num_tokens == 1
    assert batch.turn_ends() == []


@pytest.mark.parametrize("layout", ["merged", "turns"])
@given(drawn=trajectory_lists())
@settings(max_examples=15)
def test_turns_end_where_their_sequences_do(drawn, layout):
    batch = pack(drawn, layout, device="cpu")
    ends = batch.turn_ends()
    assert [one[-1] for one in ends] == list(batch.seqlens)
    assert sum(map(len, ends)) == batch.num_turns


TURN = Turn([1, 2], [3], [-0.5])
BATCH = pack([Trajectory(name, [TURN]) for name in "abc"], device="cpu")
PLAN = plan_micro_batches(BATCH.seqlens, 6)
X = torch.zeros(9)


WRONG_ALIGNMENTS = {
    "sequence_multiple must be at least 1, got 0": {"sequence_multiple": 0},
    "total must be at least 1, got -1": {"total": -1},
    "total_multiple must be an integer, got float": {"total_multiple": 2.0},
    "max_sequences must be an integer, got bool": {"max_sequences": True},
    "token_id must be an integer, got str": {"token_id": "pad"},
    "must be a multiple of 8, .* got 100": {"sequence_multiple": 8, "total": 100},
    "must be a multiple of 24, .* got 8": {"sequence_multiple": 8, "total_multiple": 3, "total": 8},
    "tail must be 'sequence', 'extend' or 'separate', got 'x'": {"tail": "x"},
    "positions must be 'continue' or 'zero', got 1": {"positions": 1},
}


PLAIN = Alignment()
WRONG_SELECTIONS = {
    r"sequences must be in \[0, 3\), got 3": ([0, 3],),
    r"sequences must be in \[0, 3\), got -1": ([-1],),
    r"sequences must be in .* got shape \[1, 1\]": ([[0]],),
    "sequences must be integers, got float64": ([0.5],),
    "must have at most max_sequences=1 sequences, got 2": ([0, 1], Alignment(max_sequences=1)),
    "must have at most total=8 tokens, its sequences take 12": (range(3), Alignment(4, total=8)),
    "a micro-batch has a field 'returns' already": ([0], PLAIN, {"returns": X}),
    "tensors: 'x' must be a tensor, got list": ([0], PLAIN, {"x": [0.0]}),
    r"tensors: 'x' must have shape \[9, \.\.\.\], got \[8\]": ([0], PLAIN, {"x": X[1:]}),
    r"'x' must have rows, of a dtype of at most 8 .* got complex128 \[9\]": (
        [0], PLAIN, {"x": X.to(torch.complex128)},
    ),
    r"tensors: 'x' must have rows, .* got float32 \[9, 0\]": ([0], PLAIN, {"x": X.new_zeros(9, 0)}),
    "tensors: 'x' is on meta but the batch is on cpu": ([0], PLAIN, {"x": X.to("meta")}),
}  # fmt: skip


FOR_TWO = plan_micro_batches([3, 3], 6)
WRONG_PLANS = {
    "the plan is for 2 sequences, the batch has 3": (FOR_TWO,),
    "keeps 4 tokens of sequence 1, which has 3 in": (plan_micro_batches([3, 4, 3], 6),),
    "micro-batch 0: .* at most total=4 tokens, its .* take 6": (PLAN, Alignment(total=4)),
    "must be a Plan, of one rank and step, got RankPlan": (plan_ranks([3, 3, 3], 2, 6),),
    "must be a Plan, of one rank and step, got list": ([[0, 1], [2]],),
    "must be a Plan, of one rank and step, got NoneType": (None,),
    "8 tokens with sequence_multiple=4, over the capacity 6: plan with align=4": (
        PLAN,
        Alignment(4),
    ),
}


@pytest.mark.parametrize(
    ("call", "words", "given"),
    [
        *((Alignment, *row) for row in WRONG_ALIGNMENTS.items()),
        *((BATCH.select, *row) for row in WRONG_SELECTIONS.items()),
        *((BATCH.micro_batches, *row) for row in WRONG_PLANS.items()),  # before the first is made
    ],
)
def test_what_cannot_be_cut_is_refused(call, words, given):
    is_type = re.search("an integer|be integers|be a tensor|be a Plan", words)
    places, named = ((), given) if isinstance(given, dict) else (given[:2], {})
    if len(given) > 2 and places:
        named = {"tensors": given[2]}
    with pytest.raises(TypeError if is_type else ValueError, match=words):
        call(*places, **named)


@pytest.mark.parametrize(
    ("error", "match", "outputs"),
    [
        (ValueError, "outputs must be 2, one of each micro-batch, got 1", [X]),
        (TypeError, "output 1 must be a tensor, got int", [X[:6], 3]),
        (ValueError, r"output 0 must have shape \[6, \.\.\.\].*got \[5\]", [X[:5], X[:3]]),
        (ValueError, r"output 1 must have shape \[3, \.\.\.\].*got \[\]", [X[:6], X[0]]),
        (
            ValueError,
            r"output 1 must have rows of float32 \[\] on cpu, .* got float16 \[\] on cpu",
            [X[:6], X[:3].half()],
        ),
        (ValueError, r"output 1 must have rows .* got float32 \[1\]", [X[:6], X[:3, None]]),
        (ValueError, "output 0 must have rows .* on meta", [X[:6].to("meta"), X[:3].to("meta")]),
    ],
)
def test_outputs_that_are_none_of_the_micro_batches_are_refused(error, match, outputs):
    assert [one.num_tokens for one in BATCH.split(PLAN)] == [6, 3]
    with pytest.raises(error, match=match):
        BATCH.merge(PLAN, outputs)


def test_a_sequence_in_two_micro_batches_cannot_be_merged():
    twice = dataclasses.replace(PLAN)
    object.__setattr__(twice, "order", np.array([0, 1, 0]))
    with pytest.raises(ValueError, match="sequence 0 is in more than one micro-batch"):
        BATCH.merge(twice, [X[:6], X[:3]])
