"""Every trajectory is in one micro-batch of one rank, and a stream goes on where it stopped."""

import asyncio
import io
import math
import pickle
import re
from collections import Counter

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.packing.loader.loader_cases import content, entries_of, many, streams
from tests.support.slow import slow_after
from trajpack import Alignment, PackedDataset, TokenField, Trajectory, TrajectoryLog, Turn, pack
from trajpack.packing.trajectory_log.log import LoggedEpisode

CAPACITY = 40


class Again:
    """An iterable that is no list."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class Delivered:
    """An asynchronous iterable."""

    def __init__(self, items):
        self.items = list(items)

    async def __aiter__(self):
        while self.items:
            await asyncio.sleep(0)
            yield self.items.pop(0)


def collected(dataset, count=None):
    """Return the micro-batches of an asynchronous source, and the state then."""

    async def collect():
        pieces = []
        if count == 0:
            return pieces
        async for piece in dataset:
            pieces.append(piece)
            if len(pieces) == count:
                break
        return pieces

    return asyncio.run(collect()), dataset.state_dict()


def generated(trajectories):
    return Counter(
        token for one in trajectories for turn in one.turns for token in turn.completion_ids
    )


def tokens_of(pieces):
    return Counter(token for token, _ in streams(pieces))


@pytest.mark.parametrize("layout", ["merged", "turns", "tree"])
@settings(max_examples=12)
@given(
    count=st.integers(0, 30),
    ranks=st.integers(1, 3),
    accumulate=st.integers(1, 3),
    lookahead=st.integers(1, 40),
    seed=st.none() | st.integers(0, 9),
)
def test_each_generated_token_is_in_one_micro_batch_of_one_rank(
    layout, count, ranks, accumulate, lookahead, seed
):
    trajectories = many(count)
    options = {"num_ranks": ranks, "accumulate": accumulate, "lookahead": lookahead}
    of_ranks = [
        [*PackedDataset(trajectories, CAPACITY, seed, rank=rank, layout=layout, **options)]
        for rank in range(ranks)
    ]
    assert len({len(pieces) for pieces in of_ranks}) == 1
    assert len(of_ranks[0]) % accumulate == 0
    assert bool(of_ranks[0]) == bool(count)
    assert sum(map(tokens_of, of_ranks), Counter()) == generated(trajectories)
    for pieces in of_ranks:
        for piece in pieces:
            assert len(piece.input_ids) - piece.num_padding <= CAPACITY
    for begin in range(0, len(of_ranks[0]), accumulate):
        step = [piece for pieces in of_ranks for piece in pieces[begin : begin + accumulate]]
        weights = [weight for _, weight in streams(step)]
        assert len(set(weights)) == (len(weights) > 0)
        assert math.isclose(sum(weights), bool(weights), rel_tol=1e-5)


def test_sequences_that_are_cut_at_a_turn_weigh_what_they_keep():
    turns = [
        Turn([1] * 4, [2] * 4, [0.0] * 4),
        Turn([1] * 4 + [2] * 4 + [3] * 4, [4] * 9, [0.0] * 9),
    ]
    dataset = PackedDataset([Trajectory("a", turns)], 12, oversized="truncate_at_turn")
    (piece,) = dataset
    assert streams([piece]) == [(2, 0.25)] * 4
    with pytest.raises(ValueError, match="12"):
        [*PackedDataset([Trajectory("a", turns)], 12)]
    (dummy,) = PackedDataset([Trajectory("a", turns[1:])], 12, oversized="drop")
    assert dummy.is_dummy


def test_an_alignment_pads():
    dataset = PackedDataset(many(20), 64, alignment=Alignment(sequence_multiple=4, total=64))
    assert {piece.num_tokens for piece in dataset} == {64}
    assert tokens_of(dataset) == generated(many(20))


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        iter,
        Again,
        lambda some: [[one] for one in some],
        lambda some: [LoggedEpisode(one.id, (one,)) for one in some],
        lambda some: Again([(), *some]),
    ],
)
def test_sources_of_every_kind(make):
    assert tokens_of(PackedDataset(make(many(30)), CAPACITY, lookahead=8)) == generated(many(30))


def test_a_log_is_a_source_with_its_fields(tmp_path):
    field = TokenField("mask", torch.int32, ragged=True)
    given = {"mask": [[3], [4, 5]]}
    with TrajectoryLog.open(tmp_path / "log", fields=[field]) as log:
        for name in "abc":
            trajectory = Trajectory(name, [Turn([1], [3, 4], [0.0, 0.0], fields=given)])
            log.append(name, [trajectory])
        log.append("d", [], error="failed")
    with TrajectoryLog.open(tmp_path / "log", mode="read") as log:
        dataset = PackedDataset(log, CAPACITY)
        for _ in range(2):
            (piece,) = dataset
            assert piece.generated["mask"].values.tolist() == [3, 4, 5] * 3


def test_items_without_trajectories_are_refused():
    expected = "an item must be a Trajectory.*got {'messages': .*conversations_to_trajectories"
    with pytest.raises(TypeError, match=expected):
        [*PackedDataset([{"messages": []}], CAPACITY)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"capacity": 0}, "PackedDataset: capacity must be 1 or more, got 0"),
        ({"seed": -1}, "PackedDataset: seed must be 0 or more, got -1"),
        ({"rank": 2, "num_ranks": 2}, r"PackedDataset: rank must be in \[0, 1\], got 2"),
        ({"lookahead": 1.5}, "PackedDataset: lookahead must be an integer, got 1.5"),
        (
            {"layout": "trees"},
            "PackedDataset: layout must be one of 'merged', 'turns', 'tree', got",
        ),
        ({"oversized": "cut"}, "PackedDataset: oversized must be one of"),
        (
            {"layout": "tree", "oversized": "drop"},
            "oversized must be 'raise' for trees, got 'drop'",
        ),
        ({"trajectories": 5}, "trajectories must be an iterable or a data set, got int"),
        ({"fields": ["mask"]}, "TokenField"),
    ],
)
def test_wrong_arguments_are_named(options, expected):
    with pytest.raises((TypeError, ValueError), match=expected):
        PackedDataset(**({"trajectories": [], "capacity": CAPACITY} | options))


def test_a_seed_and_an_epoch_decide_the_order():
    def stream(seed, epoch=0, source=list):
        dataset = PackedDataset(source(many(60)), CAPACITY, seed, lookahead=16)
        dataset.set_epoch(epoch)
        return content(dataset)

    assert stream(1) == stream(1)
    assert stream(1, epoch=3) == stream(1, epoch=3)
    others = [stream(1), stream(2), stream(1, epoch=1), stream(1, source=Again), stream(None)]
    others.append(stream(1, epoch=1, source=Again))
    assert all(one not in others[:at] for at, one in enumerate(others))
    assert stream(None) == stream(None, epoch=1)


def test_without_a_seed_items_keep_their_order():
    trajectories = many(30)
    dataset = PackedDataset(trajectories, 10_000, None, lookahead=7)
    batches = [pack(trajectories[begin : begin + 7]) for begin in range(0, 30, 7)]
    assert [piece.input_ids.tolist() for piece in dataset] == [
        one.input_ids.tolist() for one in batches
    ]


def test_a_longer_look_ahead_fills_better():
    counts = [len([*PackedDataset(many(200), 24, lookahead=size)]) for size in (2, 16, 200)]
    assert counts[0] > counts[1] > counts[2]


def through_a_file(state):
    """Save and load a state as checkpoints are, without classes."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("layout", ["merged", "tree"])
