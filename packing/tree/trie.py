"""`Trie`: chains in depth-first order, and the nodes that their tokens share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]

FIRST = 256
"""Bytes of two chains that are compared as numbers."""


class Rows(NamedTuple):
    """Rows of a field that has one for each token of each chain."""

    memory: npt.NDArray[np.uint8]
    """Flat memory that holds the rows."""
    begins: Ints
    """``[chains]``: byte of each chain's first row; the others follow it."""
    row_bytes: int
    """Bytes of a row."""


class Pieces(NamedTuple):
    """Consecutive nodes on the paths of chains, int64 ``[pieces]`` each."""

    stretch: Ints
    """Which of the given stretches the piece belongs to; ascending."""
    depth: Ints
    """Depth of the first node; ascending within a stretch."""
    node: Ints
    """First node."""
    length: Ints
    """Number of nodes."""


class Segments(NamedTuple):
    """Stretches of nodes without branches, in the order of their nodes.

    One ends where chains part, and where a chain ends. A path from a root is made of whole ones.
    """

    starts: Ints
    """``[segments + 1]``: first node of each, and the number of nodes."""
    places: Ints
    """``[segments]``: place of a chain that goes through it."""
    depths: Ints
    """``[segments]``: depth of the first node."""
    ends: Ints
    """``[segments]``: first node behind the subtrees of the segment's nodes."""


@dataclass(frozen=True, eq=False)
class Trie:
    """Chains as a trie, whose nodes are numbered depth first: every subtree is an interval.

    Chains are sorted by their tokens; the place of a chain is its number in this order. A chain
    owns the nodes that no chain before it has: those from depth `shared` on, at consecutive nodes.
    """

    order: Ints
    """``[chains]``: chain at each place."""
    shared: Ints
    """``[chains]``: tokens that the chain at each place shares with the one before it."""
    lengths: Ints
    """``[chains]``: tokens of the chain at each place."""
    first: Ints
    """``[chains + 1]``: first node that each place owns, and the number of nodes."""
    parent: Ints
    """``[chains]``: place that owns the node before the first owned one, or -1."""
    segments: Segments

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return int(self.first[-1])

    @property
    def roots(self) -> Ints:
        """``[trees + 1]``: first node of each tree, and the number of nodes."""
        return np.append(self.first[:-1][self.shared == 0], self.num_nodes)

    @property
    def places(self) -> Ints:
        """``[chains]``: place of each chain."""
        places = np.empty_like(self.order)
        places[self.order] = np.arange(len(places))
        return places

    def node_at(self, place: Ints, depth: Ints) -> Ints:
        """Return the node at a depth on the path of each place."""
        place, above = place.copy(), np.flatnonzero(depth < self.shared[place])
        while above.size:
            place[above] = self.parent[place[above]]
            above = above[depth[above] < self.shared[place[above]]]
        return self.first[place] + depth - self.shared[place]

    def parents(self) -> Ints:
        """Return the node before the first of each segment, -1 at a root."""
        _, places, depths, _ = self.segments
        parents, inner = np.full_like(places, -1), np.flatnonzero(depths)
        parents[inner] = self.node_at(places[inner], depths[inner] - 1)
        return parents

    def pieces(self, place: Ints, begin: Ints, end: Ints) -> Pieces:
        """Return the nodes at depths ``[begin, end)`` on the path of each place."""
        index, found = np.arange(len(place)), list[Ints]()
        while index.size:
            shared = self.shared[place]
            low = np.maximum(begin, shared)
            own = np.stack([index, low, self.first[place] + low - shared, end - low])
            found.append(own[:, np.flatnonzero(low < end)])
            end = np.minimum(end, shared)
            left = np.flatnonzero(begin < end)
            index, begin, end = index[left], begin[left], end[left]
            place = self.parent[place[left]]
        pieces = np.concatenate(found[::-1], 1) if found else np.zeros((4, 0), np.int64)
        if len(found) > 1:  # each sorted by stretches, those nearer to the root first
            pieces = pieces[:, np.argsort(pieces[0], kind="stable")]
        return Pieces(*pieces)

    def part(self, begin: int, end: int) -> Trie:
        """Return the trie of the chains at places ``[begin, end)`` alone."""
        shared = self.shared[begin:end].copy()
        shared[:1] = 0
        return _trie(self.order[begin:end], shared, self.lengths[begin:end])


class Chains(NamedTuple):
    """Chains and turns of a tree on the host; a chain is a sequence of layout ``"merged"``."""

    trie: Trie
    """Trie of the chains."""
    place: Ints
    """``[turns]``: place of each turn's chain in the trie."""
    begin: Ints
    """``[turns]``: tokens of each turn's prompt, the depth of its first generated token."""
    end: Ints
    """``[turns]``: tokens of prompt and completion."""
    trajectory: Ints
    """``[turns]``: trajectory of each turn; ascending."""

    def generated(self) -> Pieces:
        """Return the nodes of what each turn generated; `Pieces.stretch` are turns."""
        return self.trie.pieces(self.place, self.begin, self.end)

    @property
    def num_trained(self) -> int:
        """Nodes that a turn generated."""
        generated = self.generated()
        begins, ends = union_of(generated.node, generated.node + generated.length)
        return int((ends - begins).sum())

    def turns_at(self, bounds: Ints) -> list[Ints]:
        """Return the turns whose chains are at places ``[begin, end)``, for each bound."""
        by_place = np.argsort(self.place, kind="stable")
        cuts = np.searchsorted(self.place[by_place], bounds)
        return [np.sort(by_place[low:high]) for low, high in cuts.tolist()]

    def part(self, begin: int, end: int, turns: Ints) -> Chains:
        """Return the chains at places ``[begin, end)`` alone; ``turns`` are theirs."""
        place, *others = (column[turns] for column in self[1:])
        return Chains(self.trie.part(begin, end), place - begin, *others)


