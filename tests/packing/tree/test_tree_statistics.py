"""What a tree shares, against brute force over all pairs of turns."""

from collections import Counter
from itertools import pairwise, takewhile

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from tests.packing.tree import tree_oracle as oracle
from trajpack import TokenField, Trajectory, Turn, pack, pack_tree
from trajpack.packing.tree.trie import expanded
from trajpack.testing import trajectory_lists


def prefixes_of(paths):
    return {path[:end] for path in paths for end in range(1, len(path) + 1)}


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


@given(trajectory_lists(), st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_paths_are_those_of_the_nodes(trajectories, random):
    batch = pack_tree(trajectories)
    trie = batch.chains.trie
    rows = sorted(row for one in trajectories for row in oracle.chains_of(one))
    assert trie.lengths.tolist() == [*map(len, rows)]
    number = {path: node for node, path in enumerate(oracle.prefixes(trajectories))}
    every = np.arange(len(rows))
    shared = [shared_by(*pair) for pair in pairwise(rows)]
    assert trie.shared.tolist() == [0, *shared][: len(rows)]
    begins = [random.randint(0, len(row)) for row in rows]
    ends = [random.randint(begin, len(row)) for begin, row in zip(begins, rows, strict=True)]
    stretches = [np.array(depths, np.int64) for depths in (begins, ends)]
    found = trie.pieces(every, *stretches)
    nodes_of = np.split(expanded(found.node, found.length), np.cumsum(stretches[1] - stretches[0]))
    for row, begin, end, nodes in zip(rows, begins, ends, nodes_of[:-1], strict=True):
        assert nodes.tolist() == [number[row[:stop]] for stop in range(begin + 1, end + 1)]


@given(trajectory_lists(6))
@settings(max_examples=20)
def test_a_tree_with_duplicated_nodes_shares_less(trajectories):
    batch = pack_tree(trajectories, boundary="duplicate")
    statistics = batch.statistics()
    assert statistics.num_nodes == batch.num_nodes
    alone = sum(pack_tree([one], boundary="duplicate").num_nodes for one in trajectories)
    saved = statistics.shared_in_chains + statistics.shared_in_trajectories
    assert saved == statistics.num_tokens_turns - alone
    saved += statistics.shared_in_groups + statistics.shared_across_groups
    assert saved == statistics.num_tokens_turns - batch.num_nodes


def test_an_empty_batch_shares_nothing():
    statistics = pack_tree([]).statistics()
    routes = TokenField("routes", torch.uint8, (2,), generated_only=False)
    assert (statistics.num_nodes, pack_tree([], fields=[routes]).prefix_breaks()) == (0, ())
    assert (statistics.turns_ratio, statistics.merged_ratio) == (1.0, 1.0)
    silent = pack_tree([Trajectory("a", [Turn([1, 2], [], []), Turn([1, 2], [], [])])])
    assert silent.statistics().shared_in_chains == 2
