"""`Trie`: chains in depth-first order, and the nodes that their tokens share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]

FIRST_PIECE, GROWTH, LONGEST_PIECE = 4, 4, 4096
"""Entries of two chains that are compared at first; how much longer each further piece is; entries
of the longest."""
AT_ONCE = 1 << 17
"""Entries that are compared at once; they stay in the cache."""
MOST_KEYS = 1 << 62
"""Keys of a round of chains that fit an integer."""


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
    agreed: Ints
    """``[chains]``: `shared`, and a token more where that one is in two nodes; as `common`."""

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

    @cached_property
    def _least(self) -> Ints:
        return np.stack(_least(self.agreed, len(self.agreed)))

    def common(self, one: Ints, other: Ints) -> Ints:
        """Return how many tokens the chains at the places ``one`` and ``other`` agree in."""
        low, high = np.minimum(one, other), np.maximum(one, other)
        agreed = self.lengths[low]
        apart = np.flatnonzero(low < high)
        begin, end = low[apart] + 1, high[apart] + 1
        level = np.frexp(end - begin)[1] - 1  # of the largest power of two
        agreed[apart] = np.minimum(
            self._least[level, begin], self._least[level, end - (1 << level)]
        )
        return agreed

    def part(self, begin: int, end: int) -> Trie:
        """Return the trie of the chains at places ``[begin, end)`` alone."""
        places = slice(begin, end)
        agreed, shared = self.agreed[places].copy(), self.shared[places].copy()
        agreed[:1] = shared[:1] = 0
        return _trie(self.order[places], agreed, shared, self.lengths[places])


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
    order, agreed = _sorted(words, sources, lengths, rows)
    sizes, shared = lengths[order], agreed
    if duplicate:
        shared = without_last(agreed, sizes, np.append(0, sizes)[:-1])
    return _trie(order, agreed, shared, sizes)


def without_last(agreed: Ints, one: Ints, other: Ints) -> Ints:
    """Return how many nodes chains of these lengths share if each node has one token behind it."""
    return np.where((agreed == one) & (agreed == other), agreed, np.maximum(agreed - 1, 0))


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

    A group of chains that agree up to a depth is compared with one of them, the pivot. Chains that
    leave its path at the same token by the same token are a group of the next round, so a token is
    compared once.

    Returns:
        The chain at each place, and how many tokens it shares with the one before it.
    """
    order, agreed = np.arange(len(sources)), np.zeros(len(sources), np.int64)
    begins, ends, known = np.array([[0], [len(sources)], [0]])[:, : len(sources)]
    while begins.size:
        sizes = ends - begins
        at, group = expanded(begins, sizes), np.repeat(np.arange(sizes.size), sizes)
        chain, pivots, since = order[at], order[(begins + ends) // 2], known[group]
        pair = np.stack([chain, pivots[group]])
        first, length = sources[pair], lengths[pair]
        same = _common(words, first + since, np.minimum(*length) - since)
        for memory, begin, size in rows:
            same = _common(memory, begin[pair] + since * size, same * size) // size
        depth = since + same
        at_depth = [Rows(memory, begin[pair] + depth * size, size) for memory, begin, size in rows]
        letter, of_pivot = _letters(words, first + depth, depth < length, at_depth)
        # before the pivot: the earlier a chain leaves its path, the further; behind it likewise
        side, deepest = np.sign(letter - of_pivot), int(same.max())
        key = group * (2 * deepest + 3) + side * (deepest + 1 - same)
        width, bits = int(letter.max()) + 2, key.size.bit_length()
        if sizes.size * (2 * deepest + 3) * width << bits < MOST_KEYS:  # numbers, half the time
            member = np.arange(key.size)
            moved = np.sort((key * width + letter) << bits | member) & ((1 << bits) - 1)
        else:
            moved = np.lexsort((letter, key))
        key, depth, letter, side = key[moved], depth[moved], letter[moved], side[moved]
        order[at] = chain[moved]
        inner = np.flatnonzero(group[1:] == group[:-1]) + 1
        agreed[at[inner]] = np.minimum(depth[inner], depth[inner - 1])
        opens = np.append(True, (key[1:] != key[:-1]) | (letter[1:] != letter[:-1]))
        heads = np.flatnonzero(opens)
        sizes = np.diff(heads, append=key.size)
        goes_on = (sizes > 1) & (side[heads] != 0) & (letter[heads] >= 0)
        heads, sizes = heads[goes_on], sizes[goes_on]
        begins, known = at[heads], depth[heads] + 1
        ends = begins + sizes
    return order, agreed


def _letters(
    words: npt.NDArray[np.int32], places: Ints, is_token: npt.NDArray[Any], rows: Sequence[Rows]
) -> Ints:
    """Return numbers that compare as the tokens at places do, with their rows; -1 for no token."""
    letters = np.where(is_token, words.take(places, mode="clip"), np.int64(-1))
    if rows and is_token.any():
        parts = [letters[is_token].astype(">u4")[:, None].view(np.uint8)]
        parts += [_windows(memory, begin[is_token], size) for memory, begin, size in rows]
        raw = np.concatenate(parts, 1)
        letters[is_token] = np.unique(raw.view(f"S{raw.shape[1]}"), return_inverse=True)[1].ravel()
    return letters


def _common(memory: npt.NDArray[Any], pair: Ints, limit: Ints) -> Ints:
    """Return how many entries agree from both places of each pair on, up to ``limit``."""
    one, other = pair
    found, size = np.where(one == other, limit, 0), FIRST_PIECE
    first = memory.take(pair, mode="clip")
    left = np.flatnonzero((first[0] == first[1]) & (found < limit))
    while left.size:
        step, goes_on = max(AT_ONCE // size, 1), list[Ints]()
        for begin in range(0, left.size, step):
            some = left[begin : begin + step]
            agreed = found[some]
            differ = _windows(memory, one[some] + agreed, size) != _windows(
                memory, other[some] + agreed, size
            )
            place = differ.argmax(1)
            same = np.where(differ[np.arange(some.size), place], place, size)
            found[some] = np.minimum(agreed + same, limit[some])
            goes_on.append(some[(same == size) & (found[some] < limit[some])])
        left, size = np.concatenate(goes_on), min(size * GROWTH, LONGEST_PIECE)
    return found


def _windows(memory: npt.NDArray[Any], begins: Ints, size: int) -> npt.NDArray[Any]:
    """Return ``[begins, size]`` entries; those behind the end of the memory are any."""
    if begins.max(initial=0) + size > len(memory):
        return memory.take(begins[:, None] + np.arange(size), mode="clip")
    shape = (len(memory) - size + 1, size)  # overlapping rows of the memory
    return np.ndarray(shape, memory.dtype, memory, strides=memory.strides * 2)[begins]


def _trie(order: Ints, agreed: Ints, shared: Ints, lengths: Ints) -> Trie:
    """Return the trie of sorted chains, by how many tokens each shares with the one before it."""
    first = np.append(0, np.cumsum(lengths - shared))
    most = int(np.diff(np.flatnonzero(shared == 0), append=len(shared)).max(initial=1))
    before = _earlier(shared, most)  # where each chain parts from, or a chain that parts there
    behind = len(shared) - _earlier(np.append(shared, 0)[::-1], most)[::-1]
    parts = shared > shared[before]
    parent = np.where(shared > 0, before, -1)
    again = np.flatnonzero(~parts & (shared > 0))
    while again.size:
        parent[again] = parent[parent[again]]
        again = again[shared[parent[again]] == shared[again]]
    owns, cuts = np.flatnonzero(shared < lengths), np.flatnonzero(parts)
    cuts = cuts[shared[cuts] < lengths[parent[cuts]]]  # else the chain before it ends there
    places = np.append(owns, parent[cuts])
    depths = np.append(shared[owns], shared[cuts])
    ends = np.append(first[behind[owns]], first[cuts])
    starts = first[places] + depths - shared[places]
    by_node = np.argsort(starts, kind="stable")
    columns = (column[by_node] for column in (places, depths, ends))
    segments = Segments(np.append(starts[by_node], first[-1]), *columns)
    return Trie(order, shared, lengths, first, parent, segments, agreed)


def _earlier(values: Ints, most: int) -> Ints:
    """Return the latest place before each whose value is not larger; the first has itself.

    The first value is one of the smallest. No value is larger than the `most` values before it.
    """
    before = np.maximum(np.arange(len(values)) - 1, 0)
    left = np.flatnonzero(values[:-1] > values[1:]) + 1
    if left.size:
        own, end = values[left], left.copy()  # all from `end` on up to the place are larger
        for level, least in reversed([*enumerate(_least(values, most))]):
            low = end - (1 << level)
            end = np.where((low >= 0) & (least[low] > own), low, end)
        before[left] = end - 1
    return before


def _least(values: Ints, most: int) -> list[Ints]:
    """Return for each level up to ``most`` the least of ``2**level`` values from each one on."""
    least, size = [values], 1
    while 2 * size <= most:
        last = least[-1].copy()
        last[:-size] = np.minimum(last[:-size], last[size:])
        least.append(last)
        size *= 2
    return least
