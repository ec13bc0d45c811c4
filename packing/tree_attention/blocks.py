"""Blocks of queries of a tree, and the parts of their keys: the plan of attention along paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Span: TypeAlias = tuple[int, int]
"""First node of some that follow each other, and the node behind the last."""
Depths: TypeAlias = npt.NDArray[np.integer[Any]]
MOST_QUERIES = 512
"""Queries of a block that has a mask, or a window."""
LEAST_QUERIES = 64
"""Queries of a block in a smaller window, if the run has as many."""
PAIRS_OF_CALL = 2**15
"""Pairs of a query and a key of one head that cost about as much as one call (measured)."""
PAIRS_OF_ROW = 32
"""Pairs of a query and a key that cost about as much as gathering one node's key and value."""


class Part(NamedTuple):
    """Keys that a block of queries attends to in one call."""

    spans: tuple[Span, ...]
    """Nodes of the keys. Several spans are gathered."""
    kind: Literal["all", "causal", "masked"]
    """Whether each query attends to all keys, to those up to its own place, or to some."""

    @property
    def num_keys(self) -> int:
        """Nodes of all spans."""
        return sum(end - begin for begin, end in self.spans)

    @property
    def gathered(self) -> int:
        """Rows of keys, and of values, that are copied for the call."""
        return self.num_keys if len(self.spans) > 1 else 0


class Block(NamedTuple):
    """Consecutive queries, and the parts of their keys."""

    begin: int
    end: int
    parts: tuple[Part, ...]

    def pairs(self) -> int:
        """Return the pairs of a query and a key that are computed."""
        size = self.end - self.begin
        return sum(
            size * (size + 1) // 2 if part.kind == "causal" else size * part.num_keys
            for part in self.parts
        )

    def cost(self, heads: int) -> float:
        """Return the work of the block, in pairs of all heads."""
        gathered = sum(part.gathered for part in self.parts)
        return self.pairs() + PAIRS_OF_ROW * gathered + PAIRS_OF_CALL / heads * len(self.parts)


class Stretch(NamedTuple):
    """Consecutive nodes, and the path from the root to the first of them."""

    begin: int
    end: int
    lowest: int
    """Least depth of the nodes."""
    highest: int
    """Greatest depth of the nodes."""
    is_run: bool
    """Whether each node is the parent of the next."""
    path: tuple[Span, ...]
    """Ancestors of the first node, from the root on."""

    def block(self, window: int | None) -> Block:
        """Return the block of the nodes, in a window of so many depths."""
        first = whole = 0  # first depth that one of the queries sees, and that all of them see
        if window is not None:
            first = max(self.lowest - window + 1, 0)
            whole = min(max(self.highest - window + 1, 0), self.lowest)
        own = ((self.begin, self.end),)
        some = between(self.path, first, whole)
        parts = list[Part]()
        if self.is_run and (window is None or self.end - self.begin <= window):
            parts.append(Part(own, "causal"))
        else:
            some += between(self.path, self.lowest, self.highest) + own
        if some:
            parts.append(Part(some, "masked"))
        if every := between(self.path, whole, self.lowest):
            parts.append(Part(every, "all"))
        return Block(self.begin, self.end, tuple(parts))

    def cut(self, size: int) -> Iterator[Stretch]:
        """Yield pieces of a run of at most so many nodes; what is no run stays whole."""
        if not self.is_run:
            yield self
            return
        for begin in range(self.begin, self.end, size):
            end = min(begin + size, self.end)
            path = (*self.path, (self.begin, begin)) if begin > self.begin else self.path
            yield run_of(begin, end, self.lowest + begin - self.begin, path)


def run_of(begin: int, end: int, depth: int, path: tuple[Span, ...]) -> Stretch:
    """Return a stretch of nodes of which each is the parent of the next."""
    return Stretch(begin, end, depth, depth + end - begin - 1, is_run=True, path=path)


def between(path: tuple[Span, ...], begin: int, end: int) -> tuple[Span, ...]:
    """Return the nodes of a path at depths ``[begin, end)``."""
    found, depth = list[Span](), 0
    for first, behind in path:
        low, high = max(begin - depth, 0), min(end - depth, behind - first)
        if low < high:
            found.append((first + low, first + high))
        depth += behind - first
    return tuple(found)


def stretches_of(depths: Depths, heads: int = 1) -> list[Stretch]:
    """Return the stretches of trees: runs, joined where that is less work for so many heads.

    ``depths`` are ``[nodes]``, of nodes that are numbered depth first.

    Example:
        >>> [(one.begin, one.end) for one in stretches_of(np.array([0, 1, 2, 1]))]
        [(0, 4)]
    """
    begins = np.flatnonzero(np.diff(depths, prepend=-2) != 1)
    ends = np.append(begins[1:], len(depths))[: begins.size]
    found, path = list[Stretch](), tuple[Span, ...]()
    for begin, end, depth in zip(
        begins.tolist(), ends.tolist(), depths[begins].tolist(), strict=True
    ):
        run = run_of(begin, end, depth, between(path, 0, depth))
        path = (*run.path, (begin, end))
        if found and end - found[-1].begin <= MOST_QUERIES:
            last = found[-1]
            low, high = min(last.lowest, depth), max(last.highest, run.highest)
            joined = Stretch(last.begin, end, low, high, is_run=False, path=last.path)
            apart = last.block(None).cost(heads) + run.block(None).cost(heads)
            if joined.block(None).cost(heads) <= apart:
                found[-1] = joined
                continue
        found.append(run)
    return found


def blocks_of(stretches: Sequence[Stretch], window: int | None = None) -> list[Block]:
    """Return the blocks of stretches in a window of so many depths, of all depths if ``None``.

    In a window, runs are cut into blocks of at most `MOST_QUERIES`, and of about the window.
    """
    if window is None or all(one.highest < window for one in stretches):
        return [one.block(None) for one in stretches]
    size = min(MOST_QUERIES, max(window, LEAST_QUERIES))
    return [piece.block(window) for one in stretches for piece in one.cut(size)]
