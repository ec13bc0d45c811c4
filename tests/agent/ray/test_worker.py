"""Weights and errors as a worker sends and receives them."""

from __future__ import annotations

import pickle

import torch

from trajpack.agent.errors import EngineEndedError, EpisodeError, EpisodeTimeoutError
from trajpack.agent.ray.worker import Weights, portable


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
