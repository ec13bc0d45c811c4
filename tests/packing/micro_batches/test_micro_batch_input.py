"""What micro-batches refuse, each with what was expected and what came."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from trajpack import Trajectory, Turn, pack
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.plan.plan import plan_micro_batches
from trajpack.packing.plan.ranks import plan_ranks

TURN = Turn([1, 2], [3], [-0.5])
BATCH = pack([Trajectory(name, [TURN]) for name in "abc"], device="cpu")
PLAN = plan_micro_batches(BATCH.seqlens, 6)
X = torch.zeros(9)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "sequence_multiple must be at least 1, got 0", {"sequence_multiple": 0}),
        (ValueError, "total must be at least 1, got -1", {"total": -1}),
        (TypeError, "total_multiple must be an integer, got float", {"total_multiple": 2.0}),
        (TypeError, "max_sequences must be an integer, got bool", {"max_sequences": True}),
        (TypeError, "token_id must be an integer, got str", {"token_id": "pad"}),
        (
            ValueError,
            "total must be a multiple of 24, .* got 100",
            {"sequence_multiple": 8, "total_multiple": 3, "total": 100},
        ),
        (ValueError, "tail must be 'sequence', 'extend' or 'separate', got 'x'", {"tail": "x"}),
        (ValueError, "positions must be 'continue' or 'zero', got 1", {"positions": 1}),
    ],
)
def test_an_alignment_that_cannot_be_is_refused(error, match, options):
    with pytest.raises(error, match=match):
        Alignment(**options)


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, r"sequences must be in \[0, 3\), got 3", ([0, 3],)),
        (ValueError, r"sequences must be in \[0, 3\), got -1", ([-1],)),
        (ValueError, r"sequences must be in .* got shape \[1, 1\]", ([[0]],)),
        (TypeError, "sequences must be integers, got float64", ([0.5],)),
        (
            ValueError,
            "must have at most max_sequences=1 sequences, got 2",
            ([0, 1], Alignment(max_sequences=1)),
        ),
        (
            ValueError,
            "must have at most total=8 tokens, its sequences take 12",
            ([0, 1, 2], Alignment(sequence_multiple=4, total=8)),
        ),
        (
            ValueError,
            "a micro-batch has a field 'returns' already",
            ([0], Alignment(), {"returns": X}),
        ),
        (TypeError, "tensors: 'x' must be a tensor, got list", ([0], Alignment(), {"x": [0.0]})),
        (
            ValueError,
            r"tensors: 'x' must have shape \[9, \.\.\.\], got \[8\]",
            ([0], Alignment(), {"x": X[1:]}),
        ),
        (
            ValueError,
            r"tensors: 'x' must have rows, of a dtype of at most 8 .* got complex128 \[9\]",
            ([0], Alignment(), {"x": X.to(torch.complex128)}),
        ),
        (
            ValueError,
            r"tensors: 'x' must have rows, .* got float32 \[9, 0\]",
            ([0], Alignment(), {"x": X[:, None][:, :0]}),
        ),
        (
            ValueError,
            "tensors: 'x' is on meta but the batch is on cpu",
            ([0], Alignment(), {"x": X.to("meta")}),
        ),
    ],
)
def test_a_selection_that_cannot_be_is_refused(error, match, arguments):
    with pytest.raises(error, match=match):
        BATCH.select(*arguments)


def test_a_plan_that_is_not_for_the_batch_is_refused():
    with pytest.raises(ValueError, match="the plan is for 2 sequences, the batch has 3"):
        BATCH.split(plan_micro_batches([3, 3], 6))
    with pytest.raises(ValueError, match="keeps 4 tokens of sequence 1, which has 3 in the batch"):
        BATCH.split(plan_micro_batches([3, 4, 3], 6))
    with pytest.raises(
        ValueError, match=r"micro-batch 0: .* at most total=4 tokens, its .* take 6"
    ):
        BATCH.split(PLAN, Alignment(total=4))


@pytest.mark.parametrize("plan", [plan_ranks([3, 3, 3], 2, 6), [[0, 1], [2]], None])
def test_what_is_no_plan_is_refused(plan):
    got = type(plan).__name__
    with pytest.raises(TypeError, match=f"plan must be a Plan, of one rank and step, got {got}"):
        BATCH.split(plan)


def test_counts_of_numpy_are_as_good_as_others():
    counts = {"sequence_multiple": 4, "total_multiple": 8, "total": 16, "max_sequences": 3}
    alignment = Alignment(**{name: np.int64(count) for name, count in counts.items()})
    assert repr(alignment) == repr(Alignment(**counts))
    micro_batch = BATCH.select([2, 0], alignment)
    assert (micro_batch.num_tokens, type(micro_batch.max_seqlen)) == (16, int)


@pytest.mark.parametrize(
    ("error", "match", "tensors"),
    [
        (ValueError, "has a field 'input_ids' already", {"input_ids": X[:8]}),
        (ValueError, r"'x' must have shape \[8, \.\.\.\], got \[9\]", {"x": X}),
        (TypeError, "tensors: 'x' must be a tensor, got list", {"x": [0] * 8}),
    ],
)
def test_a_share_that_cannot_be_is_refused(error, match, tensors):
    micro_batch = BATCH.select([0, 1], Alignment(sequence_multiple=4))
    with pytest.raises(error, match=match):
        micro_batch.shard(2, 0, tensors=tensors)
    with pytest.raises(ValueError, match=r"partition must be one of .* got 'x'"):
        micro_batch.shard(2, 0, "x")
    with pytest.raises(ValueError, match="cp_size must be at least 1, got 0"):
        micro_batch.shard(0, 0)


def test_one_rank_holds_everything_however_it_is_aligned():
    micro_batch = BATCH.select([0, 1])
    for partition in ("zigzag", "contiguous", "whole"):
        share = micro_batch.shard(1, 0, partition)
        assert torch.equal(share["input_ids"], micro_batch.input_ids)


def test_padding_that_was_not_planned_for_is_refused_where_it_goes_over_the_capacity():
    with pytest.raises(
        ValueError,
        match="micro-batch 0 has 8 tokens with sequence_multiple=4, over the capacity 6: plan with "
        "align=4",
    ):
        BATCH.split(PLAN, Alignment(sequence_multiple=4))
    planned = plan_micro_batches(BATCH.seqlens, 6, align=4)
    assert [one.num_tokens for one in BATCH.split(planned, Alignment(sequence_multiple=4))] == [
        4
    ] * 3


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


def test_nothing_cannot_be_merged():
    empty = pack([], device="cpu")
    plan = plan_micro_batches(empty.seqlens, 8, min_bins=0)
    assert empty.split(plan) == []
    with pytest.raises(ValueError, match="outputs must be one or more, got none"):
        empty.merge(plan, [])