@pytest.mark.parametrize("source", slow_after(1, [list, Again]))
def test_a_stream_goes_on_after_any_micro_batch(source, layout):
    def dataset():
        return PackedDataset(
            source(many(40)), CAPACITY, 5, lookahead=12, accumulate=2, layout=layout,
            rank=1, num_ranks=2,
        )  # fmt: skip

    first = dataset()
    first.set_epoch(2)
    pieces, states = [], [first.state_dict()]
    for piece in first:
        pieces.append(piece)
        states.append(first.state_dict())
    assert len(pieces) > 7
    assert content(first) == content(pieces)  # a second iteration begins anew
    for taken, state in enumerate(states):
        assert all(type(value) in (int, str) for value in state.values())
        for saved in (through_a_file(state), {"epoch": 2, "taken": taken}):
            again = dataset()
            again.load_state_dict(saved)
            again.set_epoch(2)  # as loops over epochs do
            assert content(again) == content(pieces[taken:])
            assert content(again) == content(pieces)


def test_an_iterator_goes_on_with_the_window_in_the_state():
    whole = [*PackedDataset(iter(many(30)), CAPACITY, 1, lookahead=12)]
    for taken in range(len(whole) + 1):
        source = iter(many(30))
        dataset = PackedDataset(source, CAPACITY, 1, lookahead=12)
        stream = iter(dataset)
        begun = [next(stream) for _ in range(taken)]
        again = PackedDataset(source, CAPACITY, 1, lookahead=12)
        again.load_state_dict(through_a_file(dataset.state_dict()))
        assert content([*begun, *again]) == content(whole)


