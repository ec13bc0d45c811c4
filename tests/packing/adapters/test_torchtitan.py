import dataclasses

import numpy as np
import pytest
import torch

from tests.packing.adapters.cases import clipped_loss, random_batch, some_batch
from tests.packing.adapters.peers import stand_ins
from trajpack import plan_micro_batches
from trajpack.packing.adapters.torchtitan import to_training_microbatch, to_training_samples
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.testing import assert_same_bits

SEQ_LEN, PAD = 48, 7


@pytest.fixture
def torchtitan(peer):
    """Its RL batcher and types."""
    return peer("torchtitan").load("torchtitan.experiments.rl.components.batcher")


def collated(module, batch, rows, multiple=None):
    """Give the real batcher our samples, a row of them at a time, and let it collate the rows."""
    config = module.Batcher.Config(
        batch=module.BatchConfig(local_batch_size=1, seq_len=SEQ_LEN),
        per_sample_pad_multiple=multiple,
    )
    batcher = config.build(num_prompts_per_train_step=1, dp_degree=1, pad_id=PAD)
    identity = module.TrainingSample.__annotations__["rollout_id"](0, 0, 0)
    samples = [
        module.TrainingSample(rollout_id=identity, **sample)
        for sample in to_training_samples(batch)
    ]
    packed = [batcher._pack_training_sample_row([samples[s] for s in row]) for row in rows]
    return batcher.collate(packed)


def assert_same(ours, theirs):
    assert list(ours) == [field.name for field in dataclasses.fields(theirs)]
    for name, tensor in ours.items():
        assert_same_bits(tensor, getattr(theirs, name), name)


@pytest.mark.parametrize("multiple", [None, 1, 8])
def test_rows_equal_the_batched_samples(torchtitan, multiple):
    batch = some_batch()
    rows = [[3, 4, 0], [], [5, 2, 1]]
    ours = to_training_microbatch(
        (batch.select(row) for row in rows),
        seq_len=SEQ_LEN,
        pad_id=PAD,
        per_sample_pad_multiple=multiple or 1,
    )
    theirs = collated(torchtitan, batch, rows, multiple)
    assert_same(ours, theirs)
    assert_same(ours, torchtitan.TrainingMicrobatch(**ours))


def test_flat_rows_are_the_concatenated_rows():
    """As later versions of its batcher collate them: the rows themselves, without their axis."""
    batch = some_batch()
    rows = [batch.select(row) for row in ([3, 4, 0], [], [5, 2, 1])]
    stacked = to_training_microbatch(rows, seq_len=SEQ_LEN, pad_id=PAD)
    flat = to_training_microbatch(rows, seq_len=SEQ_LEN, pad_id=PAD, flat=True)
    assert list(flat) == list(stacked)
    for name, tensor in stacked.items():
        assert tensor.shape == (3, SEQ_LEN), name
        assert_same_bits(flat[name], tensor.flatten(), name)
    assert_same_bits(
        to_training_microbatch(batch, flat=True)["labels"],
        to_training_microbatch(batch)["labels"][0],
    )


def test_torchtitans_own_loss_of_the_rows_is_that_of_the_packed_tokens(torchtitan, peer):
    """Its other modules spread work over devices, and are stood in for."""
    rng = np.random.default_rng(21)
    package = peer("torchtitan")
    with stand_ins("spmd_types", "torchtitan.distributed", "torchtitan.tools"):
        loss = package.load("torchtitan.experiments.rl.losses.dapo")
    function = loss.DAPOLoss.__new__(loss.DAPOLoss)
    function.ratio_clip_low = function.ratio_clip_high = 0.2
    for _ in range(20):
        batch = random_batch(rng)
        rows = [[index] for index in range(len(batch))]
        microbatch = to_training_microbatch((batch.select(row) for row in rows), pad_id=PAD)
        logits = torch.from_numpy(rng.normal(size=(*microbatch["labels"].shape, 97))).float()
        given = {key: microbatch[key] for key in ("generator_logprobs", "advantages", "loss_mask")}
        found, _ = function(logits, microbatch["labels"], float(batch.num_generated), **given)
        now = logits.log_softmax(-1).gather(2, microbatch["labels"][..., None])[..., 0]
        mask = microbatch["loss_mask"]
        expected = clipped_loss(
            now[mask], batch.rollout_logprobs[batch.loss_mask],
            batch.advantages[batch.loss_mask], torch.ones(batch.num_generated),
        )  # fmt: skip
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("tail", ["sequence", "extend", "separate"])
def test_padding_of_a_micro_batch_is_omitted(torchtitan, tail):
    batch = some_batch()
    alignment = Alignment(sequence_multiple=4, total=64, tail=tail, max_sequences=5)
    ours = to_training_microbatch(batch.select([5, 4, 2], alignment), seq_len=SEQ_LEN, pad_id=PAD)
    assert_same(ours, collated(torchtitan, batch, [[5, 4, 2]]))


