"""Trajectories as arrays: sent through pickle as Ray does, and returned unchanged."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given

from trajpack import TokenField, Trajectory, TrajectoryBuffer, Turn
from trajpack.packing.buffer.trajectory_arrays import TrajectoryArrays, as_array, as_tensor
from trajpack.testing import trajectory_lists


def sent(arrays):
    """Send arrays as an object store does: buffers apart, and read-only where they arrive."""
    buffers = []
    message = pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(message, buffers=[memoryview(bytes(one.raw())) for one in buffers])


@given(trajectory_lists())
def test_trajectories_come_back_as_they_were(trajectories):
    arrays = sent(TrajectoryArrays.of(trajectories))
    arrays.check()
    assert arrays.trajectories() == arrays.copied().trajectories() == trajectories
    assert arrays.num_trajectories == len(trajectories)


def test_a_conversation_is_stored_once_and_a_broken_prefix_begins_a_new_chain():
    turns = [
        Turn([1, 2], [3, 4], [-0.5, -1.0]),
        Turn([1, 2, 3, 4, 5], [6], [-0.25]),
        Turn([9, 2, 3], [], []),
        Turn([9, 2, 3, 7], [8], [-0.125], truncated=True, version_start=1, version_end=2),
    ]
    given_trajectory = Trajectory("a", turns, group="g", turn_discount=0.5)
    arrays = TrajectoryArrays.of([given_trajectory])
    assert arrays.tokens.tolist() == [1, 2, 3, 4, 5, 6, 9, 2, 3, 7, 8]
    (received,) = sent(arrays).trajectories()
    assert received == given_trajectory
    for turn in received.turns:
        assert not turn.prompt_ids.flags.owndata
        assert not turn.prompt_ids.flags.writeable
    buffer = TrajectoryBuffer(device="cpu")
    buffer.add(received)
    assert buffer.pack().unpack() == [received]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float64])
def test_fields_of_any_dtype_are_sent_undeclared(dtype):
    rows = torch.tensor([[1.0, 2.0], [3.0, 0.5]]).to(dtype)
    turn = Turn([1], [2, 3], [-0.5, -0.5], fields={"mine": rows})
    given_trajectories = [Trajectory("a", [Turn([1], [2], [-0.5]), turn]), Trajectory("b", [turn])]
    arrays = sent(TrajectoryArrays.of(given_trajectories)).copied()
    assert arrays.trajectories() == given_trajectories
    (received,) = arrays.trajectories()[1:]
    assert received.turns[0].fields["mine"].dtype is dtype
    buffer = TrajectoryBuffer(device="cpu", fields=[TokenField("mine", dtype, shape=(2,))])
    buffer.add(received)
    assert torch.equal(buffer.pack().fields["mine"][1:].float(), rows.float())


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (Turn([1], [2], [float("nan")]), "completion_logprobs must be finite"),
        (Turn([1], [2, 3], [-0.5]), r"completion_logprobs must have one entry .* for 2 token\(s\)"),
        (Turn([-1], [2], [-0.5]), "prompt_ids must be 0 or more"),
    ],
)
def test_trajectories_that_no_buffer_takes_are_refused_by_name(turn, reason):
    with pytest.raises(ValueError, match=f"trajectory 'a', turn 1: {reason}"):
        TrajectoryArrays.of([Trajectory("a", [Turn([1], [2], [-0.5]), turn])])


def test_as_array_and_back_keeps_strides_and_empty_shapes():
    for value in (torch.arange(6).reshape(2, 3).t(), torch.empty(0, 4), torch.tensor(True)):
        assert torch.equal(as_tensor(*as_array(value)), value)
    assert as_array(np.ones(2))[0] == "float64"
