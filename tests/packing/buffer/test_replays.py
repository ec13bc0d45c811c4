"""Static batches and packs in CUDA graphs: no host memory is written while a copy may read it."""

import gc
import sys
import weakref

import numpy as np
import pytest
import torch

from tests.packing.buffer.pretended_device import PretendedDevice
from trajpack import (
    StaticBatch,
    Trajectory,
    TrajectoryBuffer,
    Turn,
    pack,
    pack_resident,
    plan_micro_batches,
)
from trajpack.kernels import gather_words
from trajpack.kernels.dispatch import check_not_captured
from trajpack.packing.buffer import resident
from trajpack.packing.buffer.staging import Staging
from trajpack.packing.buffer.tables import columns_for
from trajpack.packing.micro_batches import cutting
from trajpack.testing import random_trajectory

CUDA = torch.device("cuda")
gather_words_module = sys.modules["trajpack.kernels.fields.gather_words"]
LAYOUTS = ["merged", "turns"]


def conversations(seed, count=4):
    rng = np.random.default_rng(seed)
    sizes = {"prompt": (1, 9), "completion": (1, 9)}
    return [random_trajectory(rng, f"{seed}-{i}", num_turns=3, **sizes) for i in range(count)]


def filled(trajectories):
    buffer = TrajectoryBuffer(device="cpu")
    buffer.extend(trajectories)
    return buffer


@pytest.fixture
def static():
    """A static batch on the host that takes itself for one on a device."""
    static = StaticBatch(capacity=400, max_turns=20, max_runs=40, device="cpu")
    filled(conversations(99)).pack_into(static)
    static.device = static._staging.device = CUDA
    return static


@pytest.fixture
def device(static, monkeypatch):
    return PretendedDevice(monkeypatch)


def kernels_of(static, patch):
    """Run the part of ``static.run`` behind the copy; return copies of its tensors."""
    with patch.context() as quiet:
        quiet.setattr(Staging, "send_again", lambda self, arena: None)
        batch = static.run("torch")
    return {name: tensor.clone() for name, tensor in batch.tensors().items()}


def captured(static, device, patch, seen):
    """Capture a run, and kernels that leave in ``seen`` what the copy brought."""
    with device.capturing() as graph:
        static.run("torch")
    graph.steps.append(lambda: seen.append(kernels_of(static, patch)))
    return graph


