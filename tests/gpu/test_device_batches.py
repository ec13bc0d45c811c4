"""On real hardware: extra fields, turns that never leave the device, a captured pack."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.conftest import capture, no_waiting, replay
from trajpack import TokenField, Trajectory, TrajectoryBuffer, Turn, pack_resident
from trajpack.testing import assert_batches_equal, assert_same_bits, random_trajectory

pytestmark = pytest.mark.gpu

FIELDS = [
    TokenField("experts", torch.uint8, (5, 3), fill=255, generated_only=False),
    TokenField("values", torch.bfloat16),
    TokenField("state", torch.int64, fill=-1),
]
LAYOUTS = ("merged", "turns")


def with_rows(trajectory: Trajectory) -> Trajectory:
    turns = []
    for turn in trajectory.turns:
        size, total = len(turn.completion_ids), len(turn.prompt_ids) + len(turn.completion_ids)
        places = np.arange(total)
        rows = {
            "experts": (places[:, None] + np.arange(15)).astype(np.uint8).reshape(-1, 5, 3),
            "values": places[total - size :] % 256,
            "state": places[total - size :] * 2**33,
        }
        turns.append(dataclasses.replace(turn, fields=rows))
    return dataclasses.replace(trajectory, turns=turns)


def conversations(count: int, seed: int = 0, longest: int = 400) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    sizes = {"prompt": (1, longest), "completion": (1, longest)}
    drawn = [random_trajectory(rng, str(i), num_turns=3, **sizes) for i in range(count)]
    return [with_rows(trajectory) for trajectory in drawn]


def filled(trajectories: list[Trajectory], device: str = "cuda") -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(device=device, fields=FIELDS)
    buffer.extend(trajectories)
    return buffer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_extra_fields_are_gathered_as_on_the_host(layout: Any) -> None:
    trajectories = conversations(100)
    on_host, on_device = (filled(trajectories, device).pack(layout) for device in ("cpu", "cuda"))
    for name, field in on_host.fields.items():
        assert_same_bits(on_device.fields[name], field, name)
    assert on_device.unpack() == trajectories


def test_a_captured_pack_replays_its_batch_while_the_buffer_goes_on() -> None:
    trajectories = conversations(30)
    buffer = filled(trajectories)
    graph, batch = capture(buffer.pack)
    for seed in range(1, 4):
        buffer.clear()
        buffer.extend(conversations(20, seed))
        buffer.pack()
        batch.input_ids.zero_()
        replay(graph)
        assert batch.unpack() == trajectories


def on_device(trajectory: Trajectory, ids: torch.dtype) -> Trajectory:
    turns = [
        Turn(
            torch.as_tensor(turn.prompt_ids).to("cuda", ids),
            torch.as_tensor(turn.completion_ids).to("cuda", ids),
            torch.as_tensor(turn.completion_logprobs).cuda(),
            turn.reward,
            turn.truncated,
            turn.version_start,
            turn.version_end,
        )
        for turn in trajectory.turns
    ]
    return dataclasses.replace(trajectory, turns=turns)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_turns_on_the_device_are_packed_there(layout: Any, ids: torch.dtype) -> None:
    trajectories = conversations(100)
    resident = [on_device(trajectory, ids) for trajectory in trajectories]
    pack_resident(resident, layout)  # compiles
    with no_waiting():
        batch = pack_resident(resident, layout)
    buffer = TrajectoryBuffer(device="cuda")
    for trajectory in trajectories:
        turns = [dataclasses.replace(turn, fields=None) for turn in trajectory.turns]
        buffer.add(dataclasses.replace(trajectory, turns=turns))
    expected = buffer.pack(layout)
    if layout == "turns":  # where nothing is compared, all of a turn is new with it
        expected = dataclasses.replace(expected, turn_begin=expected.cu_seqlens[:-1])
    assert_batches_equal(batch, expected)
