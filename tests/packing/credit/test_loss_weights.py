"""Weights of losses of packed batches: by loops over trajectories, the same in both layouts."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from tests.packing.credit.credit_cases import LAYOUTS, generated, some_trajectories
from tests.packing.credit.credit_oracle import lengths_of
from trajpack import Trajectory, Turn, pack
from trajpack.kernels.corrections.loss_weights import AGGREGATIONS
from trajpack.testing import assert_same_bits, trajectory_lists

COUNTED = [name for name in AGGREGATIONS if name != "constant"]


def mean(numbers):
    numbers = list(numbers)
    return math.fsum(numbers) / len(numbers) if numbers else 0.0


def aggregated(trajectories, losses, aggregation):
    """The loss, from the losses of what each trajectory generated; the silent do not count."""
    keyed = [
        (index if t.group is None else t.group, own)
        for index, (t, own) in enumerate(zip(trajectories, losses, strict=True))
        if own
    ]
    if aggregation == "token_mean":
        return mean(loss for _, own in keyed for loss in own)
    if aggregation == "sequence_mean_token_mean":
        return mean(mean(own) for _, own in keyed)
    if aggregation == "sequence_mean_token_sum":
        return mean(math.fsum(own) for _, own in keyed)
    if aggregation == "constant":
        return math.fsum(loss for _, own in keyed for loss in own) / 64.0
    groups = {key: [loss for k, own in keyed if k == key for loss in own] for key, _ in keyed}
    return mean(mean(own) for own in groups.values())


def split_losses(trajectories):
    """A loss for each generated token, and the same by trajectory."""
    sizes = lengths_of(trajectories)
    losses = torch.linspace(-3, 5, sum(sizes), dtype=torch.float64)
    return losses, [own.tolist() for own in losses.split(sizes)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_weighted_sum_is_the_aggregated_loss(aggregation, layout):
    for trajectories in (some_trajectories(30, 12), some_trajectories(2), some_trajectories(60)):
        losses, parts = split_losses(trajectories)
        batch = pack(trajectories, layout, device="cpu")
        denominator = 64.0 if aggregation == "constant" else None
        weights = batch.loss_weights(aggregation, denominator=denominator)
        assert weights.dtype == torch.float32
        total = (generated(batch, weights).double() * losses).sum().item()
        assert total == pytest.approx(aggregated(trajectories, parts, aggregation), rel=1e-6)


PER = ("turn", "row")
OF_SEQUENCES = ("sequence_mean_token_mean", "sequence_mean_token_sum")


def rows_of(batch, per):
    """The losses' places: generated tokens of each turn, or of each row, in order of the batch."""
    bounds = batch.turn_spans.tolist()
    if per == "row":
        ends = batch.cu_seqlens.tolist()
        bounds = list(pairwise(ends))
    where = torch.arange(batch.num_tokens)
    return [where[begin:end][batch.loss_mask[begin:end]].tolist() for begin, end in bounds]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("aggregation", OF_SEQUENCES)
def test_a_sequence_may_be_a_turn_or_a_row(aggregation, per, layout):
    for seed in range(25):
        batch = pack(some_trajectories(12, 7, seed), layout, device="cpu")
        losses = torch.linspace(-3, 5, batch.num_tokens, dtype=torch.float64)
        rows = [[float(losses[t]) for t in row] for row in rows_of(batch, per) if row]
        of_row = mean if aggregation == "sequence_mean_token_mean" else math.fsum
        weights = batch.loss_weights(aggregation, per=per)
        total = (weights.double() * losses).sum().item()
        assert total == pytest.approx(mean(of_row(row) for row in rows), rel=1e-6)
        assert batch.loss_denominator(aggregation, per=per) == len(rows)
        every = batch.loss_weights(aggregation, per=per, denominator=len(batch))
        share = sum(of_row(row) for row in rows) / len(batch)
        assert (every.double() * losses).sum().item() == pytest.approx(share, rel=1e-6)


WEIGHED = [(name, "trajectory") for name in COUNTED] + [(name, "turn") for name in OF_SEQUENCES]


@given(trajectory_lists(), st.sampled_from(WEIGHED), st.sampled_from(["keep", "mask"]))
def test_both_layouts_weigh_a_token_the_same(trajectories, weighed, truncated):
    (aggregation, per), options = weighed, {"per": weighed[1], "truncated": truncated}
    batches = [pack(trajectories, layout, device="cpu") for layout in LAYOUTS]
    assert_same_bits(*(generated(b, b.loss_weights(aggregation, **options)) for b in batches))
    assert_same_bits(*(b.loss_denominator(aggregation, **options) for b in batches))
    if per == "turn":
        by_turns = batches[LAYOUTS.index("turns")]
        of_rows = by_turns.loss_weights(aggregation, per="row", truncated=truncated)
        assert_same_bits(of_rows, by_turns.loss_weights(aggregation, **options))


