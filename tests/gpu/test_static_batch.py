"""On real hardware: graphs that replay new contents, turns that never leave the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.conftest import capture, no_waiting, replay
from trajpack import StaticBatch, TokenField, Trajectory, TrajectoryBuffer, Turn, pack_resident
from trajpack.kernels.fields.build import FIELD_DTYPES
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


def assert_holds(batch: Any, trajectories: list[Trajectory], layout: Any) -> None:
    expected = filled(trajectories, "cpu").pack(layout)
    tokens = expected.num_tokens
    for name in FIELD_DTYPES:
        if name != "returns":
            assert_same_bits(getattr(batch, name)[:tokens], getattr(expected, name), name)
    for name, field in expected.fields.items():
        assert_same_bits(batch.fields[name][:tokens], field, name)
    assert not batch.loss_mask[tokens:].any()
    assert batch.unpack() == trajectories


@pytest.mark.parametrize("layout", LAYOUTS)
def test_extra_fields_are_gathered_as_on_the_host(layout: Any) -> None:
    trajectories = conversations(100)
    on_host, on_device = (filled(trajectories, device).pack(layout) for device in ("cpu", "cuda"))
    for name, field in on_host.fields.items():
        assert_same_bits(on_device.fields[name], field, name)
    assert on_device.unpack() == trajectories


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_captured_run_replays_whatever_was_filled_last(layout: Any) -> None:
    static = StaticBatch(
        capacity=400_000, max_turns=900, max_runs=2000, device="cuda", fields=FIELDS
    )
    static.fill(filled(conversations(50)), layout)
    graph, captured = capture(static.run)
    for seed, count in enumerate((60, 5, 0, 80)):
        trajectories = conversations(count, seed)
        static.fill(filled(trajectories), layout)
        replay(graph)
        assert_holds(static.batch, trajectories, layout)
        for name in ("input_ids", "turn_returns", "cu_seqlens"):
            tensors = (getattr(batch, name) for batch in (captured, static.batch))
            assert len({tensor.data_ptr() for tensor in tensors}) == 1, name


def captured_run(static: StaticBatch, before: int, behind: int) -> torch.cuda.CUDAGraph:
    """Capture a run between two sleeps of so many cycles."""

    def run() -> None:
        torch.cuda._sleep(before)
        static.run()
        torch.cuda._sleep(behind)

    static.fill(filled(conversations(5)))
    return capture(run)[0]


def test_fills_and_replays_follow_each_other_without_a_synchronisation() -> None:
    static = StaticBatch(400_000, 900, max_runs=2000, device="cuda", fields=FIELDS)
    graph = captured_run(static, before=20_000_000, behind=1_000_000)
    given = [conversations(30 + seed % 3, seed) for seed in range(12)]
    buffers = [filled(trajectories) for trajectories in given]
    seen = []
    for buffer in buffers:
        static.fill(buffer)
        graph.replay()
        seen.append({name: tensor.clone() for name, tensor in static.batch.tensors().items()})
    torch.cuda.synchronize()
    for batch, trajectories in zip(seen, given, strict=True):
        for name, tensor in filled(trajectories, "cpu").pack().tensors().items():
            if name not in ("turn_returns", "returns"):  # sums, of another implementation
                assert_same_bits(batch[name][: len(tensor)], tensor, name)


def test_a_replay_records_its_event_when_it_is_launched() -> None:
    """What `fill` relies on: the event is not over between the launch and the copy."""
    static = StaticBatch(400_000, 900, device="cuda", fields=FIELDS)
    graph = captured_run(static, before=200_000_000, behind=0)
    (event,) = static._staging.region.replays
    for _ in range(3):
        graph.replay()
        assert not event.query(), "the copy waits behind a sleep"
        event.synchronize()
        assert event.query()


def test_a_fill_waits_for_the_copy_and_not_for_the_rest_of_the_graph() -> None:
    static = StaticBatch(400_000, 900, device="cuda", fields=FIELDS)
    graph = captured_run(static, before=0, behind=2_000_000_000)
    buffer = filled(conversations(30))
    buffer.pack()
    torch.cuda.synchronize()
    graph.replay()
    static.fill(buffer)
    assert not torch.cuda.current_stream().query(), "the graph goes on"
    torch.cuda.synchronize()


def test_what_a_replay_would_not_do_again_is_not_captured() -> None:
    buffer = filled(conversations(5))
    batch = buffer.pack()
    static = StaticBatch(400_000, 900, device="cuda", fields=FIELDS)
    static.fill(buffer)
    refused = {
        static.run: "run once before",
        lambda: static.fill(buffer): "fill before",
        lambda: StaticBatch(10, 2, device="cuda"): "before the capture",
        lambda: batch.select([0]): "micro-batches",
    }
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(100)
        for call, message in refused.items():
            with pytest.raises(RuntimeError, match=message):
                call()
    graph.replay()
    torch.cuda.synchronize()


def test_a_run_never_waits() -> None:
    static = StaticBatch(capacity=100_000, max_turns=300, device="cuda", fields=FIELDS)
    buffer = filled(conversations(20))
    buffer.pack_into(static)
    with no_waiting():
        static.fill(buffer)
        static.run()


def test_two_static_batches_take_turns() -> None:
    pair = [StaticBatch(400_000, 900, device="cuda", fields=FIELDS) for _ in range(2)]
    batches = [conversations(30, seed) for seed in range(2)]
    torch.cuda._sleep(100_000_000)
    for static, trajectories in zip(pair, batches, strict=True):
        filled(trajectories).pack_into(static)
    for static, trajectories in zip(pair, batches, strict=True):
        assert_holds(static.batch, trajectories, "merged")


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
