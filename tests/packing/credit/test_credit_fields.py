"""Advantages and metrics: what a batch may lack, and carries wherever it goes once it has them."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from trajpack import PackedBatch, pack
from trajpack.testing import assert_batches_equal, random_trajectory


def some_trajectories():
    generator = np.random.default_rng(0)
    sizes = {"prompt": (1, 9), "completion": (1, 9), "vocabulary": 64}
    return [random_trajectory(generator, f"t{i}", num_turns=1 + i, **sizes) for i in range(3)]


def with_credit(batch):
    """What stands in for the advantages and metrics of an estimator."""
    return dataclasses.replace(
        batch,
        advantages=torch.linspace(-1, 1, batch.num_tokens),
        metrics=torch.tensor([0.5, float("nan")], dtype=torch.float64),
        metric_names=("clip", "kl"),
    )


def test_credit_is_none_until_it_is_assigned():
    for batch in (pack([]), pack(some_trajectories(), device="meta")):
        assert (batch.advantages, batch.metrics, batch.metric_names) == (None, None, ())
        assert not {"advantages", "metrics"} & {*batch.tensors(), *batch.host_values()}


@pytest.mark.parametrize("layout", ["merged", "turns"])
def test_credit_goes_wherever_a_batch_goes(tmp_path, layout):
    with_lazy_columns = pack(some_trajectories(), layout=layout)
    batch = with_credit(with_lazy_columns)
    assert with_lazy_columns.advantages is None
    assert list(batch.tensors())[-2:] == ["advantages", "metrics"]
    batch.save(tmp_path / "batch.safetensors")
    for copied in (
        PackedBatch.load(tmp_path / "batch.safetensors"),
        pickle.loads(pickle.dumps(batch)),
        copy.deepcopy(batch),
        batch.to("cpu"),
    ):
        assert_batches_equal(copied, batch)
        assert copied.metric_names == ("clip", "kl")
        assert copied.unpack() == some_trajectories()
    moved = batch.to("meta")
    assert moved.advantages.is_meta
    assert moved.metrics.dtype == torch.float64
    assert dataclasses.replace(batch, advantages=None).to("meta").advantages is None


def test_advantages_alone_are_saved_and_loaded(tmp_path):
    batch = dataclasses.replace(pack(some_trajectories()), advantages=torch.zeros(0))
    with pytest.raises(ValueError, match=r"advantages must have shape \[\d+\], got \[0\]"):
        batch.save(tmp_path / "wrong")
    batch = dataclasses.replace(batch, advantages=torch.zeros(batch.num_tokens))
    batch.save(tmp_path / "right")
    loaded = PackedBatch.load(tmp_path / "right")
    assert_batches_equal(loaded, batch)
    assert loaded.metrics is None
