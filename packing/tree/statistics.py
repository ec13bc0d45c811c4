"""`TreeStatistics`: what a tree shares, and between whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trajpack.packing.buffer.tables import number_groups
from trajpack.packing.tree.trie import Ints, Trie

if TYPE_CHECKING:
    from trajpack.packing.tree.tree_batch import TreeBatch


@dataclass(frozen=True)
class TreeStatistics:
    """Plain numbers about a `TreeBatch`.

    ``num_tokens_turns`` is ``num_tokens_merged + shared_in_chains``, and ``num_tokens_merged`` is
    ``num_nodes + shared_in_trajectories + shared_in_groups + shared_across_groups``.

    Attributes:
        num_chains: Sequences of layout ``"merged"``.
        num_entries: Generated tokens.
        num_tokens_turns: Tokens of layout ``"turns"``.
        num_tokens_merged: Tokens of layout ``"merged"``.
        shared_in_chains: Tokens saved where prompts repeat the turns before them; layout
            ``"merged"`` saves them.
        shared_in_trajectories: Tokens saved between chains of one trajectory: branches, attempts,
            broken prefixes.
        shared_in_groups: Tokens saved between trajectories of one group.
        shared_across_groups: Tokens saved between groups. A trajectory without a group is one of
            its own.
    """

    num_trees: int
    num_trajectories: int
    num_turns: int
    num_chains: int
    num_nodes: int
    num_entries: int
    num_tokens_turns: int
    num_tokens_merged: int
    shared_in_chains: int
    shared_in_trajectories: int
    shared_in_groups: int
    shared_across_groups: int

    @property
    def turns_ratio(self) -> float:
        """Tokens of layout ``"turns"`` by nodes; 1 for an empty batch."""
        return self.num_tokens_turns / self.num_nodes if self.num_nodes else 1.0

    @property
    def merged_ratio(self) -> float:
        """Tokens of layout ``"merged"`` by nodes; 1 for an empty batch."""
        return self.num_tokens_merged / self.num_nodes if self.num_nodes else 1.0


def statistics_of(tree: TreeBatch) -> TreeStatistics:
    """Implement `TreeBatch.statistics`."""
    trie, place, _, end, owner = tree.chains
    _, opening = np.unique(place, return_index=True)  # the first turn of each chain
    groups, _ = number_groups(tree.entries.groups)
    num_tokens, num_merged = int(end.sum()), int(trie.lengths.sum())
    in_trajectories = _num_distinct(trie, owner[opening])
    in_groups = _num_distinct(trie, groups.astype(np.int64)[owner[opening]])
    return TreeStatistics(
        num_trees=len(tree),
        num_trajectories=len(tree.entries.ids),
        num_turns=tree.num_turns,
        num_chains=len(opening),
        num_nodes=tree.num_nodes,
        num_entries=tree.num_entries,
        num_tokens_turns=num_tokens,
        num_tokens_merged=num_merged,
        shared_in_chains=num_tokens - num_merged,
        shared_in_trajectories=num_merged - in_trajectories,
        shared_in_groups=in_trajectories - in_groups,
        shared_across_groups=in_groups - tree.num_nodes,
    )


def _num_distinct(trie: Trie, owners: Ints) -> int:
    """Return the distinct nodes of each owner's chains, summed; ``owners`` are of each place."""
    zeros = np.zeros_like(trie.lengths)
    stretch, _, node, length = trie.pieces(np.arange(len(owners)), zeros, trie.lengths)
    key = owners[stretch] * trie.num_nodes + node  # pieces of a place begin at one node
    order = np.lexsort((length, key))
    return int(length[order][np.diff(key[order], append=-1) != 0].sum())
