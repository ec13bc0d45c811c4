"""Trees as TRL's asynchronous trainer and the package ``tree-recurrence`` take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trajpack.packing.rows.packed import advantages_of
from trajpack.packing.tree.segments import expanded, segments_of
from trajpack.packing.tree.tree_batch import TreeBatch
from trajpack.packing.tree.trie import Ints

PATHS = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
"""Keys of `to_tree_kwargs` that a row has too."""


def to_tree_kwargs(tree: TreeBatch) -> dict[str, Any]:
    """Return the arguments of a forward pass in which layers follow a tree, by TRL's names.

    TRL's attention ``"tree_fa3"`` reads the first five. The package ``tree-recurrence`` reads them
    too, for layers with a recurrent state or a convolution: ``tree_recurrence.install(model)``.

    ==================================== ===== ===== ===============================================
    key                                  dtype shape content
    ==================================== ===== ===== ===============================================
    tree_kv_index                        int64 [K]   nodes from a root to the end of each segment,
                                                     one path behind another
    tree_cu_seqlens_q                    int32 [S+1] boundaries of the segments
    tree_cu_seqlens_k                    int32 [S+1] boundaries of the paths
    tree_max_seqlen_q, tree_max_seqlen_k int         longest segment, longest path
    tree_segment_parents                 int64 [S]   segment before each, -1 at a root
    tree_segment_depths                  int64 [S]   segments above each
    ==================================== ===== ===== ===============================================

    A segment is a stretch of nodes without branches. `boundary` may be either.

    Args:
        tree: Trees of one row, as ``input_ids[None]`` and ``position_ids[None]``.

    Raises:
        TypeError: If ``tree`` is no `TreeBatch`.
        ValueError: If it has no nodes.

    Cost: computed on the host from the plan, without a look at the device: the sum of all paths,
    which is quadratic in the branches of a trunk; one copy for each tensor.

    Example:
        >>> from trajpack import Trajectory, Turn, pack_tree
        >>> turns = [Turn([1, 2], [3], [-0.5]), Turn([1, 2], [4], [-0.5])]
        >>> found = to_tree_kwargs(pack_tree([Trajectory("a", turns)]))
        >>> found["tree_kv_index"], found["tree_cu_seqlens_k"]
        (tensor([0, 1, 0, 1, 2, 0, 1, 3]), tensor([0, 2, 5, 8], dtype=torch.int32))
    """
    if not isinstance(tree, TreeBatch):
        raise TypeError(f"to_tree_kwargs: tree must be a TreeBatch, got {type(tree).__name__}")
    if not tree.num_nodes:
        raise ValueError("to_tree_kwargs: the tree must have nodes, got none")
    segments = segments_of(tree.chains)
    paths, bounds = segments.paths()
    return {
        "tree_kv_index": _sent(paths, tree),
        "tree_cu_seqlens_q": _sent(segments.starts.astype(np.int32), tree),
        "tree_cu_seqlens_k": _sent(bounds.astype(np.int32), tree),
        "tree_max_seqlen_q": int(np.diff(segments.starts).max()),
        "tree_max_seqlen_k": int(np.diff(bounds).max()),
        "tree_segment_parents": _sent(segments.parents, tree),
        "tree_segment_depths": _sent(segments.levels(), tree),
    }


def row_of_tree(tree: TreeBatch, num_trained: torch.Tensor | None) -> dict[str, Any]:
    """Implement `trajpack.packing.adapters.trl.to_async_row` for a tree."""
    op = "to_async_row"
    advantages = advantages_of(op, tree.entries)
    if tree.boundary != "duplicate":
        raise ValueError(
            f"{op}: TRL takes one label a row, so a tree needs pack_tree(..., "
            f"boundary='duplicate'), got {tree.boundary!r}"
        )
    given = to_tree_kwargs(tree)
    order, row = _by_rows(tree)
    entry = _sent(order, tree)
    num_rows = len(tree.chains.trie.order)
    longest = [given["tree_max_seqlen_q"], given["tree_max_seqlen_k"]]
    total = torch.full((1,), float(tree.num_nodes), device=tree.device)
    counted = torch.full((1,), float(tree.num_entries), device=tree.device)
    return {
        "input_ids": tree.input_ids[None],
        "position_ids": tree.position_ids[None],
        "shift_labels": tree.labels()[None],
        **{name: given[name][None] for name in PATHS},
        "tree_max_seqlens": torch.tensor([longest], device=tree.device),
        "token_index": tree.entry_parent[entry][None],
        "old_log_probs": tree.rollout_logprobs[entry][None],
        "advantages": advantages[entry][None],
        "segment_id": _sent(row, tree)[None],
        "attention_mask": torch.ones_like(tree.input_ids)[None],
        "global_n_tokens": counted if num_trained is None else num_trained.reshape(1).float(),
        "global_n_forward_tokens": total,
        "mean_seq_len": total / num_rows,
    }


def _by_rows(tree: TreeBatch) -> tuple[Ints, Ints]:
    """Return the entries in the order of the rows, depth first, and the row of each."""
    branch = tree.chains.turn_branch
    sizes = np.array(tree.entries.seqlens, np.int64)
    order = np.argsort(branch, kind="stable")
    first = np.cumsum(sizes) - sizes
    return expanded(first[order], sizes[order]), np.repeat(branch[order], sizes[order])


def _sent(numbers: Ints, tree: TreeBatch) -> torch.Tensor:
    """Copy an array to the device of a tree."""
    return torch.from_numpy(numbers).to(tree.device, non_blocking=True)
