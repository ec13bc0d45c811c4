"""With ``boundary="duplicate"`` each node is followed by one token, its label."""

import torch
from hypothesis import given, settings, strategies as st

from tests.packing.tree import tree_oracle as oracle
from tests.packing.tree.test_tree import ROUTES, VALUES, assert_trees_equal, with_fields
from tests.ptx.executor import on_executor
from trajpack import (
    GRPO,
    Trajectory,
    TrajectoryBuffer,
    Turn,
    load_tree,
    pack,
    pack_tree,
    save,
)
from trajpack.testing import assert_batches_equal, trajectory_lists

END = -1
"""Stands for the token behind the last one of a sequence."""


def duplicated(trajectories, **options):
    return pack_tree(trajectories, boundary="duplicate", **options)


def keyed(tokens):
    """Return each token with the one behind it."""
    return tuple(zip(tokens, [*tokens[1:], END], strict=True))


def keyed_paths_of(batch):
    """Return the same from the root to each node; raise if two tokens are behind a node."""
    following = dict.fromkeys(range(batch.num_nodes), END)
    for token, parent in zip(batch.input_ids.tolist(), batch.tree_parent.tolist(), strict=True):
        if parent >= 0:
            assert following[parent] in (END, token)
            following[parent] = token
    return [
        tuple(zip(path, [*path[1:], following[node]], strict=True))
        for node, path in enumerate(oracle.paths_of(batch))
    ]


@given(trajectory_lists())
def test_nodes_are_the_distinct_prefixes_of_tokens_with_the_token_behind(trajectories):
    batch = duplicated(trajectories)
    rows = [row.tolist() for row in pack(trajectories).input_ids.split(pack(trajectories).seqlens)]
    expected = {keyed(row)[:end] for row in rows for end in range(1, len(row) + 1)}
    assert keyed_paths_of(batch) == sorted(expected)
    assert batch.position_ids.tolist() == [len(path) - 1 for path in sorted(expected)]
    mask = oracle.mask_of(batch)
    paths = keyed_paths_of(batch)
    assert mask.tolist() == [[query[: len(key)] == key for key in paths] for query in paths]


@given(trajectory_lists())
def test_entries_lie_on_their_tokens_and_their_parents_are_labelled(trajectories):
    batch = duplicated(trajectories)
    paths, labels = oracle.paths_of(batch), batch.labels(-7)
    assert [paths[node] for node in batch.entry_node.tolist()] == oracle.entries(trajectories)
    assert torch.equal(labels[batch.entry_parent], batch.entries.input_ids)
    assert set((labels != -7).nonzero()[:, 0].tolist()) == set(batch.entry_parent.tolist())
    assert torch.equal(batch.loss_mask.nonzero()[:, 0], batch.entry_node.unique())
    prompts = [tuple(turn.prompt_ids) for turn in oracle.turns_of(trajectories)]
    assert [paths[node] for node in batch.turn_prompt_node.tolist()] == prompts


@given(trajectory_lists(3), st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=20)
def test_it_holds_what_the_merged_layout_holds(trajectories, random, has_fields):
    options = {"fields": [VALUES, ROUTES]} if has_fields else {}
    given_turns = with_fields(trajectories, random) if has_fields else trajectories
    batch = duplicated(given_turns, **options)
    assert batch.unpack() == given_turns
    merged = pack(given_turns, **options)
    assert_batches_equal(batch.merged(), merged)
    buffer = TrajectoryBuffer(**options)
    buffer.extend(given_turns)
    assert_trees_equal(pack_tree(buffer, boundary="duplicate"), batch)
    for row, place in zip(merged.input_ids.split(merged.seqlens), tips(batch), strict=True):
        path = [place, *ancestors(batch, place)][::-1]
        assert batch.input_ids[path].tolist() == row.tolist()


def tips(batch):
    """Return the last node of each row."""
    found = {}
    bounds, prompts = batch.entries.cu_generated.tolist(), batch.turn_prompt_node.tolist()
    for turn, row in enumerate(batch.entries.turn_sequence.tolist()):
        silent = bounds[turn] == bounds[turn + 1]
        last = prompts[turn] if silent else int(batch.entry_node[bounds[turn + 1] - 1])
        found[row] = max(last, found.get(row, -1))
    return [found[row] for row in sorted(found)]


def ancestors(batch, node):
    parents = batch.tree_parent.tolist()
    while parents[node] >= 0:
        node = parents[node]
        yield node


@given(trajectories=trajectory_lists())
@settings(max_examples=10)
def test_files_and_the_kernel_give_the_same_bits(trajectories, tmp_path_factory):
    path = tmp_path_factory.mktemp("tree") / "tree.safetensors"
    batch = duplicated(trajectories, impl="torch")
    save(batch, path)
    assert_trees_equal(load_tree(path), batch)
    with on_executor():
        assert_trees_equal(duplicated(trajectories, impl="triton"), batch)


def test_advantages_and_loss_weights_are_those_of_shared_nodes():
    turns = [Turn([1, 2], [3, 4], [-0.5] * 2, 1.0), Turn([1, 2], [3, 5, 6], [-0.25] * 3)]
    trajectories = [Trajectory(str(n), [turn], "g") for n, turn in enumerate(turns)]
    one = pack_tree(trajectories).with_advantages(GRPO())
    other = duplicated(trajectories).with_advantages(GRPO())
    assert torch.equal(one.advantages, other.advantages)
    for batch in (one, other):
        assert torch.equal(batch.loss_weights("token_mean"), torch.full((5,), 0.2))
