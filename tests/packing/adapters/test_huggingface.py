import dataclasses
from itertools import product

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import DataCollatorWithFlattening

from tests.packing.adapters.cases import sequences_of, some_batch
from trajpack import pack, plan_micro_batches
from trajpack.packing.adapters.huggingface import to_padding_free
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.testing import assert_same_bits, trajectory_lists

OPTIONS = {
    "by itself": {},
    "all": {
        "return_flash_attn_kwargs": True,
        "return_seq_idx": True,
        "position_ids_start": 2,
        "separator_id": -7,
    },
    "no positions": {"return_position_ids": False, "return_seq_idx": True},
}


def collated(batch, labels, options):
    """Collate the sequences with the real collator, masked labels given where there are some."""
    features = []
    masks = sequences_of(batch, batch.loss_mask)
    for tokens, mask in zip(sequences_of(batch, batch.input_ids), masks, strict=True):
        feature = {"input_ids": tokens.tolist()}
        if labels == "generated":
            feature["labels"] = torch.where(mask, tokens, -100).tolist()
        features.append(feature)
    return DataCollatorWithFlattening(return_tensors="pt", **options)(features)


def assert_same(ours, theirs):
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        if isinstance(value, int):
            assert ours[key] == value, key
            assert type(ours[key]) is int, key
        else:
            assert_same_bits(ours[key], value, key)


@settings(max_examples=40)
@given(
    trajectory_lists(),
    st.sampled_from(["merged", "turns"]),
    st.sampled_from([*OPTIONS.values()]),
    st.sampled_from(["generated", "all"]),
)
def test_any_batch_equals_the_collated_sequences(trajectories, layout, options, labels):
    batch = pack(trajectories, layout, device="cpu")
    if not len(batch):  # of which the collator makes nothing
        assert to_padding_free(batch)["labels"].shape == (1, 0)
        return
    assert_same(to_padding_free(batch, labels=labels, **options), collated(batch, labels, options))


@pytest.mark.parametrize("labels", ["generated", "all"])
def test_a_micro_batch_equals_its_collated_sequences(labels):
    micro_batch = some_batch().select([3, 0, 5])
    options = OPTIONS["all"]
    ours = to_padding_free(micro_batch, labels=labels, **options)
    assert_same(ours, collated(micro_batch, labels, options))


def test_tensors_are_views():
    batch = some_batch()
    ours = to_padding_free(batch, return_flash_attn_kwargs=True)
    for key, tensor in (("input_ids", batch.input_ids), ("position_ids", batch.position_ids)):
        assert ours[key].data_ptr() == tensor.data_ptr()
    assert ours["cu_seq_lens_k"] is batch.cu_seqlens


def test_a_model_sees_sequences_apart_and_its_loss_is_that_of_generated_tokens():
    from trajpack.agent import build_tiny_model

    model, _ = build_tiny_model(seed=0)
    batch = some_batch()
    loss = model(**to_padding_free(batch), use_cache=False).loss
    losses = []
    masks = sequences_of(batch, batch.loss_mask)
    for tokens, mask in zip(sequences_of(batch, batch.input_ids), masks, strict=True):
        logits = model(tokens[None], use_cache=False).logits[0].log_softmax(-1)
        losses.append(-logits[:-1].gather(1, tokens[1:, None])[mask[1:], 0])
    torch.testing.assert_close(loss, torch.cat(losses).mean(), rtol=1e-5, atol=1e-5)


def test_other_labels_are_refused():
    with pytest.raises(ValueError, match="labels must be 'generated' or 'all', got 'none'"):
        to_padding_free(some_batch(), labels="none")


@pytest.mark.parametrize("labels", ["generated", "all"])
@pytest.mark.parametrize("chosen", [[3, 0, 5], []], ids=["sequences", "dummy"])
@pytest.mark.parametrize("tail", ["sequence", "extend", "separate"])
def test_padding_has_no_label_and_is_within_the_boundaries(tail, chosen, labels):
    alignment = Alignment(sequence_multiple=8, total=64, tail=tail, positions="zero")
    micro_batch = some_batch().select(chosen, alignment)
    padding = (micro_batch.turn_ids < 0) & ~micro_batch.prompt_mask
    found = to_padding_free(
        micro_batch, labels=labels, separator_id=-7, return_flash_attn_kwargs=True
    )
    ours = found["labels"][0]
    assert ours[padding].tolist() == [-100] * micro_batch.num_padding
    assert int((ours == -7).sum()) == len(chosen)
    kept = int(micro_batch.loss_mask.sum() if labels == "generated" else (~padding).sum())
    assert int((ours >= 0).sum()) == kept - (labels == "all") * len(chosen)
    assert found["cu_seq_lens_q"][-1] == len(ours) == 64
    assert found["max_length_q"] == int(found["cu_seq_lens_k"].diff().max())


def test_tokens_that_a_mask_leaves_out_have_labels_only_among_all():
    batch = some_batch()
    stale = batch.policy_versions == 1
    fresh = dataclasses.replace(batch, loss_mask=batch.loss_mask & ~stale)
    generated = to_padding_free(fresh)["labels"][0]
    assert set(generated[stale].tolist()) == {-100}
    assert torch.equal(generated[fresh.loss_mask], batch.input_ids[fresh.loss_mask])
    ours = to_padding_free(fresh, labels="all")
    assert torch.equal(ours["labels"], to_padding_free(batch, labels="all")["labels"])


def test_a_sequence_that_a_plan_cuts_off_is_labelled_as_far_as_it_is_kept():
    batch = some_batch()
    plan = plan_micro_batches(
        batch.seqlens, 12, oversized="truncate_at_turn", turn_ends=batch.turn_ends()
    )
    assert plan.truncated
    whole = sequences_of(batch, to_padding_free(batch)["labels"][0])
    for micro_batch in batch.micro_batches(plan, Alignment(total=16, tail="extend")):
        labels = sequences_of(micro_batch, to_padding_free(micro_batch)["labels"][0])
        for sequence, ours in zip(micro_batch.sequences, labels, strict=True):
            assert ours.tolist() == whole[sequence][: len(ours)].tolist()


def test_padding_at_any_place_changes_no_loss_of_a_model():
    from trajpack.agent import build_tiny_model

    model, _ = build_tiny_model(seed=0)
    batch = some_batch()
    for labels in ("generated", "all"):
        plain = to_padding_free(batch.select([3, 0, 5]), labels=labels)
        expected = model(**plain, use_cache=False).loss
        for tail, positions in product(["sequence", "extend", "separate"], ["continue", "zero"]):
            alignment = Alignment(sequence_multiple=8, total=64, tail=tail, positions=positions)
            padded = to_padding_free(batch.select([3, 0, 5], alignment), labels=labels)
            loss = model(**padded, use_cache=False).loss
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
