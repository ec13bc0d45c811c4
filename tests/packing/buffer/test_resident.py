"""Turns that live on the device: packed as the host packs them, and never read."""

import dataclasses

import numpy as np
import pytest
import torch

from trajpack import Trajectory, Turn, pack, pack_resident
from trajpack.testing import assert_batches_equal, random_trajectory


def resident(trajectory, device="cpu", ids=torch.int64, floats=torch.float32):
    turns = [
        dataclasses.replace(
            turn,
            prompt_ids=torch.as_tensor(turn.prompt_ids).to(device, ids),
            completion_ids=torch.as_tensor(turn.completion_ids).to(device, ids),
            completion_logprobs=torch.as_tensor(turn.completion_logprobs).to(device, floats),
        )
        for turn in trajectory.turns
    ]
    return dataclasses.replace(trajectory, turns=turns)


def conversations(count=5):
    rng = np.random.default_rng(0)
    sizes = {"prompt": (2, 30), "completion": (1, 30)}
    return [random_trajectory(rng, str(index), num_turns=3, **sizes) for index in range(count)]


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("layout", ["turns", "merged"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_it_equals_a_pack_of_the_same_turns(impl, layout, ids):
    trajectories = conversations()
    batch = pack_resident([resident(t, ids=ids) for t in trajectories], layout, impl)
    expected = pack(trajectories, layout, device="cpu")
    if layout == "turns":  # where nothing is compared, all of a turn is new with it
        assert not torch.equal(batch.turn_begin, expected.turn_begin)
        expected = dataclasses.replace(expected, turn_begin=expected.cu_seqlens[:-1])
    assert_batches_equal(batch, expected)
    assert batch.unpack() == trajectories


@pytest.mark.parametrize(
    ("ids", "floats"),
    [(torch.uint8, torch.float64), (torch.int16, torch.float16), (torch.int64, torch.bfloat16)],
)
def test_tensors_of_any_dtype_and_stride_are_cast(ids, floats):
    turns = [
        Turn(torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([-0.5])),
        Turn(
            torch.tensor([5, 9, 6, 9], dtype=ids)[::2],
            torch.tensor([7, 8], dtype=ids),
            torch.tensor([-0.25, -1e-3], dtype=floats, requires_grad=True),
        ),
    ]
    batch = pack_resident([Trajectory("a", turns)])
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    expected = torch.cat([torch.tensor([-0.5]), turns[1].completion_logprobs.detach().float()])
    assert torch.equal(batch.rollout_logprobs[batch.loss_mask], expected)
    assert not batch.rollout_logprobs.requires_grad


def test_a_prompt_too_short_to_go_on_begins_a_sequence():
    turns = [Turn([1, 2], [3, 4], [0, 0]), Turn([1, 2, 3], [6], [0]), Turn([1] * 5, [], [])]
    trajectory = Trajectory("a", turns)
    batch = pack_resident([resident(trajectory)], "merged")
    assert batch.seqlens == (4, 5)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, *[1] * 5], "tokens are not compared"


def test_nothing_makes_an_empty_batch():
    assert pack_resident([]).num_tokens == 0


@pytest.mark.parametrize("layout", ["turns", "merged"])
def test_nothing_is_read_from_the_device(layout):
    batch = pack_resident([resident(t, "meta") for t in conversations()], layout)
    expected = pack(conversations(), layout, device="cpu")
    assert batch.device.type == "meta"
    assert (batch.seqlens, batch.num_turns) == (expected.seqlens, expected.num_turns)


GOOD = resident(Trajectory("it", [Turn([1, 2], [3], [-0.5])])).turns[0]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"prompt_ids": [1]}, TypeError, "prompt_ids must be a tensor, got list"),
        ({"prompt_ids": torch.ones(2)}, TypeError, "prompt_ids must be integers, got torch.float"),
        ({"prompt_ids": torch.ones(2) > 0}, TypeError, "prompt_ids must be integers, got torch.bo"),
        ({"prompt_ids": torch.ones(0).int()}, ValueError, "prompt_ids must not be empty"),
        ({"prompt_ids": torch.ones(2, 2).int()}, ValueError, r"one dimension, got shape \[2, 2\]"),
        ({"completion_logprobs": torch.ones(1) + 1j}, TypeError, "must be floats, got torch.compl"),
        (
            {"prompt_ids": torch.ones(2).int().to("meta")},
            ValueError,
            "prompt_ids is on meta, others",
        ),
        ({"completion_ids": torch.ones(2).int()}, ValueError, "one entry per completion token"),
        ({"completion_logprobs": torch.ones(1).int()}, TypeError, "must be floats, got torch.int"),
        ({"reward": None}, TypeError, "reward must be a number"),
        ({"fields": {"v": [1]}}, ValueError, "fields must be packed by a TrajectoryBuffer"),
    ],
)
def test_a_bad_turn_is_refused_by_name(change, error, match):
    bad = dataclasses.replace(GOOD, **change)
    with pytest.raises(error, match=f"^trajectory 'it', turn 1: .*{match}"):
        pack_resident([Trajectory("it", [GOOD, bad])])


@pytest.mark.parametrize("place", range(3))
def test_a_tensor_whose_memory_was_freed_or_shrunk_is_refused(place):
    for size in (0, 4):
        arrays = [torch.tensor([5, 5, 5]), torch.tensor([7, 7]), torch.tensor([-0.5, -0.25])]
        arrays[place].untyped_storage().resize_(size)
        with pytest.raises(ValueError, match=r"^trajectory 'a', turn 0: .* memory was freed$"):
            pack_resident([Trajectory("a", [Turn(*arrays)])])


def test_what_is_no_list_of_trajectories_is_refused_by_name():
    with pytest.raises(TypeError, match="expected a list of Trajectory, got int"):
        pack_resident(5)
