"""What of a batch is new with each turn, how much of it was generated, and who is in a group."""

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

import trajpack
from trajpack import Trajectory, TrajectoryBuffer, Turn, pack
from trajpack.packing.types import VersionSpan
from trajpack.testing import trajectory_lists

LAYOUTS = ["merged", "turns"]
layouts = st.sampled_from(LAYOUTS)


def new_in_chains(trajectory):
    """Tokens that are new with each turn: by comparing lists, the longest chain first."""
    chains = []
    for turn in trajectory.turns:
        prompt, completion = (list(map(int, ids)) for ids in (turn.prompt_ids, turn.completion_ids))
        fitting = [chain for chain in chains if prompt[: len(chain)] == chain]
        held = max(fitting, key=len, default=[])
        if held:
            chains.remove(held)
        chains.append(prompt + completion)
        yield prompt[len(held) :] + completion


def new_tokens(batch):
    spans = zip(batch.turn_begin.tolist(), batch.turn_spans[:, 1].tolist(), strict=True)
    return [batch.input_ids[begin:end].tolist() for begin, end in spans]


@given(trajectory_lists(), layouts)
def test_the_tokens_new_with_a_turn_are_those_its_chain_did_not_hold(given_trajectories, layout):
    batch = pack(given_trajectories, layout=layout)
    expected = [tokens for trajectory in given_trajectories for tokens in new_in_chains(trajectory)]
    assert new_tokens(batch) == expected
    begin, first = batch.turn_begin, batch.turn_spans[:, 0]
    assert bool((batch.cu_seqlens[batch.turn_sequence.long()] <= begin).all())
    assert bool((begin <= first).all())
    assert not any(batch.loss_mask[b:f].any() for b, f in zip(begin, first, strict=True))


@given(trajectory_lists())
def test_what_is_new_with_a_turn_is_the_same_in_both_layouts(given_trajectories):
    merged, turns = (pack(given_trajectories, layout=layout) for layout in LAYOUTS)
    lengths = [batch.turn_spans[:, 1] - batch.turn_begin for batch in (merged, turns)]
    assert torch.equal(*lengths)
    assert new_tokens(merged) == new_tokens(turns)
    for name in ("cu_generated", "group_ids", "num_groups"):
        one, other = getattr(merged, name), getattr(turns, name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, name


@given(trajectory_lists())
def test_in_merged_sequences_the_turns_follow_each_other_without_a_gap(given_trajectories):
    batch = pack(given_trajectories)
    ranges = zip(batch.turn_begin.tolist(), batch.turn_spans[:, 1].tolist(), strict=True)
    in_order = sorted(ranges)
    bounds = [0, *(end for _, end in in_order)]
    assert [begin for begin, _ in in_order] == bounds[:-1]
    assert bounds[-1] == batch.num_tokens


@pytest.mark.parametrize(
    ("layout", "begins"), [("merged", [0, 7, 4, 9]), ("turns", [0, 4, 10, 15])]
)
def test_interleaved_chains_by_hand(layout, begins):
    turns = [
        Turn([1, 2], [3, 3], [0, 0], version_spans=[VersionSpan(0, 0, 1), VersionSpan(1, 1, 2)]),
        Turn([9], [8], [0]),
        Turn([1, 2, 3, 3, 4], [5, 5], [0, 0]),
        Turn([9, 8], [], []),
    ]
    batch = pack([Trajectory("a", turns)], layout)
    assert batch.turn_begin.dtype == batch.cu_generated.dtype == torch.int32
    assert batch.turn_begin.tolist() == begins
    assert batch.cu_generated.tolist() == [0, 2, 3, 5, 5]


@given(trajectory_lists(), layouts)
def test_generated_tokens_are_counted_in_the_order_of_turns(given_trajectories, layout):
    batch = pack(given_trajectories, layout=layout)
    sizes = [len(turn.completion_ids) for t in given_trajectories for turn in t.turns]
    assert batch.cu_generated.tolist() == list(itertools.accumulate(sizes, initial=0))
    assert int(batch.cu_generated[-1]) == batch.num_generated


@given(trajectory_lists(), trajectory_lists(), layouts)
def test_new_tokens_are_counted_and_the_longest_trajectory_is_known(first, second, layout):
    """In a buffer that grows, and in the entries of its tree, where generated tokens are new."""
    buffer = TrajectoryBuffer(device="cpu")
    for part in (first, second):
        buffer.extend(part)
        batch = buffer.pack(layout)
        cu_new, bounds = batch.tables.cu_new, batch.cu_turns.long()
        assert torch.equal(cu_new.diff(), batch.turn_spans[:, 1] - batch.turn_begin)
        for most, table in zip(batch.tables.longest[:2], (batch.cu_generated, cu_new), strict=True):
            assert most == max(table[bounds].diff().tolist(), default=0)
        sizes = batch.group_ids.bincount()
        assert batch.tables.longest.group == max(sizes.tolist(), default=0)
        assert torch.equal(batch.tables.group_order.cu_trajectories.diff(), sizes)
    entries = trajpack.pack_tree(buffer).entries
    assert torch.equal(entries.tables.cu_new, batch.cu_generated)
    assert entries.tables.longest == batch.tables.longest._replace(
        new=batch.tables.longest.generated
    )


def one_turn(group):
    return Trajectory("a", [Turn([1], [2], [0.0])], group=group)


def numbered(groups):
    """Numbers by looking back, one trajectory at a time."""
    numbers = []
    for index, group in enumerate(groups):
        before = groups.index(group)
        fresh = group is None or before == index
        numbers.append(1 + max(numbers, default=-1) if fresh else numbers[before])
    return numbers


@given(st.lists(st.none() | st.sampled_from(["", "a", "b", "c"]), max_size=12), layouts)
def test_groups_are_numbered_as_they_appear(groups, layout):
    batch = pack([one_turn(group) for group in groups], layout=layout)
    assert batch.group_ids.dtype == torch.int32
    assert batch.group_ids.tolist() == numbered(groups)
    assert batch.num_groups == len(set(numbered(groups)))
    assert type(batch.num_groups) is int


def test_more_groups_than_16_bits_number_are_ordered():
    buffer, count = TrajectoryBuffer(device="cpu"), (1 << 16) + 3
    turn = [Turn([1], [2], [0.0])]
    buffer.extend(Trajectory("a", turn, group=str(i)) for i in [*range(count), 0])
    order = buffer.pack().tables.group_order
    assert order.trajectories.tolist() == [0, count, *range(1, count)]
