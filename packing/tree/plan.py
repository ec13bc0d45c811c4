"""The plan of a tree: one run table from which the kernel `build` writes nodes and entries."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trajpack.kernels.runs import MAX_TOKENS, RUN_WIDTH, TILE, Run
from trajpack.packing.conversion import INT32_MAX
from trajpack.packing.tree.trie import Branches, Ints

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
    """Chains of a tree on the host: the sequences that layout ``"merged"`` has."""

    trie: Branches
    """Trie of the chains."""
    turn_branch: Ints
    """``[turns]``: branch of each turn's chain, its place in depth-first order."""
    turn: Ints
    """``[stretches]``: turn of each generated stretch of nodes, ascending."""
    begin: Ints
    """``[stretches]``: first node of each."""
    end: Ints
    """``[stretches]``: node behind the last."""


class TreePlan(NamedTuple):
    """Rows of a run table: nodes, padding up to a whole tile, then entries."""

    runs: Ints
    """``[rows + 1, 8]``: the table; its last row ends it."""
    num_node_rows: int
    """Rows of nodes; one row of padding and the rows of entries follow."""
    num_trained: int
    """Nodes that are generated tokens."""
    num_nodes: int
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
    """The chains, and the nodes that their turns generated."""


def plan_tree(trie: Branches, sources: Ints, spans: Spans) -> TreePlan:
    """Plan the nodes of a trie and the entries of its spans.

    Args:
        trie: Trie of the chains.
        sources: ``[chains]``: word of each chain's first token.
        spans: What was generated.

    Raises:
        ValueError: If nodes and entries would pass 2³¹ together.

    Cost: a few passes over chains, spans and branches; none over tokens.
    """
    piece, depth, branch = trie.on_path(spans.chain, spans.begin, spans.end)
    last = np.append(piece[1:] != piece[:-1], True)[: piece.size]
    stop = np.where(last, spans.end[piece], np.append(depth[1:], 0)[: piece.size])
    node, length = trie.node(branch, depth), stop - depth
    generated = union_of(node, node + length)
    node_rows, node_chains = _node_rows(trie, sources, generated)
    num_nodes, num_entries = trie.num_nodes, int(length.sum())
    first_entry = -(-num_nodes // TILE) * TILE
    num_tokens = first_entry + num_entries
    if num_tokens > MAX_TOKENS:
        raise ValueError(
            f"a tree holds at most {MAX_TOKENS} nodes and generated tokens, this one needs "
            f"{num_tokens}"
        )
    skipped = depth - spans.begin[piece]
    rows = np.zeros((piece.size, RUN_WIDTH), np.int64)
    rows[:, Run.START] = first_entry + np.cumsum(length) - length
    rows[:, Run.SOURCE] = sources[spans.chain[piece]] + depth
    rows[:, Run.LOGPROB] = spans.logprob[piece] + skipped
    rows[:, NODE] = node
    rows[:, Run.SEQUENCE] = spans.chain[piece]
    rows[:, Run.TURN] = spans.turn[piece]
    rows[:, Run.VERSION] = spans.version[piece]
    padding, ending = np.zeros((2, 1, RUN_WIDTH), np.int64)
    padding[0, [Run.START, Run.SOURCE, Run.GENERATED]] = num_nodes, -1, INT32_MAX
    ending[0, Run.START] = num_tokens
    opens = np.flatnonzero(np.diff(spans.turn, prepend=-1))
    prompt = spans.begin[opens]
    _, at, of = trie.on_path(spans.chain[opens], prompt - 1, prompt)
    return TreePlan(
        np.concatenate([node_rows, padding, rows, ending]),
        len(node_rows),
        int((generated[1] - generated[0]).sum()),
        num_nodes,
        first_entry,
        num_tokens,
        node_chains,
        piece,
        skipped,
        trie.node(of, at),
        np.append(trie.first[trie.shared == 0], num_nodes),
        Chains(trie, trie.branch_of(spans.chain[opens]), spans.turn[piece], node, node + length),
    )


def union_of(begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Join intervals that overlap or touch; return begins and ends in order."""
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    opens = np.append(True, begins[1:] > ends[:-1])[: begins.size]
    return begins[opens], ends[np.append(opens[1:], True)[: ends.size]]


def _node_rows(trie: Branches, sources: Ints, generated: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """Return the rows of the nodes, and the chain of each.

    A row ends where a subtree ends, a branch ends, or generated nodes end; so the nodes of a row
    are consecutive tokens of a chain, first those that no turn generated.
    """
    branch, depth, end = trie.cuts.T
    stretch = trie.node(branch, depth)
    begins, ends = generated
    start = np.union1d(stretch, ends[ends < trie.num_nodes])
    at = np.searchsorted(stretch, start, side="right") - 1
    branch, depth = branch[at], depth[at] + start - stretch[at]
    length = np.diff(start, append=trie.num_nodes)
    interval = np.searchsorted(ends, start, side="right")  # the first that ends behind the start
    behind = np.append(begins, trie.num_nodes)[interval]
    heads = depth == trie.shared[branch]
    holder = trie.parent[branch]
    attached = np.where(holder < 0, -1, trie.node(holder, depth - 1))
    chain = trie.order[branch]
    rows = np.zeros((start.size, RUN_WIDTH), np.int64)
    rows[:, Run.START] = start
    rows[:, Run.SOURCE] = rows[:, Run.LOGPROB] = sources[chain] + depth
    rows[:, Run.GENERATED] = np.clip(behind - start, 0, length)
    rows[:, Run.POSITION] = depth
    rows[:, TREE_END] = end[at]
    rows[:, PARENT] = np.where(heads, attached, start - 1)
    return rows, chain
