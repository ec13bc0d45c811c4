"""The plan of a tree: one run table from which the kernel `build` writes nodes and entries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trajpack.kernels.runs import MAX_TOKENS, RUN_WIDTH, TILE, Run
from trajpack.packing.conversion import INT32_MAX
from trajpack.packing.tree.trie import Ints, Pieces, Trie

TREE_END, PARENT, NODE = Run.SEQUENCE, Run.VERSION, Run.POSITION
"""Columns with another meaning in a tree. In rows of nodes: the end of the subtrees, and the
parent of the row's first node. In rows of entries: the node of the row's first entry."""


class Spans(NamedTuple):
    """Generated stretches of chains in the order of their turns; a turn has one or more."""

    turn: Ints
    chain: Ints
    begin: Ints
    """Depth of the first token."""
    end: Ints
    version: Ints
    logprob: Ints
    """Word of the first log-probability."""


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


class TreePlan(NamedTuple):
    """Rows of a run table: nodes, padding up to a whole tile, then entries."""

    runs: Ints
    """``[rows + 1, 8]``: the table; its last row ends it."""
    num_node_rows: int
    """Rows of nodes; one row of padding and the rows of entries follow."""
    num_trained: int
    """Nodes that are generated tokens."""
    first_entry: int
    """Index of the first entry, a multiple of a tile."""
    num_tokens: int
    """Nodes, padding and entries."""
    node_chains: Ints
    """``[rows of nodes]``: chain whose tokens the nodes of a row are."""
    entry_spans: Ints
    """``[rows of entries]``: span of each row."""
    entry_skipped: Ints
    """``[rows of entries]``: tokens of the span before the row."""
    prompt_nodes: Ints
    """``[turns]``: node of the last token of each turn's prompt."""
    cu_seqlens: Ints
    """``[trees + 1]``: boundaries of the trees' nodes."""
    chains: Chains

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.chains.trie.num_nodes


def plan_tree(trie: Trie, sources: Ints, spans: Spans, trajectory: Ints) -> TreePlan:
    """Plan the nodes of a trie and the entries of its spans.

    Args:
        trie: Trie of the chains.
        sources: ``[chains]``: word of each chain's first token.
        spans: What was generated.
        trajectory: ``[turns]``: trajectory of each turn.

    Raises:
        ValueError: If nodes and entries would pass 2³¹ together.

    Cost: a few passes over chains, spans and segments; none over tokens.
    """
    place = trie.places[spans.chain]
    index, depth, node, length = trie.pieces(place, spans.begin, spans.end)
    generated = union_of(node, node + length)
    first_entry = -(-trie.num_nodes // TILE) * TILE
    num_tokens = first_entry + int(length.sum())
    if num_tokens > MAX_TOKENS:
        raise ValueError(
            f"a tree holds at most {MAX_TOKENS} nodes and generated tokens, this one needs "
            f"{num_tokens}"
        )
    node_rows, node_chains = _node_rows(trie, sources, generated)
    count = len(node_rows)
    runs = np.zeros((count + index.size + 2, RUN_WIDTH), np.int64)
    runs[:count] = node_rows
    runs[count, [Run.START, Run.SOURCE, Run.GENERATED]] = trie.num_nodes, -1, INT32_MAX
    runs[-1, Run.START] = num_tokens
    skipped, rows = depth - spans.begin[index], runs[count + 1 : -1]
    rows[:, Run.START] = first_entry + np.cumsum(length) - length
    rows[:, Run.SOURCE] = sources[spans.chain[index]] + depth
    rows[:, Run.LOGPROB] = spans.logprob[index] + skipped
    rows[:, NODE] = node
    rows[:, Run.SEQUENCE] = spans.chain[index]
    rows[:, Run.TURN] = spans.turn[index]
    rows[:, Run.VERSION] = spans.version[index]
    opens = np.diff(spans.turn, prepend=-1) != 0
    closes = np.append(opens[1:], True)[: opens.size]
    chains = Chains(trie, place[opens], spans.begin[opens], spans.end[closes], trajectory)
    return TreePlan(
        runs,
        count,
        int((generated[1] - generated[0]).sum()),
        first_entry,
        num_tokens,
        node_chains,
        index,
        skipped,
        trie.pieces(chains.place, chains.begin - 1, chains.begin).node,
        trie.roots,
        chains,
    )


def union_of(begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Join intervals that overlap or touch; return begins and ends in order."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    opens = np.append(True, begins[1:] > ends[:-1])[: begins.size]
    return begins[opens], ends[np.append(opens[1:], True)[: ends.size]]


def _node_rows(trie: Trie, sources: Ints, generated: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """Return the rows of the nodes, and the chain of each.

    A row ends where a segment or generated nodes end; so the nodes of a row are consecutive tokens
    of a chain, first those that no turn generated.
    """
    segments, (begins, ends) = trie.segments, generated
    start = np.concatenate([segments.starts[:-1], ends[ends < trie.num_nodes]])
    start.sort(kind="stable")  # two sorted parts
    start = start[np.diff(start, prepend=-1) != 0]
    at = np.searchsorted(segments.starts[:-1], start, side="right") - 1
    place, depth = segments.places[at], segments.depths[at] + start - segments.starts[at]
    length = np.diff(start, append=trie.num_nodes)
    interval = np.searchsorted(ends, start, side="right")  # the first that ends behind the start
    behind = np.append(begins, trie.num_nodes)[interval]
    is_first = depth == trie.shared[place]  # of its owner
    holder = trie.parent[place]
    attached = np.where(holder < 0, -1, trie.node(holder, depth - 1))
    chain = trie.order[place]
    rows = np.zeros((start.size, RUN_WIDTH), np.int64)
    rows[:, Run.START] = start
    rows[:, Run.SOURCE] = rows[:, Run.LOGPROB] = sources[chain] + depth
    rows[:, Run.GENERATED] = np.clip(behind - start, 0, length)
    rows[:, Run.POSITION] = depth
    rows[:, TREE_END] = segments.ends[at]
    rows[:, PARENT] = np.where(is_first, attached, start - 1)
    return rows, chain
