"""The trie of chains: a sort by bytes, the common prefix of neighbours, and where chains branch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

FIRST_PIECE = 256
"""Bytes of two chains that are compared at first; each further piece is twice as long."""


class Rows(NamedTuple):
    """Rows of a field that has one for each token of each chain."""

    memory: Bytes
    """Flat memory that holds the rows."""
    begins: Ints
    """``[chains]``: byte of each chain's first row; the others follow it."""
    row_bytes: int
    """Bytes of a row."""


class Branches(NamedTuple):
    """A trie whose nodes are numbered depth first, so that every subtree is an interval.

    Chains are sorted. The branch of a chain is the nodes that no chain before it has: its tokens
    from depth ``shared`` on, at consecutive nodes. It is empty where the chain is a repetition.
    """

    order: Ints
    """``[chains]``: chain of each branch."""
    shared: Ints
    """``[chains]``: first depth of each branch: tokens shared with the branch before."""
    first: Ints
    """``[chains]``: first node of each branch."""
    parent: Ints
    """``[chains]``: branch that holds the node before the first, or -1."""
    cuts: Ints
    """``[cuts, 3]``: stretches of nodes whose subtrees end at one node, in the order of nodes:
    branch, depth of the first node, end of the subtrees."""
    num_nodes: int
    """Number of nodes."""

    def node(self, branch: Ints, depth: Ints) -> Ints:
        """Return the nodes at ``depth`` of ``branch``."""
        return self.first[branch] + depth - self.shared[branch]

    def branch_of(self, chain: Ints) -> Ints:
        """Return the branches of chains: their places in depth-first order."""
        place = np.empty_like(self.order)
        place[self.order] = np.arange(len(place))
        return place[chain]

    def on_path(self, chain: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
        """Cut depths ``[begin, end)`` of chains where their paths change from branch to branch.

        Returns:
            Pieces as index of the given stretch, first depth and branch, in the order of the
            stretches and, within one, of depth. A stretch without depths has no piece.

        Cost: a pass over the stretches for each branch on the longest path.
        """
        index, branch = np.arange(len(chain)), self.branch_of(chain)
        found: list[Ints] = []
        while index.size:
            low = np.maximum(begin, self.shared[branch])
            has = low < end
            found.append(np.stack([index[has], low[has], branch[has]]))
            end = np.minimum(end, self.shared[branch])
            left = begin < end
            index, begin, end = index[left], begin[left], end[left]
            branch = self.parent[branch[left]]
        pieces = np.concatenate(found, 1) if found else np.zeros((3, 0), np.int64)
        if len(found) > 1:
            pieces = pieces[:, np.lexsort(pieces[1::-1])]
        index, depth, branch = pieces
        return index, depth, branch


def branches_of(
    words: npt.NDArray[np.int32],
    sources: Ints,
    lengths: Ints,
    rows: Sequence[Rows] = (),
    *,
    duplicate: bool = False,
) -> Branches:
    """Return the trie of chains: two tokens share a node if all before them are equal too.

    Args:
        words: Token ids.
        sources: ``[chains]``: first word of each chain.
        lengths: ``[chains]``: tokens of each chain, 1 or more.
        rows: Rows of fields; tokens are equal only if their rows are, bit for bit.
        duplicate: Whether tokens share a node only if those behind them are equal too, or neither
            has one: a node is then followed by one token only.

    Cost: chains that begin alike are copied twice, sorted by their bytes and compared with their
        neighbours; about a microsecond a chain.
    """
    width = 4 + sum(field.row_bytes for field in rows)
    order, begins, shared = _by_beginnings(words, sources, lengths, compared=not rows)
    for begin, end in begins.tolist():
        chains = order[begin:end].tolist()
        keys = _keys(
            words, sources[chains], lengths[chains], [of_chains(one, chains) for one in rows]
        )
        places = sorted(range(len(keys)), key=keys.__getitem__)
        order[begin:end] = order[begin:end][places]
        common = [_common(keys[one], keys[other]) // width for one, other in pairwise(places)]
        shared[begin + 1 : end] = common
    if duplicate:
        sizes = lengths[order]
        again = (shared == sizes) & (shared == np.append(0, sizes)[:-1])
        shared = np.where(again, shared, np.maximum(shared - 1, 0))
    ends = np.cumsum(lengths[order] - shared)
    first = np.append(0, ends)
    parent, cuts = _attach(shared.tolist(), lengths[order].tolist(), first.tolist())
    table = np.array(cuts, np.int64).reshape(-1, 3)
    table = table[np.argsort(first[table[:, 0]] + table[:, 1] - shared[table[:, 0]])]
    return Branches(order, shared, first[:-1], np.array(parent, np.int64), table, int(first[-1]))


def of_chains(rows: Rows, chains: list[int]) -> Rows:
    """Return the rows of some chains."""
    return rows._replace(begins=rows.begins[chains])


def _by_beginnings(
    words: npt.NDArray[np.int32], sources: Ints, lengths: Ints, *, compared: bool
) -> tuple[Ints, Ints, Ints]:
    """Sort chains by their first token, and by their second if two are ``compared``.

    Returns:
        The order; ``[n, 2]`` stretches of it in which chains begin alike; and how many tokens each
        chain shares with the one before it, where they do not begin alike.
    """
    head = words[sources].astype(np.int64)
    second = np.zeros_like(head)
    if compared:
        longer = lengths > 1
        second[longer] = words[sources[longer] + 1]
    order = np.argsort(head << 32 | second, kind="stable")
    head, second = head[order], second[order]
    same = head[1:] == head[:-1]
    alike = np.concatenate([[False], same & (second[1:] == second[:-1]), [False]])
    edges = np.flatnonzero(np.diff(alike.astype(np.int8)))
    begins = edges.reshape(-1, 2) + np.array([0, 1])
    return order, begins, np.append(0, same)[: order.size].astype(np.int64)


def _keys(
    words: npt.NDArray[np.int32], sources: Ints, lengths: Ints, rows: Sequence[Rows]
) -> list[bytes]:
    """Return bytes that compare as chains do: of each token, the most significant byte first."""
    bounds = zip(sources.tolist(), lengths.tolist(), strict=True)
    ids = [words[begin : begin + length].astype(">u4") for begin, length in bounds]
    if not rows:
        return [one.tobytes() for one in ids]
    keys = []
    for chain, one in enumerate(ids):
        parts = [one.view(np.uint8).reshape(-1, 4)]
        for memory, begins, row_bytes in rows:
            begin = int(begins[chain])
            raw = memory[begin : begin + len(one) * row_bytes]
            parts.append(raw.reshape(-1, row_bytes))
        keys.append(np.concatenate(parts, 1).tobytes())
    return keys


def _common(one: bytes, other: bytes) -> int:
    """Return how many bytes two keys have in common at their beginning."""
    begin, size, least = 0, FIRST_PIECE, min(len(one), len(other))
    while begin < least and one[begin : begin + size] == other[begin : begin + size]:
        begin, size = begin + size, 2 * size
    if begin >= least:
        return least
    count = min(size, least - begin)
    differ = np.frombuffer(one, np.uint8, count, begin) != np.frombuffer(
        other, np.uint8, count, begin
    )
    return begin + (int(differ.argmax()) if differ.any() else count)


def _attach(shared: list[int], lengths: list[int], first: list[int]) -> tuple[list[int], list[int]]:
    """Return the branch that each branch hangs on, and the numbers of `Branches.cuts`.

    The branches on the path of the newest chain lie on a stack. A new chain closes all branches
    that begin at the depth where it leaves the path, or deeper, and the rest of the branch
    that it leaves: their subtrees end at its first node. ``first`` ends with the number of nodes.
    """
    parent, cuts = [-1] * len(shared), list[int]()
    still_open, stack = list(lengths), list[int]()
    for branch, (depth, node) in enumerate(zip([*shared, 0], first, strict=True)):
        while stack and shared[stack[-1]] >= depth:
            left = stack.pop()
            if shared[left] < still_open[left]:
                cuts += (left, shared[left], node)
        if stack:
            parent[branch] = held = stack[-1]
            if depth < still_open[held]:
                cuts += (held, depth, node)
                still_open[held] = depth
        stack.append(branch)
    return parent, cuts
