"""What a tree shares and where prefixes broke, against brute force over all pairs of turns."""

from collections import Counter
from itertools import takewhile

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.packing.tree import tree_oracle as oracle
from trajpack import TokenField, Trajectory, Turn, pack, pack_tree
from trajpack.packing.batch.breaks import RUN, PrefixBreak, reason_of
from trajpack.packing.tree.trie import expanded
from trajpack.testing import trajectory_lists


def prefixes_of(paths):
    return {path[:end] for path in paths for end in range(1, len(path) + 1)}


def breaks_of(trajectory):
    """Return the numbers of the turns that broke a prefix: that begin a chain, but the first."""
    sizes = [
        len(oracle.chains_of(Trajectory("", trajectory.turns[:count])))
        for count in range(len(trajectory.turns) + 1)
    ]
    return [turn for turn in range(1, len(sizes) - 1) if sizes[turn + 1] > sizes[turn]]


def shared_by(one, other):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@given(trajectory_lists(6))
@settings(max_examples=40)
def test_shared_tokens_are_those_of_all_pairs(trajectories):
    statistics = pack_tree(trajectories).statistics()
    turns = [oracle.path_of(turn) for turn in oracle.turns_of(trajectories)]
    rows = [(index, row) for index, one in enumerate(trajectories) for row in oracle.chains_of(one)]
    groups = [(index if one.group is None else one.group) for index, one in enumerate(trajectories)]
    passing = Counter(prefix for _, row in rows for prefix in prefixes_of([row]))
    in_trajectory, in_group = Counter(), Counter()
    for number in range(len(trajectories)):
        in_trajectory.update(prefixes_of([row for index, row in rows if index == number]))
    for group in set(groups):
        in_group.update(prefixes_of([row for index, row in rows if groups[index] == group]))
    assert (
        statistics.num_tokens_turns
        == sum(map(len, turns))
        == sum(pack(trajectories, "turns").seqlens)
    )
    assert statistics.num_tokens_merged == passing.total() == pack(trajectories).num_tokens
    assert statistics.num_nodes == len(passing)
    assert statistics.shared_in_chains == sum(map(len, turns)) - passing.total()
    assert statistics.shared_in_trajectories == sum(passing[p] - in_trajectory[p] for p in passing)
    assert statistics.shared_in_groups == sum(in_trajectory[p] - in_group[p] for p in passing)
    assert statistics.shared_across_groups == sum(in_group[p] - 1 for p in passing)
    assert statistics.num_chains == len(rows)
    assert statistics.num_trees == len({row[0] for _, row in rows})
    counts = statistics.num_trajectories, statistics.num_turns, statistics.num_entries
    assert counts == (len(trajectories), len(turns), len(oracle.entries(trajectories)))


@given(trajectory_lists(6))
@settings(max_examples=40)
def test_breaks_are_where_no_earlier_turn_goes_on(trajectories):
    batch = pack_tree(trajectories)
    expected = []
    for index, trajectory in enumerate(trajectories):
        paths = [oracle.path_of(turn) for turn in trajectory.turns]
        for turn in breaks_of(trajectory):
            prompt = paths[turn][: len(trajectory.turns[turn].prompt_ids)]
            shared = [shared_by(prompt, path) for path in paths[:turn]]
            position = max(shared)
            history = max(number for number, one in enumerate(shared) if one == position)
            came = prompt[position] if position < len(prompt) else None
            expected.append((index, turn, history, position, paths[history][position], came))
    found = batch.statistics().breaks
    assert [one[:6] for one in found] == expected
    for one in found:
        assert (one.reason == "repeated") == (one.came is None)
        back = one.reason in {"stripped", "rewritten"}
        assert (one.removed is not None, one.added is not None) == (back, back)
    assert len(found) == batch.statistics().num_chains - len(trajectories)