@pytest.mark.parametrize("aggregation", COUNTED)
def test_the_losses_of_two_shards_add_up_to_that_of_the_whole(aggregation):
    """The shards hold whole groups, one of them most."""
    trajectories = [
        dataclasses.replace(t, group=t.group or t.id) for t in some_trajectories(40, 12)
    ]
    shards = [[t for t in trajectories if (t.group in ("x", "y")) == own] for own in (True, False)]
    assert all(shards)
    batches = [pack(shard, device="cpu") for shard in shards]
    denominator = sum(batch.loss_denominator(aggregation) for batch in batches)
    total, parts = 0.0, []
    for shard, batch in zip(shards, batches, strict=True):
        losses, by_trajectory = split_losses(shard)
        parts += by_trajectory
        weights = generated(batch, batch.loss_weights(aggregation, denominator=denominator))
        total += float((weights.double() * losses).sum())
    whole = aggregated([t for shard in shards for t in shard], parts, aggregation)
    assert total == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregation", COUNTED)
def test_trajectories_that_were_cut_off_can_be_left_out(aggregation, layout):
    trajectories = some_trajectories(30, 12)
    kept = [t for t in trajectories if not t.is_truncated]
    assert 0 < len(kept) < len(trajectories)
    everything, rest = (pack(those, layout, device="cpu") for those in (trajectories, kept))
    weights = generated(everything, everything.loss_weights(aggregation, truncated="mask"))
    expected = generated(rest, rest.loss_weights(aggregation))
    owners = [t for t in trajectories for turn in t.turns for _ in turn.completion_ids]
    stays = torch.tensor([not t.is_truncated for t in owners])
    assert_same_bits(weights[stays], expected)
    assert not weights[~stays].any()
    counts = everything.loss_denominator(aggregation, truncated="mask")
    assert counts == rest.loss_denominator(aggregation)


@pytest.mark.parametrize("aggregation", COUNTED)
def test_batches_without_tokens_and_devices_without_values_are_fine(aggregation):
    silent = Trajectory("a", [Turn([1, 2], [], [])])
    assert pack([], device="cpu").loss_weights(aggregation).shape == (0,)
    assert pack([silent], device="cpu").loss_weights(aggregation).tolist() == [0.0, 0.0]
    on_meta = pack(some_trajectories(), device="meta")
    assert on_meta.loss_weights(aggregation).is_meta
    assert on_meta.loss_denominator(aggregation).is_meta
    total = torch.ones((), device="meta")
    assert on_meta.loss_weights(aggregation, denominator=total).is_meta
    for per in PER if aggregation in OF_SEQUENCES else ():
        assert on_meta.loss_weights(aggregation, per=per, truncated="mask").is_meta


def test_wrong_input_is_named():
    batch = pack(some_trajectories(), device="cpu")
    with pytest.raises(ValueError, match="loss_weights: aggregation must be one of"):
        batch.loss_weights("mean")
    with pytest.raises(ValueError, match="truncated must be one of 'keep', 'mask', got 'drop'"):
        batch.loss_weights("token_mean", truncated="drop")
    with pytest.raises(
        ValueError, match="per must be one of 'trajectory', 'turn', 'row', got 'group'"
    ):
        batch.loss_weights("sequence_mean_token_mean", per="group")
    for aggregation in ("token_mean", "prompt_mean", "constant"):
        with pytest.raises(ValueError, match=f"aggregation='{aggregation}' takes no per='turn'"):
            batch.loss_weights(aggregation, per="turn", denominator=2.0)
    with pytest.raises(ValueError, match="aggregation='constant' needs denominator"):
        batch.loss_weights("constant")
    with pytest.raises(ValueError, match="loss_denominator: aggregation='constant' has the"):
        batch.loss_denominator("constant")


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
def test_weights_follow_a_mask_that_was_written_to(aggregation):
    batch = pack([Trajectory(n, [Turn([1], [2, 3, 4], [-0.5] * 3)]) for n in "ab"], device="cpu")
    mask = torch.arange(batch.num_tokens) != 1
    expected = batch.with_loss_mask(mask).loss_weights(aggregation)
    batch.loss_mask.logical_and_(mask)
    assert torch.equal(batch.loss_weights(aggregation), expected)
    assert expected[1] == 0
    assert batch.loss_denominator("token_mean").item() == 5
