"""What is sent between processes: trajectories and weights as arrays, and back without a change."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given

from trajpack.agent.errors import EngineEndedError, EpisodeError, EpisodeTimeoutError
from trajpack.agent.ray.payload import TrajectoryArrays, as_array, as_tensor
from trajpack.agent.ray.worker import Weights, portable
from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.token_fields import TokenField
from trajpack.packing.types import Trajectory, Turn
from trajpack.testing import trajectory_lists


def sent(arrays: TrajectoryArrays) -> TrajectoryArrays:
    """Send it as an object store does: buffers apart, and read-only where they arrive."""
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append)
    arrived = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    received = pickle.loads(message, buffers=arrived)
    assert isinstance(received, TrajectoryArrays)
    return received


@given(trajectory_lists())
def test_trajectories_come_back_as_they_were(trajectories):
    assert sent(TrajectoryArrays.of(trajectories)).trajectories() == trajectories


def test_a_conversation_is_sent_once_and_a_broken_prefix_begins_a_new_stream():
    told = [
        Turn([1, 2], [3, 4], [-0.5, -1.0]),
        Turn([1, 2, 3, 4, 5], [6], [-0.25]),
        Turn([9, 2, 3], [], []),
        Turn([9, 2, 3, 7], [8], [-0.125], truncated=True, version_start=1, version_end=2),
    ]
    arrays = TrajectoryArrays.of([Trajectory("a", told, group="g", turn_discount=0.5)])
    assert arrays.tokens.tolist() == [1, 2, 3, 4, 5, 6, 9, 2, 3, 7, 8]
    (received,) = sent(arrays).trajectories()
    assert received == Trajectory("a", told, group="g", turn_discount=0.5)
    for turn in received.turns:
        assert isinstance(turn.prompt_ids, np.ndarray)
        assert not turn.prompt_ids.flags.owndata
        assert not turn.prompt_ids.flags.writeable
    buffer = TrajectoryBuffer(device="cpu")
    buffer.add(received)
    assert buffer.pack().unpack() == [received]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float64])
def test_fields_of_any_dtype_are_sent(dtype):
    rows = torch.tensor([[1.0, 2.0], [3.0, 0.5]]).to(dtype)
    turn = Turn([1], [2, 3], [-0.5, -0.5], fields={"mine": rows})
    (received,) = sent(TrajectoryArrays.of([Trajectory("a", [turn])])).trajectories()
    assert received.turns[0].fields["mine"].dtype is dtype
    assert torch.equal(received.turns[0].fields["mine"].float(), rows.float())
    buffer = TrajectoryBuffer(device="cpu", fields=[TokenField("mine", dtype, shape=(2,))])
    buffer.add(received)
    assert torch.equal(buffer.pack().fields["mine"][1:].float(), rows.float())


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (Turn([1], [2], [float("nan")]), "completion_logprobs must be finite"),
        (Turn([1], [2, 3], [-0.5]), "expected 2 completion_logprobs, got 1"),
        (Turn([-1], [2], [-0.5]), "prompt_ids must be 0 or more"),
    ],
)
def test_what_no_buffer_would_take_is_refused_by_name(turn, reason):
    with pytest.raises(ValueError, match=f"trajectory 'a', turn 1: {reason}"):
        TrajectoryArrays.of([Trajectory("a", [Turn([1], [2], [-0.5]), turn])])


def test_weights_of_any_dtype_are_views_of_what_was_sent():
    state_dict = {
        "wide": torch.randn(3, 2),
        "narrow": torch.randn(4).to(torch.bfloat16),
        "count": torch.tensor(7),
    }
    weights = pickle.loads(pickle.dumps(Weights.of(state_dict, version=4)))
    assert weights.version == 4
    received = weights.state_dict()
    for name, value in state_dict.items():
        assert received[name].dtype is value.dtype
        assert torch.equal(received[name], value)
    pointer = weights.arrays["wide"][1].__array_interface__["data"][0]
    assert received["wide"].data_ptr() == pointer


def test_as_array_and_back_keeps_strides_and_empty_shapes():
    for value in (torch.arange(6).reshape(2, 3).t(), torch.empty(0, 4), torch.tensor(True)):
        assert torch.equal(as_tensor(*as_array(value)), value)


class OwnError(EpisodeTimeoutError):
    def __init__(self, qid: str, seconds: float) -> None:
        super().__init__(qid, f"took {seconds} s")


def test_errors_travel_as_the_nearest_kind_that_every_process_knows():
    error = portable(OwnError("q0@0", 3.0), "q0@0")
    assert type(error) is EpisodeTimeoutError
    assert str(pickle.loads(pickle.dumps(error))) == "episode 'q0@0': took 3.0 s"
    wrapped = EpisodeError("q0@0", "no reply")
    wrapped.__cause__ = EngineEndedError("q0@0", "out of memory")
    assert type(portable(wrapped, "q0@0")) is EngineEndedError
