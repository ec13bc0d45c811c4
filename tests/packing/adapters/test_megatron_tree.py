"""Trees for Megatron: attention and edges computed by the fields alone, on every rank.

No release has the class, so a few lines of plain torch read the fields as its description says.
"""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from tests.packing.adapters.test_trl_tree import trees_of
from tests.packing.tree.test_tree_models import branching
from trajpack import Trajectory, Turn, pack, pack_tree
from trajpack.packing.adapters.megatron import tree_packed_seq_params_kwargs, tree_rank_nodes
from trajpack.testing import trajectory_lists

SPLITS = st.tuples(st.integers(1, 4), st.integers(1, 5))
"""Context-parallel ranks, and what the padded row is a multiple of."""


def of_ranks(tree, split):
    """Return fields, nodes and options of every rank."""
    cp_size, multiple = split
    found = []
    for cp_rank in range(cp_size):
        options = {"cp_size": cp_size, "cp_rank": cp_rank, "multiple": multiple}
        given_fields = tree_packed_seq_params_kwargs(tree, **options)
        found.append((given_fields, tree_rank_nodes(tree, **options)))
    return found


def path_of(fields, segment):
    """Return the places from a root to the end of a segment."""
    path = []
    while segment >= 0:
        start = fields["tree_segment_starts"][segment]
        path = [*range(start, start + fields["tree_segment_lengths"][segment]), *path]
        segment = fields["tree_segment_parents"][segment]
    return path


def attended(fields, query, gathered):
    """Return the attention of a rank's queries, run by run, over keys of all ranks."""
    keys = gathered[fields["tree_cp_gather_inverse"]]
    out = torch.full_like(query, torch.nan)
    for run in fields["tree_query_runs"]:
        path = path_of(fields, run.segment_index)
        path = path[: path.index(run.global_end - 1) + 1]
        size = run.global_end - run.global_start
        assert len(run.local_indices) == size
        mask = torch.ones(size, len(path), dtype=torch.bool).tril(len(path) - size)
        scores = (query[run.local_indices] @ keys[path].T).masked_fill(~mask, -torch.inf)
        out[run.local_indices] = scores.softmax(-1) @ keys[path]
    return out


@given(
    trajectories=trajectory_lists(),
    split=SPLITS,
    boundary=st.sampled_from(["shared", "duplicate"]),
    cut=st.booleans(),
)
@settings(max_examples=40)
def test_ranks_attend_to_ancestors_and_select_the_parents_of_entries(
    trajectories, split, boundary, cut
):
    assume(trajectories)
    for tree in trees_of(pack_tree(trajectories, boundary=boundary), cut):
        check_ranks(tree, split)


def check_ranks(tree, split):
    ranks, real = of_ranks(tree, split), tree.chains.trie.num_nodes
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(tree.num_nodes + 1, 4, generator=generator, dtype=torch.float64)
    scores = (rows[:-1] @ rows[:-1].T).masked_fill(~tree.attention_mask()[0, 0], -torch.inf)
    expected = scores.softmax(-1) @ rows[:-1]
    gathered = torch.cat([rows[nodes] for _, nodes in ranks])
    selected = torch.full((tree.num_entries, 4), torch.nan, dtype=torch.float64)
    for fields, nodes in ranks:
        out = attended(fields, rows[nodes], gathered)
        assert not out.isnan().any(), "a token that no run computes"
        is_real = (nodes >= 0) & (nodes < real)  # padding depends on no other token
        torch.testing.assert_close(out[is_real], expected[nodes[is_real]])
        places = fields["tree_edge_output_indices"]
        selected[places] = out[fields["tree_edge_local_indices"][: len(places)]]
        assert fields["tree_edge_count"] == fields["tree_edge_padded_width"] == tree.num_entries
    torch.testing.assert_close(selected, expected[tree.entry_parent])


@given(trajectories=trajectory_lists(), split=SPLITS)
@settings(max_examples=20)
def test_each_node_is_on_one_rank_and_ranks_are_equally_long(trajectories, split):
    assume(trajectories)
    tree = pack_tree(trajectories)
    ranks = of_ranks(tree, split)
    cp_size, multiple = split
    every = torch.cat([nodes for _, nodes in ranks])
    assert sorted(every[every >= 0].tolist()) == [*range(tree.num_nodes)]
    unit = multiple if cp_size == 1 else np.lcm(multiple, 2 * cp_size)
    assert len(every) % unit == 0
    assert len(every) - tree.num_nodes < unit
    for fields, nodes in ranks:
        assert len(nodes) == len(every) // cp_size == fields["tree_cp_local_token_count"]
        positions = torch.where(nodes < 0, 0, tree.position_ids[nodes])
        assert torch.equal(fields["tree_local_position_ids"], positions)
        assert fields["cu_seqlens_q_padded"].tolist() == [0, len(every)]
        assert fields["max_seqlen_kv"] == int(tree.position_ids.max()) + 1


def test_the_fields_of_a_tree_have_the_proposed_names():
    batch = pack_tree(branching())
    alone = tree_packed_seq_params_kwargs(batch)
    assert set(alone) == {
        "qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded",
        "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv", "tree_segment_starts",
        "tree_segment_lengths", "tree_segment_parents", "tree_segment_depths", "tree_query_runs",
        "tree_local_position_ids", "tree_cp_gather_inverse", "tree_cp_local_token_count",
        "tree_edge_local_indices", "tree_edge_output_indices", "tree_edge_count",
        "tree_edge_padded_width",
    }  # fmt: skip
    starts, lengths = alone["tree_segment_starts"], alone["tree_segment_lengths"]
    assert all(type(number) is int for number in (*starts, *lengths, alone["max_seqlen_q"]))
    assert list(alone["tree_segment_depths"]) == batch.position_ids[list(starts)].tolist()


def test_a_rank_without_edges_has_one_place_and_no_output():
    batch = pack_tree([Trajectory("a", [Turn(range(8), [9], [-0.5])])])
    fields = tree_packed_seq_params_kwargs(batch, cp_size=2, cp_rank=0, multiple=16)
    assert fields["tree_edge_local_indices"].tolist() == [0]
    assert fields["tree_edge_output_indices"].tolist() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cp_size": 2, "cp_rank": 2}, r"cp_rank must be in \[0, cp_size\), got 2 of 2"),
        ({"cp_size": 0}, r"cp_rank must be in \[0, cp_size\), got 0 of 0"),
        ({"multiple": 0}, "multiple must be at least 1, got 0"),
    ],
)
def test_wrong_ranks_are_named(options, message):
    tree = pack_tree([Trajectory("a", [Turn([1], [2], [-0.5])])])
    for call in (tree_rank_nodes, tree_packed_seq_params_kwargs):
        with pytest.raises(ValueError, match=f"{call.__name__}: {message}"):
            call(tree, **options)
        with pytest.raises(ValueError, match="the tree must have nodes"):
            call(pack_tree([]))
        with pytest.raises(
            TypeError, match="tree must be a TreeBatch or TreeMicroBatch, got PackedBatch"
        ):
            call(pack([]))
