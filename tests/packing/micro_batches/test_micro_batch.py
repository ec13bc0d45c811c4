"""Micro-batches in a model: padding never leaks; labels, and shares of context parallelism."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.packing.micro_batches.micro_batch_loops import ALIGNMENTS, of_the_loss, some_batch
from trajpack import GRPO, Trajectory, Turn, pack
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.plan.plan import plan_micro_batches
from trajpack.testing import assert_same_bits, trajectory_lists


@pytest.fixture(scope="module")
def model():
    pytest.importorskip("transformers")
    from trajpack.agent import build_tiny_model

    return build_tiny_model()[0]


@pytest.fixture(scope="module")
def small_ids():
    """A batch whose token ids the model has, and what the model says of each sequence alone."""
    batch = some_batch(6, fields=[])
    batch.input_ids.remainder_(384)
    return batch


@pytest.fixture(scope="module")
def alone(model, small_ids):
    rows = small_ids.input_ids.split(list(small_ids.seqlens))
    with torch.no_grad():
        return torch.cat([model(row[None], use_cache=False).logits[0] for row in rows])


@pytest.mark.parametrize("alignment", ALIGNMENTS.values(), ids=ALIGNMENTS.keys())
def test_logits_of_real_tokens_do_not_depend_on_the_padding(model, small_ids, alone, alignment):
    plan = plan_micro_batches(small_ids.seqlens, 160, align=alignment.sequence_multiple)
    assert len(plan) > 1
    with torch.no_grad():
        logits = [
            model(**one.model_inputs()).logits[0]
            for one in small_ids.micro_batches(plan, alignment)
        ]
    merged = small_ids.merge(plan, logits, alignment)
    torch.testing.assert_close(merged, alone, rtol=0, atol=1e-5)


def test_the_model_takes_its_own_labels(model, small_ids, alone):
    """Its loss over labels at the tokens' own index is that of labels one place earlier."""
    one = small_ids.select([3, 1, 2], ALIGNMENTS["both, extending"])
    with torch.no_grad():
        output = model(**one.model_inputs(), labels=one.labels("own")[None])
    ahead = one.labels()
    loss = torch.nn.functional.cross_entropy(output.logits[0], ahead, ignore_index=-100)
    torch.testing.assert_close(output.loss, loss, rtol=1e-5, atol=1e-6)


def test_a_plan_of_parts_is_as_good_as_the_whole(model, small_ids):
    """Gradients of the micro-batches, through merged outputs, are those of the batch at once."""
    plan = plan_micro_batches(small_ids.seqlens, 160)
    weight = model.lm_head.weight
    grads = []
    for parts in (small_ids.split(plan), [small_ids]):
        logits = [model(**one.model_inputs()).logits[0] for one in parts]
        scores = [
            one.shift(row.log_softmax(-1).amax(-1), "right")
            for one, row in zip(parts, logits, strict=True)
        ]
        merged = small_ids.merge(plan, scores) if len(parts) > 1 else scores[0]
        (grad,) = torch.autograd.grad(merged[small_ids.loss_mask].sum(), weight)
        grads.append(grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("partition", ["zigzag", "contiguous", "whole"])
def test_shares_of_all_ranks_are_the_micro_batch(partition):
    batch = some_batch()
    alignment = Alignment(sequence_multiple=8, total_multiple=64, max_sequences=8)
    micro_batch = batch.select([4, 1, 0], alignment, tensors=of_the_loss(batch))
    labels = {"labels": micro_batch.labels()}
    shares = [micro_batch.shard(4, rank, partition, tensors=labels) for rank in range(4)]
    index = torch.cat([micro_batch.context_parallel_index(4, r, partition) for r in range(4)])
    whole = {n: t for n, t in micro_batch.tensors().items() if not n.startswith("cu_seqlens")}
    whole |= {**micro_batch.fields, **labels}
    assert set(shares[0]) == set(whole)
    for name, tensor in whole.items():
        gathered = torch.empty_like(tensor)
        gathered[index] = torch.cat([share[name] for share in shares])
        assert_same_bits(gathered, tensor, name)


def test_sequences_that_do_not_divide_are_refused_on_any_device():
    for device in ("cpu", "meta"):
        micro_batch = some_batch(2, device=device).select([0, 1], Alignment(total_multiple=8))
        first = micro_batch.seqlens[0]
        with pytest.raises(
            ValueError,
            match=f"a multiple of 8 tokens, sequence 0 takes {first}; .* sequence_multiple=8",
        ):
            micro_batch.shard(4, 0)


def three():
    """Three sequences of three tokens."""
    turn = Turn([1, 2], [3], [-0.5])
    return pack([Trajectory(name, [turn]) for name in "abc"], device="cpu")


@pytest.mark.parametrize(
    ("error", "match", "tensors"),
    [
        (ValueError, "has a field 'input_ids' already", {"input_ids": torch.zeros(8)}),
        (ValueError, r"'x' must have shape \[8, \.\.\.\], got \[9\]", {"x": torch.zeros(9)}),
        (TypeError, "tensors: 'x' must be a tensor, got list", {"x": [0] * 8}),
    ],
)
def test_a_share_that_cannot_be_is_refused(error, match, tensors):
    micro_batch = three().select([0, 1], Alignment(sequence_multiple=4))
    with pytest.raises(error, match=match):
        micro_batch.shard(2, 0, tensors=tensors)
    with pytest.raises(ValueError, match=r"partition must be one of .* got 'x'"):
        micro_batch.shard(2, 0, "x")
    with pytest.raises(ValueError, match="cp_size must be at least 1, got 0"):
        micro_batch.shard(0, 0)


def test_one_rank_holds_everything_however_it_is_aligned():
    micro_batch = three().select([0, 1])
    for partition in ("zigzag", "contiguous", "whole"):
        share = micro_batch.shard(1, 0, partition)
        assert torch.equal(share["input_ids"], micro_batch.input_ids)


# --- labels


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
