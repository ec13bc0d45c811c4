"""`Paths`: the chains of a trie in depth-first order, and how many tokens two of them share."""

from __future__ import annotations

import numpy as np

from trajpack.packing.tree.trie import Branches, Ints


class Paths:
    """Paths of the chains of a trie; a path is named by the branch of its chain.

    Args:
        trie: The trie.

    Cost: a table of the branches, times the logarithm of their number.

    Example:
        >>> from trajpack.packing.tree.trie import branches_of
        >>> words = np.array([1, 2, 1, 3, 4], np.int32)  # chains 1 2 and 1 3 4
        >>> paths = Paths(branches_of(words, np.array([0, 2]), np.array([2, 3])))
        >>> paths.lengths, paths.common(np.array([0, 1]), np.array([1, 1]))
        (array([2, 3]), array([1, 3]))
    """

    def __init__(self, trie: Branches) -> None:
        self.trie = trie
        self.lengths = trie.shared + np.diff(trie.first, append=trie.num_nodes)
        """``[branches]``: tokens of each path."""
        least, size = [trie.shared], 1
        while 2 * size <= len(trie.shared):
            last = least[-1].copy()
            last[:-size] = np.minimum(last[:-size], last[size:])
            least.append(last)
            size *= 2
        self._least = np.stack(least)
        """``[level, branch]``: least tokens that one of the ``2**level`` branches from this one on
        shares with the branch before it."""

    def common(self, one: Ints, other: Ints) -> Ints:
        """Return how many tokens each path of ``one`` shares with that of ``other``."""
        low, high = np.minimum(one, other), np.maximum(one, other)
        shared = self.lengths[low]
        apart = np.flatnonzero(low < high)
        begin, end = low[apart] + 1, high[apart] + 1
        level = np.frexp(end - begin)[1] - 1  # of the largest power of two
        last = end - (1 << level)
        shared[apart] = np.minimum(self._least[level, begin], self._least[level, last])
        return shared

    def num_distinct(self, owners: Ints) -> int:
        """Return the distinct nodes on the paths of each owner, summed over owners.

        Args:
            owners: ``[branches]``: owner of each path.
        """
        order = np.argsort(owners, kind="stable")
        shared = self.common(order[:-1], order[1:])
        return int(self.lengths.sum() - shared[np.diff(owners[order]) == 0].sum())

    def nodes(self, branches: Ints, begin: Ints, end: Ints) -> list[Ints]:
        """Return the nodes at depths ``[begin, end)`` of each path.

        Cost: as `Branches.on_path`.
        """
        path, depth, branch = self.trie.on_path(self.trie.order[branches], begin, end)
        last = np.append(path[1:] != path[:-1], True)[: path.size]
        stop = np.where(last, end[path], np.append(depth[1:], 0)[: path.size])
        node, length = self.trie.node(branch, depth), stop - depth
        nodes = np.repeat(node - (np.cumsum(length) - length), length) + np.arange(length.sum())
        return np.split(nodes, np.cumsum(end - begin))[:-1]