def expanded(begins: Ints, lengths: Ints) -> Ints:
    """Return the numbers from each begin on, as many as its length."""
    return np.repeat(begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())


def trie_of(
    words: npt.NDArray[np.int32],
    sources: Ints,
    lengths: Ints,
    rows: Sequence[Rows] = (),
    *,
    duplicate: bool = False,
) -> Trie:
    """Return the trie of chains: two tokens share a node if all before them are equal too.

    Args:
        words: Token ids.
        sources: ``[chains]``: first word of each chain.
        lengths: ``[chains]``: tokens of each chain, 1 or more.
        rows: Rows of fields; tokens are equal only if their rows are, bit for bit.
        duplicate: Whether tokens share a node only if those behind them are equal too, or neither
            has one: a node is then followed by one token only.
    """
    order, shared = _sorted(words, sources, lengths, rows)
    sizes = lengths[order]
    if duplicate:  # without the last token, unless chains are equal
        are_equal = (shared == sizes) & (shared == np.append(0, sizes)[:-1])
        shared = np.where(are_equal, shared, np.maximum(shared - 1, 0))
    return _trie(order, shared, sizes)


def union_of(begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Join intervals that overlap or touch; return begins and ends in order."""
    both = np.sort(begins << 32 | ends)
    begins, ends = both >> 32, np.maximum.accumulate(both & 0xFFFFFFFF)
    opens = np.append(True, begins[1:] > ends[:-1])[: begins.size]
    return begins[opens], ends[np.append(opens[1:], True)[: ends.size]]


def _sorted(
    words: npt.NDArray[np.int32], sources: Ints, lengths: Ints, rows: Sequence[Rows]
) -> tuple[Ints, Ints]:
    """Sort chains by their tokens, and by their rows where tokens agree; equal ones stay in order.

    Returns:
        The chain at each place, and how many tokens it shares with the one before it.
    """
    columns = [_joined(words, sources, lengths).astype(">i4").view(np.uint8).reshape(-1, 4)]
    for memory, begins, size in rows:
        columns.append(_joined(memory, begins, lengths * size).reshape(-1, size))
    letters = np.concatenate(columns, 1) if rows else columns[0]
    bounds = pairwise(np.append(0, lengths.cumsum()).tolist())
    texts = [letters[begin:end].tobytes() for begin, end in bounds]  # they compare as numbers
    order = sorted(range(len(texts)), key=texts.__getitem__)
    agreed = [
        _common(texts[one], texts[other]) // letters.shape[1] for one, other in pairwise(order)
    ]
    return np.array(order, np.int64), np.array([0, *agreed][: len(order)], np.int64)


def _joined(memory: npt.NDArray[Any], begins: Ints, sizes: Ints) -> npt.NDArray[Any]:
    """Return stretches of a memory, one behind the other."""
    bounds = zip(begins.tolist(), (begins + sizes).tolist(), strict=True)
    return np.concatenate([memory[:0], *(memory[begin:end] for begin, end in bounds)])


def _common(one: bytes, other: bytes) -> int:
    """Return how many first bytes agree."""
    most = min(len(one), len(other))
    size = min(FIRST, most)
    differ = int.from_bytes(one[:size]) ^ int.from_bytes(other[:size])
    if differ or size == most:
        return size - (differ.bit_length() + 7) // 8
    differs = np.frombuffer(one[:most], np.uint8) != np.frombuffer(other[:most], np.uint8)
    return int(differs.argmax()) if differs.any() else most


def _trie(order: Ints, shared: Ints, lengths: Ints) -> Trie:
    """Return the trie of sorted chains, by how many tokens each shares with the one before it."""
    first = np.append(0, np.cumsum(lengths - shared))
    parent, behind, parts = _branches(shared)
    owns, cuts = np.flatnonzero(shared < lengths), np.flatnonzero(parts)
    cuts = cuts[shared[cuts] < lengths[parent[cuts]]]  # else the chain before it ends there
    places = np.append(owns, parent[cuts])
    depths = np.append(shared[owns], shared[cuts])
    ends = np.append(first[behind[owns]], first[cuts])
    starts = first[places] + depths - shared[places]
    by_node = np.argsort(starts, kind="stable")
    columns = (column[by_node] for column in (places, depths, ends))
    segments = Segments(np.append(starts[by_node], first[-1]), *columns)
    return Trie(order, shared, lengths, first, parent, segments)


def _branches(shared: Ints) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """Return for each place its parent, and the place behind the subtree of its first node.

    Also whether it is the first that parts from its parent at that depth.
    """
    count = len(shared)
    parent, behind, parts = [-1] * count, [count] * count, [False] * count
    above = list[tuple[int, int]]()  # places whose subtrees go on, and their depths, which rise
    for place, depth in enumerate(shared.tolist()):
        while above and above[-1][1] > depth:
            behind[above.pop()[0]] = place
        if above and above[-1][1] == depth:
            sibling, _ = above.pop()
            behind[sibling], parent[place] = place, parent[sibling]
        elif above:
            parent[place], parts[place] = above[-1][0], True
        above.append((place, depth))
    return np.array(parent, np.int64), np.array(behind, np.int64), np.array(parts, np.bool_)