def assert_shows(seen, trajectories, layout="merged"):
    for name, tensor in pack(trajectories, layout, device="cpu").tensors().items():
        assert torch.equal(seen[name][: len(tensor)], tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("done_before_fill", [0, 1, 2, 3])
def test_fills_and_replays_follow_each_other_without_a_synchronisation(
    layout, done_before_fill, static, device, monkeypatch
):
    seen = []
    graph = captured(static, device, monkeypatch, seen)
    for seed in range(6):
        static.fill(filled(conversations(seed)), layout)
        assert len(seen) <= max(seed - 1, 0), "a fill waits for the last copy, not for its kernels"
        graph.replay()
        device.advance(done_before_fill)
    device.finish()
    for seed, batch in enumerate(seen):
        assert_shows(batch, conversations(seed), layout)
    assert len(seen) == 6


@pytest.mark.attack
def test_no_interleaving_of_fills_replays_and_work_mixes_batches(
    tries, static, device, monkeypatch
):
    seen = []
    graphs = [captured(static, device, monkeypatch, seen) for _ in range(2)]
    batches = [conversations(seed, count) for seed, count in enumerate([4, 1, 6, 0, 3])]
    buffers = [filled(batch) for batch in batches]
    for seed in range(tries(1000)):
        rng, expected, current = np.random.default_rng(seed), [], 0
        seen.clear()
        static.fill(buffers[current])
        for step in rng.integers(4, size=20):
            if step == 0:
                current = int(rng.integers(len(buffers)))
                static.fill(buffers[current])
            elif step == 1:
                graphs[rng.integers(2)].replay()
                expected.append(current)
            else:
                device.advance(min(int(rng.integers(6)), len(device.queue)))
        device.finish()
        assert len(seen) == len(expected), f"seed {seed}"
        for batch, number in zip(seen, expected, strict=True):
            try:
                assert_shows(batch, batches[number])
            except AssertionError as error:
                raise AssertionError(f"seed {seed}") from error


def test_the_model_shows_what_a_fill_without_a_wait_would_mix(static, device, monkeypatch):
    seen = []
    graph = captured(static, device, monkeypatch, seen)
    static.fill(filled(conversations(1)))
    graph.replay()
    device.advance()
    monkeypatch.setattr(Staging, "_wait", lambda self, region: None)
    static.fill(filled(conversations(2)))
    device.finish()
    for seed in (1, 2):
        with pytest.raises(AssertionError):
            assert_shows(seen[0], conversations(seed))


def test_every_graph_and_every_run_is_waited_for(static, device, monkeypatch):
    seen = []
    first, second = (captured(static, device, monkeypatch, seen) for _ in range(2))
    for seed, start in enumerate([first.replay, second.replay, first.replay, second.replay]):
        static.fill(filled(conversations(seed)))
        start()
    static.fill(filled(conversations(9)))
    static.run("torch")
    region = static._staging.region
    sent = region.words.clone()
    static.fill(filled(conversations(10)))
    assert torch.equal(static._arena.words, sent[: len(static._arena.words)])
    device.finish()
    for seed, batch in enumerate(seen):
        assert_shows(batch, conversations(seed))


def test_a_graph_that_is_not_replayed_is_not_waited_for(static, device, monkeypatch):
    captured(static, device, monkeypatch, [])
    static.fill(filled(conversations(1)))
    assert not device.queue


def test_replays_read_where_fill_writes(static, device, monkeypatch):
    place = static._staging.region.words.data_ptr()
    captured(static, device, monkeypatch, [])
    static.fill(filled(conversations(1)))
    assert static._staging.region.words.data_ptr() == place


def test_a_capture_takes_in_what_ran_before_and_nothing_else(static, device):
    static._ran.clear()
    buffer = filled(conversations(2))
    with device.capturing():
        with pytest.raises(RuntimeError, match=r"first StaticBatch\.run with impl='torch'.*before"):
            static.run("torch")
        with pytest.raises(
            RuntimeError, match=r"StaticBatch\.fill: cannot be captured.*fill before"
        ):
            static.fill(buffer)
        with pytest.raises(
            RuntimeError, match=r"StaticBatch: cannot be captured.*before the capture"
        ):
            StaticBatch(capacity=400, max_turns=20, device="cuda")
    static.run("torch")
    with device.capturing() as graph:
        static.run("torch")
    assert graph.steps


def test_a_captured_pack_keeps_its_words(device):
    staging = Staging(torch.device("cpu"), columns_for(()))
    staging.device = CUDA

    def write(value):
        staging.reserve(5, 1, words_used=0)
        staging.region.stream[:5] = value

    write(3)
    with device.capturing() as graph:
        captured = staging.send(5)
    for value in (4, 5, 6):
        write(value)
        sent = staging.send(5)
        graph.replay()
        staging.clear(1)
        write(9)
        device.finish()
        assert captured.stream.tolist() == [3] * 5
        assert sent.stream.tolist() == [value] * 5


@pytest.mark.parametrize("done_beside", [0, 1, 3])
@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_buffer_is_packed_on_two_streams(done, done_beside, device):
    staging = Staging(torch.device("cpu"), columns_for(()))
    staging.device, sent = CUDA, []
    for value in (3, 4, 5):
        staging.reserve(5, 1, words_used=0)  # waits for the copies of both streams
        staging.region.stream[:5] = value
        sent.append((value, staging.send(5)))
        with device.beside():
            sent.append((value, staging.send(5)))
            device.advance(min(done_beside, len(device.queue)))
        device.advance(min(done, len(device.queue)))
        if value == 4:
            staging.clear(1)
    device.finish()
    for value, region in sent:
        assert region.stream.tolist() == [value] * 5


def test_what_copies_from_memory_of_one_call_is_not_captured(static, device, monkeypatch):
    batch = pack(conversations(1), device="cpu")
    plan = plan_micro_batches(batch.seqlens, 10_000)
    turn = Turn(torch.tensor([1]), torch.tensor([2]), torch.tensor([0.0]))
    calls = {
        lambda: batch.select([0]): "micro-batches",
        lambda: batch.split(plan): "micro-batches",
        lambda: batch.merge(plan, [batch.input_ids]): "micro-batches",
        lambda: gather_words([torch.tensor([1])], impl="triton"): "gather_words",
        lambda: pack_resident([Trajectory("a", [turn])]): "pack_resident",
    }
    real = check_not_captured
    for module in (gather_words_module, cutting, resident):  # tensors are the host's
        monkeypatch.setattr(
            module, "check_not_captured", lambda op, _, remedy: real(op, CUDA, remedy)
        )
    for call, op in calls.items():
        with device.capturing(), pytest.raises(RuntimeError, match=f"^{op}: cannot be captured"):
            call()


def test_memory_that_a_graph_reads_lives_as_long_as_the_buffer(device):
    staging = Staging(torch.device("cpu"), columns_for(()))
    staging.device = CUDA
    staging.reserve(5, 1, words_used=0)
    with device.capturing():
        staging.send(5)
    captured = weakref.ref(staging.region)
    for _ in range(2):
        staging.clear(1)
        staging.reserve(5, 1, words_used=0)
    gc.collect()
    assert captured() is not None, "a replay reads it"
    assert captured() is not staging.region


def test_a_capture_needs_a_run_of_its_own_implementation(static, device):
    static._ran = {"triton"}  # the other one is not compiled
    refused = pytest.raises(RuntimeError, match=r"first StaticBatch\.run with impl='torch'.*before")
    with device.capturing() as graph, refused:
        static.run("torch")
    assert not graph.steps
