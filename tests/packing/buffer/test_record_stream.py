"""Memory of a batch that another stream reads: all of it is known to the allocator."""

import copy

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trajpack import (
    GAE,
    GRPO,
    Alignment,
    GiGPO,
    GroupEstimator,
    TokenField,
    Trajectory,
    TrajectoryBuffer,
    Turn,
    TurnReturns,
    pack_resident,
    pack_tree,
    plan_micro_batches,
)
from trajpack.kernels import Correction
from trajpack.packing.micro_batches import micro_batch

FIELDS = [TokenField("values", torch.float32), TokenField("experts", torch.uint8, (2,))]
STATES = torch.zeros(10, dtype=torch.int64, device="meta")
STREAM = object()
"""Stands in for a stream, which is handed on and no more."""


@pytest.fixture
def recorded(monkeypatch):
    """Storages that ``record_stream`` was called for, on tensors that have one each."""
    storages = []

    def record_stream(tensor, stream):
        assert stream is STREAM
        storages.append(tensor.untyped_storage()._cdata)

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    monkeypatch.setattr(micro_batch, "WITHOUT_STREAMS", ("cpu",))  # meta has some, too
    return storages


def trajectories(count=5):
    def turn(index):
        rows = {"values": np.ones(2), "experts": np.ones((2, 2), np.uint8)}
        return Turn([1, 2, 3] * (index + 1), [4, 5], [-0.5, -0.5], 1.0 * index, fields=rows)

    return [Trajectory(str(i), [turn(i), turn(i + 1)], group="g") for i in range(count)]


def packed():
    """A batch of a device, without values."""
    buffer = TrajectoryBuffer(device="meta", fields=FIELDS)
    buffer.extend(trajectories())
    return buffer.pack()


def storages_of(batch):
    """All storages of the batch."""
    tensors = [*batch.tensors().values(), *batch.fields.values()]
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def test_every_storage_of_a_batch_is_recorded_once(recorded):
    batch = packed()
    batch.record_stream(STREAM)
    assert len(recorded) == len(set(recorded))
    assert set(recorded) == storages_of(batch)


class Reads(TorchDispatchMode):
    """Storages that operators read and that none of them made."""

    def __init__(self):
        super().__init__()
        self.found, self.made = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [*tree_leaves((args, kwargs))]
        result = func(*args, **(kwargs or {}))
        made = [*tree_leaves(result)]
        for leaves, storages in ((given, self.found), (made, self.made)):
            storages |= {
                leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)
            }
        self.kept = [*getattr(self, "kept", ()), *given, *made]  # no storage takes another's place
        return result


def credited(estimator, **inputs):
    return lambda: packed().with_advantages(estimator, **inputs)


@pytest.mark.parametrize("make", [
    credited(GRPO()),
    credited(GRPO(truncated="mask")),
    credited(GiGPO(), state_ids=STATES),
    credited(GiGPO(truncated="mask"), state_ids=STATES),
    credited(GroupEstimator("reinforce_plus_plus_baseline")),
    credited(TurnReturns(whiten=True)),
    credited(TurnReturns(truncated="mask")),
    lambda: packed().with_advantages(GAE(whiten=True), values=torch.zeros(125, device="meta")),
    credited(GAE(truncated="mask"), values=torch.zeros(125, device="meta")),
    lambda: copy.deepcopy(packed()),
], ids=[
    "GRPO", "GRPO, mask", "GiGPO", "GiGPO, mask", "whitened groups", "whitened turns",
    "turns, mask", "whitened tokens", "tokens, mask", "copied",
])  # fmt: skip
def test_what_a_reader_reads_is_recorded(make, recorded):
    batch = make()
    batch.record_stream(STREAM)
    with Reads() as reads:
        if batch.metric_names:
            batch.metrics.clone()
        batch.loss_weights("prompt_mean")
        batch.importance_weights(batch.rollout_logprobs, Correction.tis(), per="turn")
    assert reads.found - reads.made <= set(recorded)


def test_tables_of_a_tree_are_recorded(recorded):
    buffer = TrajectoryBuffer(device="meta", fields=FIELDS)
    buffer.extend(trajectories())
    tree = pack_tree(buffer)
    made = [tree.entry_weights, tree.entry_parent]
    tree.record_stream(STREAM)
    assert {one.untyped_storage()._cdata for one in made} <= set(recorded)


def test_turns_of_the_device_are_recorded_whole(recorded):
    turn = Turn(*(torch.ones(3, device="meta", dtype=t) for t in (int, int, torch.float32)))
    batch = pack_resident([Trajectory("a", [turn])])
    batch.record_stream(STREAM)
    assert sorted(recorded) == sorted(storages_of(batch))


@pytest.mark.parametrize("alignment", [Alignment(), Alignment(sequence_multiple=8)])
def test_every_storage_of_a_micro_batch_is_recorded_once(alignment, recorded):
    batch = packed().with_advantages(GRPO())
    plan = plan_micro_batches(batch.seqlens, 64, align=alignment.sequence_multiple)
    weights = {"weights": batch.loss_weights("token_mean")}
    for part in batch.micro_batches(plan, alignment, tensors=weights):
        recorded.clear()
        part.record_stream(STREAM)
        assert sorted(recorded) == sorted(storages_of(part))
        assert not set(recorded) & storages_of(batch)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_is_recorded_where_there_are_no_streams(device):
    buffer = TrajectoryBuffer(device=device, fields=FIELDS)
    buffer.extend(trajectories())
    batch = buffer.pack()
    batch.record_stream(STREAM)  # torch itself would raise
    batch.select([0]).record_stream(STREAM)
