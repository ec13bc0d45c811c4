import numpy as np
import pytest
import torch

from trajpack import Trajectory, TrajectoryBuffer, Turn, pack
from trajpack.packing.buffer.staging import Staging

CHAINS = {
    "a token dropped": ([([1, 2], [3, 4]), ([1, 2, 3, 5], [6])], [0, 1]),
    "shorter than its chain": ([([1, 2], [3]), ([1, 2], [4])], [0, 1]),
    "broken in the middle": ([([1, 2, 3], [4]), ([1, 9, 3, 4, 5], [6])], [0, 1]),
    "interleaved": ([([1], [2]), ([7], [8]), ([1, 2, 3], [4]), ([7, 8, 9], [5])], [0, 1, 0, 1]),
    "the latest of equal chains": (
        [([1], []), ([2], [3]), ([2], [3]), ([2, 3, 4], [5])], [0, 1, 2, 2],
    ),
    "the longest": (
        [([1], []), ([9], []), ([1, 2], [3]), ([1], [5]), ([1, 2, 3, 4], [6])], [0, 1, 0, 2, 0],
    ),
    "other containers": (
        [
            ([1, 2], (3,)),
            (np.array([1, 2, 3, 4], np.int64), torch.tensor([5])),
            (torch.tensor([1, 2, 3, 4, 5, 6], dtype=torch.int16), [7]),
        ],
        [0, 0, 0],
    ),
}  # fmt: skip
"""Prompts and completions of turns, and the chain of each."""


@pytest.mark.parametrize(("turns", "chains"), CHAINS.values(), ids=CHAINS)
def test_a_turn_extends_the_longest_chain_that_is_a_prefix(turns, chains):
    turns = [Turn(prompt, said, torch.zeros(len(said)).bfloat16()) for prompt, said in turns]
    assert pack([Trajectory("a", turns)]).turn_sequence.tolist() == chains


def test_pinned_memory_is_asked_of_the_host_whatever_the_default_device(monkeypatch):
    asked = []
    genuine = torch.empty

    def empty(size, **options):
        asked.append(options)
        return genuine(size, dtype=options["dtype"])

    monkeypatch.setattr(torch, "empty", empty)
    Staging(torch.device("cuda"))
    assert all(options["device"] == "cpu" and options["pin_memory"] for options in asked)
    assert asked


class Copy:
    """Stands in for the event of a copy in flight."""

    def __init__(self):
        self.waits = 0

    def synchronize(self):
        self.waits += 1


def test_the_next_batch_is_staged_beside_the_one_in_flight(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    first, second = Copy(), Copy()
    staging = Staging(torch.device("cpu"))

    def write(value):
        staging.reserve(5, 0)[:5] = value

    write(3)
    in_flight = staging.send(5, {})
    staging.region.copies = [first]
    staging.clear()
    assert len(staging.region.words) >= len(staging._spare.words), "room for as much"
    write(7)
    assert in_flight.stream.tolist() == [3] * 5
    assert first.waits == 0
    staging.region.copies = [second]
    staging.clear()
    write(8)
    assert (first.waits, second.waits) == (1, 0)


def test_batches_of_one_size_take_two_regions_and_no_more(monkeypatch):
    """Pinned memory takes long to allocate, and nothing else may use it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    staging, regions = Staging(torch.device("cpu")), []
    for _ in range(4):
        staging.clear()
        staging.reserve(100, 0)
        staging.reserve(130, 100)  # the tables
        staging.region.copies = [Copy()]
        regions.append(staging.region)
    assert regions[::2] == [regions[0]] * 2
    assert regions[1::2] == [regions[1]] * 2
    assert len(regions[0].words) == len(regions[1].words)


def test_a_buffer_is_not_written_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    staging = Staging(torch.device("cpu"))
    staging.region.copies = [Copy()]
    with pytest.raises(RuntimeError, match="cannot be written while a CUDA graph is captured"):
        staging.reserve(5, 0)


def test_what_does_not_fit_is_refused_and_leaves_nothing_behind():
    fits = Trajectory("fits", [Turn([1] * 6, [2], [0])])
    large = Trajectory("large", [Turn([1] * 3, [2], [0])])
    buffer = TrajectoryBuffer(capacity=10)
    buffer.add(fits)
    with pytest.raises(ValueError, match=r"'large' needs 4 tokens, but 3 of the buffer's 10"):
        buffer.add(large)
    assert buffer.pack().unpack() == [fits]
    buffer.clear()
    buffer.add(large)
    assert buffer.pack().unpack() == [large]


def test_a_capacity_below_one_is_refused():
    with pytest.raises(ValueError, match="capacity must be at least 1 token, got 0"):
        TrajectoryBuffer(capacity=0)


def test_unknown_layouts_and_implementations_are_refused():
    buffer = TrajectoryBuffer()
    with pytest.raises(
        ValueError, match=r"'merged' or 'turns', got 'tree'; trajpack\.pack_tree packs trees"
    ):
        buffer.pack(layout="tree")
    with pytest.raises(ValueError, match="impl must be 'auto', 'torch' or 'triton', got 'cuda'"):
        buffer.pack(impl="cuda")


def test_a_buffer_says_what_it_holds():
    buffer = TrajectoryBuffer(device="cpu", capacity=1000)
    buffer.add(Trajectory("a", [Turn([1], [2], [0.0])]))
    assert repr(buffer) == "TrajectoryBuffer(1 trajectories, 1 turns, 2 of 1,000 tokens, for cpu)"


def test_a_region_that_is_too_small_is_not_taken_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    staging = Staging(torch.device("cpu"))
    staging.region.copies = [Copy()]
    staging.clear()  # the first region is in flight, and small
    staging.reserve(100_000, 0)
    staging.region.copies = [Copy()]
    staging.clear()
    assert len(staging.region.stream) >= 100_000, "room for as much"
