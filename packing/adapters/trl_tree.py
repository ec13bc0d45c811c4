"""Trees as TRL's asynchronous trainer and the package ``tree-recurrence`` take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trajpack.packing.conversion import sent
from trajpack.packing.rows import layout
from trajpack.packing.tree.nodes import TreeNodes
from trajpack.packing.tree.trie import Ints, expanded

PATHS = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
"""Keys of `to_tree_kwargs` that a row has too."""


def to_tree_kwargs(tree: TreeNodes) -> dict[str, Any]:
    """Return the arguments of a forward pass in which layers follow a tree, by TRL's names.

    TRL's attention ``"tree_fa3"`` reads the paths. The package ``tree-recurrence`` reads them too,
    for layers with a recurrent state or a convolution: ``tree_recurrence.install(model)``.

    A segment is a stretch of nodes without branches; the padding of a micro-batch is one too, a
    root. ``tree`` is a `TreeBatch` or `TreeMicroBatch` with either `boundary`, else it is a
    `TypeError`; without nodes it is a `ValueError`.

    Example:
        >>> from trajpack import Trajectory, Turn, pack_tree
        >>> turns = [Turn([1, 2], [3], [-0.5]), Turn([1, 2], [4], [-0.5])]
        >>> found = to_tree_kwargs(pack_tree([Trajectory("a", turns)]))
        >>> found["tree_kv_index"], found["tree_cu_seqlens_k"]
        (tensor([0, 1, 0, 1, 2, 0, 1, 3]), tensor([0, 2, 5, 8], dtype=torch.int32))
    """
    if not isinstance(tree, TreeNodes):
        raise TypeError(
            f"to_tree_kwargs: tree must be a TreeBatch or TreeMicroBatch, got {type(tree).__name__}"
        )
    if not tree.num_nodes:
        raise ValueError("to_tree_kwargs: the tree must have nodes, got none")
    starts, parents, depths = _segments(tree)
    paths, bounds = _paths(starts, parents, depths)
    levels = np.zeros_like(parents)
    for segment, parent in enumerate(parents.tolist()):
        levels[segment] = levels[parent] + 1 if parent >= 0 else 0
    return {
        "tree_kv_index": sent(paths, tree.device),
        "tree_cu_seqlens_q": sent(starts.astype(np.int32), tree.device),
        "tree_cu_seqlens_k": sent(bounds.astype(np.int32), tree.device),
        "tree_max_seqlen_q": int(np.diff(starts).max()),
        "tree_max_seqlen_k": int(np.diff(bounds).max()),
        "tree_segment_parents": sent(parents, tree.device),
        "tree_segment_depths": sent(levels, tree.device),
    }


def columns_of_tree(op: str, tree: TreeNodes) -> tuple[dict[str, torch.Tensor], torch.Tensor, int]:
    """Return what `to_async_row` has of a tree, the order of its entries, its sequences' number."""
    layout.advantages_of(op, tree)
    if tree.boundary != "duplicate":
        raise ValueError(
            f"{op}: TRL takes one label a row, so a tree needs pack_tree(..., "
            f"boundary='duplicate'), got {tree.boundary!r}"
        )
    given = to_tree_kwargs(tree)
    order, place = _by_places(tree)
    longest = np.array([given["tree_max_seqlen_q"], given["tree_max_seqlen_k"]], np.int64)
    columns = {
        "shift_labels": tree.labels(),
        **{name: given[name] for name in PATHS},
        "tree_max_seqlens": sent(longest, tree.device),
        "segment_id": sent(place, tree.device),
    }
    return columns, sent(order, tree.device), len(tree.chains.trie.order)


def _segments(tree: TreeNodes) -> tuple[Ints, Ints, Ints]:
    """Return first nodes, parents and depths of the segments; padding is the last, a root."""
    trie = tree.chains.trie
    starts, _, depths, _ = trie.segments
    parents = np.searchsorted(starts, trie.parents(), side="right") - 1
    if tree.num_nodes == trie.num_nodes:
        return starts, parents, depths
    return np.append(starts, tree.num_nodes), np.append(parents, -1), np.append(depths, 0)


def _paths(starts: Ints, parents: Ints, depths: Ints) -> tuple[Ints, Ints]:
    """Return the nodes from a root to the end of each segment, and the boundaries of the paths."""
    lengths = np.diff(starts)
    bounds = np.append(0, np.cumsum(depths + lengths))
    nodes = np.empty(bounds[-1], np.int64)
    own = np.arange(starts[-1])
    nodes[np.repeat(bounds[1:] - starts[1:], lengths) + own] = own
    for segment, parent in enumerate(parents.tolist()):
        if parent >= 0:  # whose path is as long as the segment is deep
            begin, above, depth = bounds[segment], bounds[parent], depths[segment]
            nodes[begin : begin + depth] = nodes[above : above + depth]
    return nodes, bounds


def _by_places(tree: TreeNodes) -> tuple[Ints, Ints]:
    """Return the entries in the order of their chains, depth first, and the place of each."""
    chains = tree.chains
    sizes = chains.end - chains.begin
    order = np.argsort(chains.place, kind="stable")
    first = np.cumsum(sizes) - sizes
    return expanded(first[order], sizes[order]), np.repeat(chains.place[order], sizes[order])