@given(trajectory_lists(), st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_paths_are_those_of_the_nodes(trajectories, random):
    batch = pack_tree(trajectories)
    trie = batch.chains.trie
    rows = sorted(row for one in trajectories for row in oracle.chains_of(one))
    assert trie.lengths.tolist() == [*map(len, rows)]
    number = {path: node for node, path in enumerate(oracle.prefixes(trajectories))}
    every = np.arange(len(rows))
    for place, row in enumerate(rows):
        shared = [shared_by(row, other) for other in rows]
        assert trie.common(np.full_like(every, place), every).tolist() == shared
    begins = [random.randint(0, len(row)) for row in rows]
    ends = [random.randint(begin, len(row)) for begin, row in zip(begins, rows, strict=True)]
    stretches = [np.array(depths, np.int64) for depths in (begins, ends)]
    found = trie.pieces(every, *stretches)
    nodes_of = np.split(expanded(found.node, found.length), np.cumsum(stretches[1] - stretches[0]))
    for row, begin, end, nodes in zip(rows, begins, ends, nodes_of[:-1], strict=True):
        assert nodes.tolist() == [number[row[:stop]] for stop in range(begin + 1, end + 1)]


TASK = list(range(100, 120))
FIRST = list(range(200, 230))  # the first completion
NEW = list(range(300, 310))  # what the environment said


def the_break(*turns, fields=()):
    """Return the only break of a trajectory of these prompts and completions."""
    made = [
        Turn(prompt, completion, [-0.5] * len(completion), fields=dict(rows))
        for prompt, completion, *rows in turns
    ]
    [found] = pack_tree([Trajectory("a", made)], fields=fields).statistics().breaks
    return found


@pytest.mark.parametrize(
    ("prompt", "position", "tokens", "reason", "edit"),
    [
        (TASK + FIRST[20:] + NEW, 20, (200, 220), "stripped", (20, 0)),
        (TASK + FIRST[-2:] + NEW, 20, (200, 228), "stripped", (28, 0)),
        (TASK + FIRST[-1:] + NEW, 20, (200, 229), "stripped", (29, 0)),
        (TASK + FIRST[:5] + FIRST[6:] + NEW, 25, (205, 206), "stripped", (1, 0)),
        ([*TASK, 7, 8, *FIRST, *NEW], 20, (200, 7), "rewritten", (0, 2)),
        (TASK + FIRST[:10] + [7] + FIRST[11:] + NEW, 30, (210, 7), "rewritten", (1, 1)),
        (TASK + FIRST[:10] + [7] + FIRST[12:] + NEW, 30, (210, 7), "rewritten", (2, 1)),
        (TASK + FIRST[:-2] + [7] + FIRST[-1:] + NEW, 48, (228, 7), "rewritten", (1, 1)),
        ([*TASK[:5], 7, *TASK[6:], *FIRST, *NEW], 5, (105, 7), "rewritten", (1, 1)),
        (TASK + FIRST[:-1] + NEW, 49, (229, 300), "left", None),
        (TASK, 20, (200, None), "repeated", None),
        (TASK + FIRST[:5], 25, (205, None), "repeated", None),
        ([*TASK, 7, 8, 9, *NEW], 20, (200, 7), "left", None),
        (TASK + [7] * 20 + FIRST[-3:], 20, (200, 7), "left", None),
        (TASK[:12] + NEW, 12, (112, 300), "left", None),
        ([*TASK, 7, FIRST[-1], 8], 20, (200, 7), "left", None),
        (NEW, 0, (100, 300), "left", None),
        (TASK[:9] + NEW * 9, 9, (109, 300), "left", None),
        (TASK + NEW * 9, 20, (200, 300), "left", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons(prompt, position, tokens, reason, edit):
    found = the_break((TASK, FIRST), (prompt, [1]))
    removed, added = edit or (None, None)
    assert found == PrefixBreak(0, 1, 0, position, *tokens, reason, removed, added)


def test_rows_of_a_field_break_a_prefix():
    routes = TokenField("routes", torch.uint8, (), generated_only=False)
    found = the_break(
        ([1, 2], [3], ("routes", [0, 0, 0])),
        ([1, 2, 3, 4], [5], ("routes", [0, 1, 0, 0, 0])),
        fields=[routes],
    )
    assert found == PrefixBreak(0, 1, 0, 1, 2, 2, "fields", None, None)


@given(trajectory_lists(6))
@settings(max_examples=20)
def test_a_tree_with_duplicated_nodes_has_the_same_breaks(trajectories):
    shared = pack_tree(trajectories).statistics()
    batch = pack_tree(trajectories, boundary="duplicate")
    statistics = batch.statistics()
    assert statistics.breaks == shared.breaks
    assert statistics.num_nodes == batch.num_nodes
    alone = sum(pack_tree([one], boundary="duplicate").num_nodes for one in trajectories)
    saved = statistics.shared_in_chains + statistics.shared_in_trajectories
    assert saved == statistics.num_tokens_turns - alone
    saved += statistics.shared_in_groups + statistics.shared_across_groups
    assert saved == statistics.num_tokens_turns - batch.num_nodes


def test_an_empty_batch_shares_nothing():
    statistics = pack_tree([]).statistics()
    assert (statistics.num_nodes, statistics.breaks) == (0, ())
    assert (statistics.turns_ratio, statistics.merged_ratio) == (1.0, 1.0)
    silent = pack_tree([Trajectory("a", [Turn([1, 2], [], []), Turn([1, 2], [], [])])])
    assert silent.statistics().shared_in_chains == 2


@given(
    removed=st.integers(0, 60),
    added=st.integers(0, 60),
    rest=st.integers(RUN, 40),
)
def test_an_edit_is_measured_if_enough_follows(removed, added, rest):
    tokens = np.arange(1000)
    history = np.concatenate([tokens[:removed], tokens[500 : 500 + rest]])
    prompt = np.concatenate([tokens[200 : 200 + added], history[removed:], tokens[900:910]])
    if not removed and not added:
        return
    expected = "rewritten" if added else "stripped"
    found = reason_of(history, prompt)
    assert found == (expected, removed, added)


ANSWER = list(range(RUN))


@pytest.mark.parametrize(
    ("history", "prompt", "found"),
    [
        # the place with fewest added tokens
        ([50, 51, *ANSWER, 52, 53, 60, 61, 62], [60, 61, 62, *ANSWER, 70], (RUN + 4, 0)),
        # a short history behind what was inserted
        ([1, 2, 3], [7, 1, 2, 3, 9], (0, 1)),
        # the longest agreement where text repeats
        ([50, 51, *ANSWER, 52, 53, *ANSWER, 60, 61], [*ANSWER, 60, 61, 70], (RUN + 4, 0)),
    ],
)
def test_one_of_several_places_is_taken(history, prompt, found):
    reason = "rewritten" if found[1] else "stripped"
    assert reason_of(np.array(history), np.array(prompt)) == (reason, *found)
