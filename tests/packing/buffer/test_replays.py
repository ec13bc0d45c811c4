"""Copies in flight and packs in CUDA graphs: no host memory is written while a copy may read it."""

import gc
import weakref

import numpy as np
import pytest
import torch

from tests.packing.buffer.pretended_device import PretendedDevice
from trajpack import Trajectory, Turn, pack, pack_resident, plan_micro_batches
from trajpack.kernels.dispatch import check_not_captured
from trajpack.packing.buffer import resident
from trajpack.packing.buffer.staging import Staging
from trajpack.packing.micro_batches import cutting

CUDA = torch.device("cuda")

NO_TABLES: dict[str, np.ndarray] = {}


@pytest.fixture
def device(monkeypatch):
    return PretendedDevice(monkeypatch)


@pytest.fixture
def staging(device):
    """Staging memory on the host that takes itself for pinned memory of a device."""
    staging = Staging(torch.device("cpu"))
    staging.device = CUDA
    return staging


def write(staging, value):
    staging.reserve(5, 0)[:5] = value


@pytest.mark.attack
def test_no_interleaving_of_writes_copies_and_replays_mixes_contents(tries, device, monkeypatch):
    for seed in range(tries(1000)):
        rng, value, sent, graphs = np.random.default_rng(seed), 0, [], []
        staging = Staging(torch.device("cpu"))
        staging.device = CUDA
        write(staging, value)
        for step in rng.integers(6, size=20):
            if step == 0:
                value += 1
                write(staging, value)
            elif step == 1:
                sent.append((value, staging.send(5, NO_TABLES)))
            elif step == 2:
                with device.capturing() as graph:
                    sent.append((value, staging.send(5, NO_TABLES)))
                graph.replay()
                graphs.append(graph)
            elif step == 3 and graphs:
                graphs[rng.integers(len(graphs))].replay()
            elif step == 4:
                staging.clear()
                write(staging, value)
            else:
                device.advance(min(int(rng.integers(6)), len(device.queue)))
        device.finish()
        for expected, region in sent:
            assert region.stream.tolist() == [expected] * 5, f"seed {seed}"


def test_the_model_shows_what_a_write_without_a_wait_would_mix(staging, device, monkeypatch):
    write(staging, 3)
    sent = staging.send(5, NO_TABLES)
    device.advance()
    monkeypatch.setattr(Staging, "_wait", lambda self, region: None)
    write(staging, 4)
    device.finish()
    assert sent.stream.tolist() != [3] * 5


@pytest.mark.parametrize("done_beside", [0, 1, 3])
@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_buffer_is_packed_on_two_streams(done, done_beside, staging, device):
    sent = []
    for value in (3, 4, 5):
        write(staging, value)  # waits for the copies of both streams
        sent.append((value, staging.send(5, NO_TABLES)))
        with device.beside():
            sent.append((value, staging.send(5, NO_TABLES)))
            device.advance(min(done_beside, len(device.queue)))
        device.advance(min(done, len(device.queue)))
        if value == 4:
            staging.clear()
    device.finish()
    for value, region in sent:
        assert region.stream.tolist() == [value] * 5


def test_what_copies_from_memory_of_one_call_is_not_captured(device, monkeypatch):
    turn = Turn(torch.tensor([1]), torch.tensor([2]), torch.tensor([0.0]))
    batch = pack([Trajectory("a", [turn])], device="cpu")
    plan = plan_micro_batches(batch.seqlens, 10_000)
    calls = {
        lambda: batch.select([0]): "micro-batches",
        lambda: batch.split(plan): "micro-batches",
        lambda: batch.merge(plan, [batch.input_ids]): "micro-batches",
        lambda: pack_resident([Trajectory("a", [turn])]): "pack_resident",
    }
    real = check_not_captured
    for module in (cutting, resident):  # tensors are the host's
        monkeypatch.setattr(
            module, "check_not_captured", lambda op, _, remedy: real(op, CUDA, remedy)
        )
    for call, op in calls.items():
        with device.capturing(), pytest.raises(RuntimeError, match=f"^{op}: cannot be captured"):
            call()


def test_memory_that_a_graph_reads_lives_as_long_as_the_buffer(staging, device):
    write(staging, 3)
    with device.capturing():
        staging.send(5, NO_TABLES)
    captured = weakref.ref(staging.region)
    for _ in range(2):
        staging.clear()
        write(staging, 4)
    gc.collect()
    assert captured() is not None, "a replay reads it"
    assert captured() is not staging.region
