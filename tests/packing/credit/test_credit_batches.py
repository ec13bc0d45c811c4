"""Credit of batches of every kind: empty, resident, without values, saved, moved."""

import copy
import dataclasses
import pickle

import pytest
import torch

from tests.packing.credit.credit_cases import (
    EVERY,
    LAYOUTS,
    given_beside,
    inputs_of,
    small_scans,
    some_trajectories,
)
from tests.packing.credit.credit_oracle import MORE, credited, named
from trajpack import (
    PackedBatch,
    Trajectory,
    Turn,
    load,
    pack,
    pack_resident,
    save,
)
from trajpack.testing import assert_batches_equal, assert_same_bits


def assert_same_credit(actual: PackedBatch, expected: PackedBatch) -> None:
    for name in ("advantages", "returns", "metrics"):
        assert_same_bits(getattr(actual, name), getattr(expected, name), name)


NAMES = [*EVERY, *MORE]
OF_CONTEXT = ("ignore", "multiply", "reset")
GIVEN_ALIKE = [
    (name, layout)
    for name, estimator in EVERY.items()
    for layout in LAYOUTS
    if layout == "merged" or getattr(estimator, "observation", "carry") not in OF_CONTEXT
]
"""Estimators and layouts whose results do not depend on where the turns are. With the layout
``turns`` a turn on a device counts its whole prompt as new, since prompts there are not compared;
the observations of ``OF_CONTEXT`` then give other results."""
OF_EACH_KERNEL = ["GAE", "VTrace, carry", "TurnGAE", "TurnReturns, whitened", "GRPO", "GiGPO"]


@pytest.mark.parametrize(
    ("name", "impl"),
    [*((name, "torch") for name in NAMES), *((name, "triton") for name in OF_EACH_KERNEL)],
)
def test_batches_without_generated_tokens_get_zeros(name, impl):
    layout = LAYOUTS[len(name) % 2]
    silent = [Trajectory("a", [Turn([1], [], [], 3.0)], "x")] * 2
    for trajectories in ([], silent):
        with small_scans():
            batch = credited(trajectories, named(name), layout, impl=impl)
        assert batch.advantages.tolist() == batch.returns.tolist() == [0.0] * len(trajectories)
        assert batch.metrics.tolist() == [0.0] * 5


@pytest.mark.parametrize(("name", "layout"), GIVEN_ALIKE)
def test_turns_that_live_on_the_device_are_given_the_same(name, layout):
    turns, seen = [], [4]
    for size in (3, 0, 2):
        turns.append(Turn([*seen, 7], [5] * size, [-0.5] * size, float(size)))
        seen = [*seen, 7, *[5] * size]
    trajectories = [Trajectory(str(n), turns[: n + 1], "x") for n in range(3)]
    lives = [
        dataclasses.replace(
            t,
            turns=[
                dataclasses.replace(
                    turn,
                    prompt_ids=torch.tensor(turn.prompt_ids),
                    completion_ids=torch.tensor(turn.completion_ids, dtype=torch.int64),
                    completion_logprobs=torch.tensor(turn.completion_logprobs),
                )
                for turn in t.turns
            ],
        )
        for t in trajectories
    ]
    estimator, beside = EVERY[name], given_beside(trajectories)
    expected = credited(trajectories, estimator, layout, beside)
    batch = pack_resident(lives, layout)
    inputs = inputs_of(expected, estimator, beside)
    assert_same_credit(batch.with_advantages(estimator, **inputs), expected)


"""Advantages and metrics: what a batch may lack, and carries wherever it goes once it has them."""


def with_credit(batch):
    """What stands in for the advantages and metrics of an estimator."""
    return dataclasses.replace(
        batch,
        advantages=torch.linspace(-1, 1, batch.num_tokens),
        metrics=torch.tensor([0.5, float("nan")], dtype=torch.float64),
        metric_names=("clip", "kl"),
    )


def test_credit_is_none_until_it_is_assigned():
    for batch in (pack([]), pack(some_trajectories(3), device="meta")):
        assert (batch.advantages, batch.metrics, batch.metric_names) == (None, None, ())
        assert not {"advantages", "metrics"} & {*batch.tensors(), *batch.host_values()}


@pytest.mark.parametrize("layout", ["merged", "turns"])
def test_credit_goes_wherever_a_batch_goes(tmp_path, layout):
    packed = pack(some_trajectories(3), layout=layout)
    batch = with_credit(packed)
    assert packed.advantages is None
    assert list(batch.tensors())[-2:] == ["advantages", "metrics"]
    save(batch, tmp_path / "batch.safetensors")
    for copied in (
        load(tmp_path / "batch.safetensors"),
        pickle.loads(pickle.dumps(batch)),
        copy.deepcopy(batch),
        batch.to("cpu"),
    ):
        assert_batches_equal(copied, batch)
        assert copied.metric_names == ("clip", "kl")
        assert copied.unpack() == some_trajectories(3)
    moved = batch.to("meta")
    assert moved.advantages.is_meta
    assert moved.metrics.dtype == torch.float64
    assert dataclasses.replace(batch, advantages=None).to("meta").advantages is None


def test_advantages_alone_are_saved_and_loaded(tmp_path):
    batch = dataclasses.replace(pack(some_trajectories(3)), advantages=torch.zeros(0))
    with pytest.raises(
        ValueError, match=r"advantages must be torch.float32 \[\d+\], got torch.float32 \[0\]"
    ):
        save(batch, tmp_path / "wrong")
    batch = dataclasses.replace(batch, advantages=torch.zeros(batch.num_tokens))
    save(batch, tmp_path / "right")
    loaded = load(tmp_path / "right")
    assert_batches_equal(loaded, batch)
    assert loaded.metrics is None