def test_an_asynchronous_source_goes_on_too():
    whole, _ = collected(PackedDataset(Delivered(many(30)), CAPACITY, 1, lookahead=12))
    assert content(whole) == content(PackedDataset(iter(many(30)), CAPACITY, 1, lookahead=12))
    for taken in range(len(whole) + 1):
        source = Delivered(many(30))
        begun, state = collected(PackedDataset(source, CAPACITY, 1, lookahead=12), taken)
        again = PackedDataset(source, CAPACITY, 1, lookahead=12)
        again.load_state_dict(through_a_file(state))
        rest, _ = collected(again)
        assert content([*begun, *rest]) == content(whole)


def test_an_asynchronous_source_is_not_iterated():
    with pytest.raises(TypeError, match="the source is asynchronous: use `async for`"):
        next(iter(PackedDataset(Delivered(many(3)), CAPACITY)))


def test_a_new_epoch_forgets_a_loaded_state():
    dataset = PackedDataset(many(30), CAPACITY)
    dataset.load_state_dict({"epoch": 0, "taken": 3})
    dataset.set_epoch(1)
    fresh = PackedDataset(many(30), CAPACITY)
    fresh.set_epoch(1)
    assert content(dataset) == content(fresh)


def test_a_state_of_other_options_is_refused():
    state = PackedDataset(many(3), CAPACITY).state_dict()
    for name, value in {"capacity": 41, "seed": 1, "num_ranks": 2, "layout": "turns"}.items():
        dataset = PackedDataset(**({"trajectories": many(3), "capacity": CAPACITY} | {name: value}))
        expected = f"the state has {name}={state[name]!r}, this data set {value!r}"
        with pytest.raises(ValueError, match=re.escape(expected)):
            dataset.load_state_dict(state)


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (None, TypeError, "the state must be a mapping, got NoneType"),
        ([], TypeError, "the state must be a mapping, got list"),
        ({"taken": -1}, ValueError, "taken of the state must be 0 or more, got -1"),
        ({"epoch": -1}, ValueError, "epoch of the state must be 0 or more, got -1"),
        ({"window": 1.0}, TypeError, "window of the state must be an integer, got 1.0"),
        ({"taken": None}, TypeError, "taken of the state must be an integer, got None"),
    ],
)
def test_a_state_that_is_none_is_refused(state, error, words):
    dataset = PackedDataset(many(3), CAPACITY)
    before = dataset.state_dict()
    with pytest.raises(error, match=f"^PackedDataset: {re.escape(words)}$"):
        dataset.load_state_dict(state)
    assert dataset.state_dict() == before


def test_a_state_behind_the_end_of_the_epoch_is_refused_there():
    for source, count in ((many(30), len([*PackedDataset(many(30), CAPACITY)])), ([], 0)):
        dataset = PackedDataset(source, CAPACITY)
        dataset.load_state_dict({"taken": count})
        assert [*dataset] == []
        dataset.load_state_dict({"taken": 10**9})
        with pytest.raises(ValueError, match=f"taken=1000000000, epoch 0 has {count} micro-batch"):
            next(iter(dataset))


@pytest.mark.parametrize("layout", ["merged", "tree"])
def test_micro_batches_are_moved_and_sent_whole(layout):
    pieces = [*PackedDataset(many(30), CAPACITY, layout=layout)]
    for piece in pieces:
        assert content([piece.to("cpu")]) == content([piece])
        there = piece.to("meta")
        assert {one.device.type for one in entries_of(there).tensors().values()} == {"meta"}
        assert entries_of(there).fields["loss_weights"].device.type == "meta"
        assert there.input_ids.device.type == "meta"
    sent = pickle.loads(pickle.dumps(pieces[0]))
    assert content([sent]) == content(pieces[:1])