def test_the_batcher_counts_the_trained_tokens(torchtitan):
    batch = some_batch()
    config = torchtitan.Batcher.Config(
        batch=torchtitan.BatchConfig(local_batch_size=2, seq_len=SEQ_LEN)
    )
    batcher = config.build(num_prompts_per_train_step=1, dp_degree=1, pad_id=PAD)
    identity = torchtitan.TrainingSample.__annotations__["rollout_id"](0, 0, 0)
    group = torchtitan.TrainingSampleGroup(
        0,
        [
            torchtitan.TrainingSample(rollout_id=identity, **sample)
            for sample in to_training_samples(batch)
        ],
        [],
    )
    step = batcher.add_training_samples(training_sample_group=group)
    assert step.num_global_valid_tokens == batch.num_generated == int(batch.loss_mask.sum())
    assert step.min_policy_versions == [0] * len(batch)


def test_versions_are_those_of_the_sequences_tokens():
    samples = to_training_samples(some_batch())
    spans = [(sample["min_policy_version"], sample["max_policy_version"]) for sample in samples]
    assert spans == [(0, 1), (0, 0), (0, 2), (0, 2), (0, 0), (0, 0)]


def test_sequences_longer_than_their_row_are_refused():
    batch = some_batch()
    with pytest.raises(ValueError, match="take 52 tokens, more than the row's 48"):
        to_training_microbatch(batch, seq_len=SEQ_LEN)
    with pytest.raises(ValueError, match="rows must have at least one batch, got none"):
        to_training_microbatch([])
    with pytest.raises(ValueError, match="per_sample_pad_multiple must be at least 1, got 0"):
        to_training_microbatch(batch, per_sample_pad_multiple=0)


def test_tokens_outside_the_loss_mask_have_zeros():
    batch = some_batch()
    mask = batch.loss_mask & (batch.policy_versions != 1)
    fresh = dataclasses.replace(batch, loss_mask=mask)
    row = to_training_microbatch(fresh)
    off = ~row["loss_mask"]
    assert 0 < int(row["loss_mask"].sum()) < batch.num_generated
    for name in ("generator_logprobs", "advantages"):
        assert not row[name][off].any(), name
        assert row[name][~off].all(), name
    for sample in to_training_samples(fresh):
        for name in ("logprobs", "advantage"):
            assert [bool(value) for value in sample[name]] == sample["loss_mask"], name


@pytest.mark.parametrize("tail", ["sequence", "extend", "separate"])
def test_a_sequence_that_is_cut_off_ends_where_it_is_cut_and_a_dummy_is_all_padding(tail):
    batch = some_batch()
    plan = plan_micro_batches(
        batch.seqlens,
        12,
        oversized="truncate_at_turn",
        turn_ends=batch.turn_ends(),
        align=4,
        multiple_of=8,
    )
    alignment = Alignment(sequence_multiple=4, total=24, tail=tail)
    rows = to_training_microbatch(batch.micro_batches(plan, alignment), seq_len=24, pad_id=PAD)
    assert plan.truncated
    assert any(len(chosen) == 0 for chosen in plan)
    tokens = batch.input_ids.split(batch.seqlens)
    for chosen, inputs, labels in zip(plan, rows["token_ids"], rows["labels"], strict=True):
        kept = [tokens[s][: plan.truncated.get(s, None)].tolist() for s in chosen.tolist()]
        for row, expected in (
            (inputs, [token for of in kept for token in of[:-1]]),
            (labels, [token for of in kept for token in of[1:]]),
        ):
            assert row.tolist() == expected + [PAD] * (24 - len(expected))
