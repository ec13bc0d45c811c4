"""Segments of a tree: stretches of nodes that are each other's only child, on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trajpack.packing.tree.plan import Chains
from trajpack.packing.tree.trie import Ints


class Segments(NamedTuple):
    """Segments in the order of their nodes; a path from a root is made of whole segments."""

    starts: Ints
    """``[segments + 1]``: first node of each, and the number of nodes."""
    parents: Ints
    """``[segments]``: segment that holds the node before the first, or -1."""
    depths: Ints
    """``[segments]``: depth of the first node."""

    def levels(self) -> Ints:
        """Return how many segments are above each."""
        levels = np.zeros_like(self.parents)
        for segment, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                levels[segment] = levels[parent] + 1
        return levels

    def paths(self) -> tuple[Ints, Ints]:
        """Return the nodes from a root to the end of each segment, one path behind another.

        Returns:
            The nodes, and ``[segments + 1]`` boundaries.

        Cost: the sum of the paths' lengths.
        """
        lengths = np.diff(self.starts)
        bounds = np.append(0, np.cumsum(self.depths + lengths))
        nodes = np.empty(bounds[-1], np.int64)
        own = np.arange(self.starts[-1])
        nodes[np.repeat(bounds[1:] - self.starts[1:], lengths) + own] = own
        for segment, parent in enumerate(self.parents.tolist()):
            if parent >= 0:  # whose path is as long as the segment is deep
                begin, above, depth = bounds[segment], bounds[parent], self.depths[segment]
                nodes[begin : begin + depth] = nodes[above : above + depth]
        return nodes, bounds


def segments_of(chains: Chains) -> Segments:
    """Return the segments of a tree; one ends where branches part, and where a branch ends.

    Cost: a few passes over the branches.
    """
    trie = chains.trie
    branch, depth, _ = trie.cuts.T
    starts = trie.node(branch, depth)
    holder = np.where(depth > trie.shared[branch], branch, trie.parent[branch])
    above = np.searchsorted(starts, trie.node(holder, depth - 1), side="right") - 1
    return Segments(np.append(starts, trie.num_nodes), np.where(holder < 0, -1, above), depth)


def expanded(begins: Ints, lengths: Ints) -> Ints:
    """Return the numbers from each begin on, as many as its length."""
    return np.repeat(begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
