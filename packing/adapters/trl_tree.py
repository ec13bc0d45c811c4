"""Trees as TRL's asynchronous trainer and the package ``tree-recurrence`` take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trajpack.packing.conversion import sent
from trajpack.packing.tree.nodes import TreeNodes
from trajpack.packing.tree.trie import Ints, expanded

PATHS = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
"""Keys of `to_tree_kwargs` that a row has too."""


def to_tree_kwargs(tree: TreeNodes) -> dict[str, Any]:
    """Return the arguments of a forward pass in which layers follow a tree, by TRL's names.

    TRL's attention ``"tree_fa3"`` reads the paths. The package ``tree-recurrence`` reads them too,
    for layers with a recurrent state or a convolution: ``tree_recurrence.install(model)``.

    A segment is a stretch of nodes without branches; the padding of a micro-batch is one too, a
    root. `boundary` may be either.

    Args:
        tree: A `TreeBatch` or `TreeMicroBatch`: trees of one row, as ``input_ids[None]`` and
            ``position_ids[None]``.

    Raises:
        TypeError: If ``tree`` is neither.
        ValueError: If it has no nodes.

    Example:
        >>> from trajpack import Trajectory, Turn, pack_tree
        >>> turns = [Turn([1, 2], [3], [-0.5]), Turn([1, 2], [4], [-0.5])]
        >>> found = to_tree_kwargs(pack_tree([Trajectory("a", turns)]))
        >>> found["tree_kv_index"], found["tree_cu_seqlens_k"]
        (tensor([0, 1, 0, 1, 2, 0, 1, 3]), tensor([0, 2, 5, 8], dtype=torch.int32))
    """
    check_tree("to_tree_kwargs", tree)
    starts, parents, depths = tree.segments()
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


def check_tree(op: str, tree: TreeNodes) -> None:
    """Raise unless ``tree`` is a tree batch, or a micro-batch of one, with nodes."""
    if not isinstance(tree, TreeNodes):
        raise TypeError(
            f"{op}: tree must be a TreeBatch or TreeMicroBatch, got {type(tree).__name__}"
        )
    if not tree.num_nodes:
        raise ValueError(f"{op}: the tree must have nodes, got none")


def row_of_tree(tree: TreeNodes, num_trained: torch.Tensor | None) -> dict[str, Any]:
    """Implement `trajpack.packing.adapters.trl.to_async_row` for a tree."""
    op = "to_async_row"
    if tree.advantages is None:
        raise ValueError(f"{op}: the batch has no advantages, call with_advantages first")
    if tree.boundary != "duplicate":
        raise ValueError(
            f"{op}: TRL takes one label a row, so a tree needs pack_tree(..., "
            f"boundary='duplicate'), got {tree.boundary!r}"
        )
    given = to_tree_kwargs(tree)
    order, place = _by_places(tree)
    entry = sent(order, tree.device)
    longest = [given["tree_max_seqlen_q"], given["tree_max_seqlen_k"]]
    total = torch.full((1,), float(tree.num_nodes), device=tree.device)
    generated = tree.generated
    counted = generated.loss_mask.sum() if num_trained is None else num_trained
    return {
        "input_ids": tree.input_ids[None],
        "position_ids": tree.position_ids[None],
        "shift_labels": tree.labels()[None],
        **{name: given[name][None] for name in PATHS},
        "tree_max_seqlens": sent(np.array([longest], np.int64), tree.device),
        "token_index": torch.where(generated.loss_mask, generated.predicted_by, -1)[entry][None],
        "old_log_probs": generated.rollout_logprobs[entry][None],
        "advantages": generated.advantages[entry][None],
        "segment_id": sent(place, tree.device)[None],
        "attention_mask": torch.ones_like(tree.input_ids)[None],
        "global_n_tokens": counted.reshape(1).float(),
        "global_n_forward_tokens": total,
        "mean_seq_len": total / max(len(tree.chains.trie.order), 1),
    }


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
