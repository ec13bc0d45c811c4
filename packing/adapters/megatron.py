"""Megatron-Core's ``PackedSeqParams``, and the ``TreePackedSeqParams`` of its next versions."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from trajpack.packing.adapters.trl_tree import check_tree
from trajpack.packing.conversion import sent
from trajpack.packing.optional import require
from trajpack.packing.rows.packed import Packed, places_of
from trajpack.packing.tree.nodes import TreeNodes
from trajpack.packing.tree.trie import Ints, expanded

Lengths = Literal["both", "padded"]


def packed_seq_params_kwargs(batch: Packed, *, lengths: Lengths = "both") -> dict[str, Any]:
    """Return the fields of a ``PackedSeqParams`` by their names in Megatron-Core.

    Keys, dtypes and shapes are those of ``docs/formats/megatron.md``.

    `to_packed_seq_params` omits what an older version of the class lacks. Fields about the ranks,
    ``cp_group`` and ``local_cp_size``, are for the caller. Sequences of a micro-batch must be
    multiples of twice the context-parallel ranks times the tensor-parallel ones.

    With ``lengths="padded"`` padded lengths stand for the true ones too, and ``pad_between_seqs``
    is False: for engines that treat padding as tokens.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> batch = pack([Trajectory(name, [Turn([1, 2], [3], [-0.5])]) for name in "ab"])
        >>> packed_seq_params_kwargs(batch)["cu_seqlens_q_padded"]
        tensor([0, 3, 6], dtype=torch.int32)
    """
    if lengths not in ("both", "padded"):
        raise ValueError(
            f"packed_seq_params_kwargs: lengths must be 'both' or 'padded', got {lengths!r}"
        )
    places = places_of(batch)
    sums = batch.cu_seqlens if lengths == "both" else places
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": sums,
        "cu_seqlens_kv": sums,
        "cu_seqlens_q_padded": places,
        "cu_seqlens_kv_padded": places,
        "max_seqlen_q": batch.max_seqlen,
        "max_seqlen_kv": batch.max_seqlen,
        "pad_between_seqs": sums is not places,
        "total_tokens": batch.num_tokens,
        "seq_idx": batch.sequence_ids[None],
    }


def to_packed_seq_params(batch: Packed, *, lengths: Lengths = "both") -> Any:
    """Return the ``PackedSeqParams`` of the installed Megatron-Core for the batch's tokens.

    The model takes it with ``input_ids[None]``, ``position_ids[None]`` and no attention mask. Has
    those fields of `packed_seq_params_kwargs` that the installed version has.
    """
    require("megatron")
    from megatron.core.packed_seq_params import PackedSeqParams

    fields = {field.name for field in dataclasses.fields(PackedSeqParams)}
    given = packed_seq_params_kwargs(batch, lengths=lengths)
    later = {name: given.pop(name) for name in ("total_tokens", "seq_idx")}
    params = PackedSeqParams(**{name: value for name, value in given.items() if name in fields})
    for name, value in later.items():
        if name in fields:
            setattr(params, name, value)
    return params


class TreeQueryRun(NamedTuple):
    """Consecutive nodes of one segment on one rank, with the fields of Megatron's own class.

    Attributes:
        segment_index: Segment of the nodes.
        global_start: Place of the first node in the whole row.
        global_end: Place behind the last.
        local_indices: int64: their places on the rank, consecutive.
    """

    segment_index: int
    global_start: int
    global_end: int
    local_indices: torch.Tensor


def tree_rank_nodes(
    tree: TreeNodes, *, cp_size: int = 1, cp_rank: int = 0, multiple: int = 1
) -> torch.Tensor:
    """Return the nodes whose tokens a context-parallel rank computes.

    The row of all nodes is padded at its end and cut into ``2 * cp_size`` chunks; a rank has the
    chunks ``cp_rank`` and ``2 * cp_size - cp_rank - 1``.

    Args:
        tree: A `TreeBatch` or `TreeMicroBatch`: trees of one row, padding of its own included.
        cp_size: Context-parallel ranks.
        cp_rank: This one.
        multiple: The padded row is a multiple of this, and of ``2 * cp_size`` if that is above 2.

    Returns:
        int64 ``[local]``: node at each place of the rank, -1 at padding; as an index, -1 takes the
        token of the last node.

    Raises:
        TypeError: If ``tree`` is no tree.
        ValueError: If it has no nodes, or ``cp_size``, ``cp_rank`` or ``multiple`` is out of range.

    Example:
        >>> from trajpack import Trajectory, Turn, pack_tree
        >>> turns = [Turn([1, 2], [3], [-0.5]), Turn([1, 2], [4, 5, 6], [-0.5] * 3)]
        >>> tree = pack_tree([Trajectory("a", turns)])
        >>> [tree_rank_nodes(tree, cp_size=2, cp_rank=rank).tolist() for rank in (0, 1)]
        [[0, 1, -1, -1], [2, 3, 4, 5]]
    """
    _, places = _ranks("tree_rank_nodes", tree, (cp_size, cp_rank), multiple)
    nodes = np.where(places[cp_rank] < tree.num_nodes, places[cp_rank], -1)
    return sent(nodes, tree.device)


def tree_packed_seq_params_kwargs(
    tree: TreeNodes, *, cp_size: int = 1, cp_rank: int = 0, multiple: int = 1
) -> dict[str, Any]:
    """Return the fields of a ``TreePackedSeqParams`` by their names in Megatron-Core.

    The class is proposed for Megatron-Core (pull request 7387, read 2026-11-24) and in no release:
    the tests compute attention and edges by these fields, not by the class.

    Keys, dtypes and shapes are those of ``docs/formats/megatron.md``.

    An edge is an entry of the tree: edge e predicts ``tree.entries.input_ids[e]``, and log-
    probabilities at ``tree_edge_output_indices`` go beside ``rollout_logprobs``, ``advantages`` and
    weights. A rank without edges has one local index, 0, and no output index. Padding is a segment
    of its own, a root.

    Args:
        tree: A `TreeBatch` or `TreeMicroBatch` with either ``boundary``: trees of one row. The
            rank's tokens are those of `tree_rank_nodes` of the same arguments.
        cp_size: Context-parallel ranks.
        cp_rank: This one.
        multiple: As of `tree_rank_nodes`; that of tensor-parallel ranks for sequence parallelism.

    Raises:
        TypeError: As `tree_rank_nodes`.
        ValueError: As `tree_rank_nodes`.
    """
    total, places = _ranks("tree_packed_seq_params_kwargs", tree, (cp_size, cp_rank), multiple)
    starts, parents, depths = tree.segments(total)
    local, own = np.full(total, -1, np.int64), places[cp_rank]
    local[own] = np.arange(own.size)
    longest = int(tree.chains.trie.lengths.max(initial=1))
    edges = local[_parents_of_entries(tree, starts, parents)]
    owned = np.flatnonzero(edges >= 0)
    nodes = tree_rank_nodes(tree, cp_size=cp_size, cp_rank=cp_rank, multiple=multiple)
    bounds = sent(np.array([0, total], np.int32), tree.device)
    own_edges = edges[owned] if owned.size else np.zeros(1, np.int64)
    return {
        "qkv_format": "thd",
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), bounds),
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), bounds),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), longest),
        "tree_segment_starts": tuple(starts[:-1].tolist()),
        "tree_segment_lengths": tuple(np.diff(starts).tolist()),
        "tree_segment_parents": tuple(parents.tolist()),
        "tree_segment_depths": tuple(depths.tolist()),
        "tree_query_runs": _query_runs(starts, own, sent(np.arange(own.size), tree.device)),
        "tree_local_position_ids": torch.where(nodes >= 0, tree.position_ids[nodes], 0),
        "tree_cp_gather_inverse": sent(np.argsort(places.reshape(-1)), tree.device),
        "tree_cp_local_token_count": own.size,
        "tree_edge_local_indices": sent(own_edges, tree.device),
        "tree_edge_output_indices": sent(owned, tree.device),
        "tree_edge_count": tree.num_entries,
        "tree_edge_padded_width": tree.num_entries,
    }


def _ranks(op: str, tree: TreeNodes, ranks: tuple[int, int], multiple: int) -> tuple[int, Ints]:
    """Check arguments; return the length of the padded row, and ``[cp_size, local]`` places."""
    cp_size, cp_rank = ranks
    check_tree(op, tree)
    if multiple < 1:
        raise ValueError(f"{op}: multiple must be at least 1, got {multiple}")
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"{op}: cp_rank must be in [0, cp_size), got {cp_rank} of {cp_size}")
    unit = multiple if cp_size == 1 else int(np.lcm(multiple, 2 * cp_size))
    total = -(-tree.num_nodes // unit) * unit
    if cp_size == 1:
        return total, np.arange(total)[None]
    chunks = np.arange(total).reshape(2 * cp_size, -1)
    return total, np.concatenate([chunks[:cp_size], chunks[cp_size:][::-1]], 1)


def _parents_of_entries(tree: TreeNodes, starts: Ints, parents: Ints) -> Ints:
    """Return `TreeBatch.entry_parent` on the host."""
    generated = tree.chains.generated()
    node = expanded(generated.node, generated.length)
    segment = np.searchsorted(starts, node, side="right") - 1
    return np.where(node == starts[segment], starts[parents[segment] + 1] - 1, node - 1)


def _query_runs(starts: Ints, own: Ints, local: torch.Tensor) -> tuple[TreeQueryRun, ...]:
    """Return the runs of a rank: where its places, ascending, are consecutive in a segment."""
    segment = np.searchsorted(starts, own, side="right") - 1
    opens = (np.diff(own, prepend=-2) != 1) | (np.diff(segment, prepend=-1) != 0)
    begins = np.flatnonzero(opens)
    ends = np.append(begins[1:], own.size)
    columns = (segment[begins], own[begins], own[ends - 1] + 1, begins, ends)
    return tuple(
        TreeQueryRun(number, start, end, local[first:last])
        for number, start, end, first, last in zip(*(c.tolist() for c in columns), strict=True)
    )
