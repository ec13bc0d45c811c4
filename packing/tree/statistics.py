"""`TreeStatistics`: what a tree shares, between whom, and where prefixes broke; also in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from trajpack.packing.batch.breaks import Decode, PrefixBreak, Reason, reason_of
from trajpack.packing.buffer.tables import number_groups
from trajpack.packing.text import counted, one_line
from trajpack.packing.tree.trie import Ints, expanded, without_last

if TYPE_CHECKING:
    from trajpack.packing.tree.tree_batch import TreeBatch

MOST_BREAKS = 8
"""Breaks that are shown, unless all are asked for."""


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
        breaks: Turns, but a trajectory's first, that begin a chain, in the order of the turns.
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
    breaks: tuple[PrefixBreak, ...] = field(repr=False)

    @property
    def turns_ratio(self) -> float:
        """Tokens of layout ``"turns"`` by nodes; 1 for an empty batch."""
        return self.num_tokens_turns / self.num_nodes if self.num_nodes else 1.0

    @property
    def merged_ratio(self) -> float:
        """Tokens of layout ``"merged"`` by nodes; 1 for an empty batch."""
        return self.num_tokens_merged / self.num_nodes if self.num_nodes else 1.0

    @property
    def reasons(self) -> Counter[Reason]:
        """Number of breaks of each reason."""
        return Counter(one.reason for one in self.breaks)


def statistics_of(tree: TreeBatch) -> TreeStatistics:
    """Implement `TreeBatch.statistics`."""
    trie, place, _, end, owner = tree.chains
    _, opening = np.unique(place, return_index=True)  # the first turn of each chain
    groups, _ = number_groups(tree.entries.groups)
    num_tokens, num_merged = int(end.sum()), int(trie.lengths.sum())
    in_trajectories = _num_distinct(tree, owner[opening])
    in_groups = _num_distinct(tree, groups.astype(np.int64)[owner[opening]])
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
        breaks=tuple(_breaks(tree, np.sort(opening))),
    )


def _num_distinct(tree: TreeBatch, owners: Ints) -> int:
    """Return the distinct nodes of each owner's chains, summed; ``owners`` are of each place."""
    trie, order = tree.chains.trie, np.argsort(owners, kind="stable")
    one, other = order[:-1], order[1:]
    shared = trie.common(one, other)
    if tree.boundary == "duplicate":
        shared = without_last(shared, trie.lengths[one], trie.lengths[other])
    return int(trie.lengths.sum() - shared[np.diff(owners[order]) == 0].sum())


def _breaks(tree: TreeBatch, opening: Ints) -> Iterator[PrefixBreak]:
    """Yield the breaks among the turns that begin a chain."""
    trie, place, begin, end, owner = tree.chains
    first_of = np.searchsorted(owner, owner)
    broke = opening[opening > first_of[opening]].tolist()
    if not broke:
        return
    tokens = tree.input_ids.cpu().numpy()

    def path_of(turn: int, low: int, high: int) -> Ints:
        pieces = trie.pieces(place[turn : turn + 1], np.array([low]), np.array([high]))
        return tokens[expanded(pieces.node, pieces.length)]

    for turn in broke:
        first = int(first_of[turn])
        before = place[first:turn]
        shared = np.minimum(trie.common(np.full_like(before, place[turn]), before), begin[turn])
        position = int(shared.max())  # no later turn adds to what is shared
        history = first + int(np.flatnonzero(shared == position)[-1])
        expected = path_of(history, position, int(end[history]))
        came = path_of(turn, position, int(begin[turn]))
        yield PrefixBreak(
            int(owner[turn]),
            turn - first,
            history - first,
            position,
            int(expected[0]) if expected.size else None,
            int(came[0]) if came.size else None,
            *reason_of(expected, came),
        )


def describe_tree(statistics: TreeStatistics) -> list[tuple[str, str]]:
    """Return the statistics of a tree as pairs of a name and a value in words."""
    num_continuations = statistics.num_turns - statistics.num_trajectories
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in statistics.reasons.most_common())
    return [
        (
            "tree",
            f"{counted(statistics.num_nodes, 'node')} in {counted(statistics.num_trees, 'tree')}, "
            f"for {statistics.num_tokens_merged:,} tokens merged (a ratio of "
            f"{statistics.merged_ratio:.2f}) or {statistics.num_tokens_turns:,} as turns "
            f"({statistics.turns_ratio:.2f})",
        ),
        (
            "shared tokens",
            f"{statistics.shared_in_chains:,} in chains, "
            f"{statistics.shared_in_trajectories:,} in trajectories, "
            f"{statistics.shared_in_groups:,} in groups, "
            f"{statistics.shared_across_groups:,} across groups",
        ),
        (
            "prefix breaks",
            f"{len(statistics.breaks):,} of {counted(num_continuations, 'continuation')}"
            + (f": {reasons}" if reasons else ""),
        ),
    ]


def break_rows(
    statistics: TreeStatistics,
    ids: Sequence[str],
    decode: Decode | None = None,
    *,
    full: bool = False,
) -> list[tuple[str, str]]:
    """Return the breaks as pairs of a turn and words; the last pair says how many were left out.

    ``ids`` are the names of the trajectories; ``decode`` makes texts of token ids, ``None`` shows
    the ids alone; with ``full`` no break is left out.
    """
    breaks = statistics.breaks if full else statistics.breaks[:MOST_BREAKS]
    rows = [(f"turn {one.turn}", _words(one, ids, decode)) for one in breaks]
    num_hidden = len(statistics.breaks) - len(breaks)
    return [*rows, ("...", counted(num_hidden, "more break"))] if num_hidden else rows


def _words(one: PrefixBreak, ids: Sequence[str], decode: Decode | None) -> str:
    def shown(token: int | None) -> str:
        if token is None:
            return "nothing"
        text = "" if decode is None else one_line(decode([token]), max_chars=20)
        return f"{token} '{text}'" if text else f"{token}"

    words = {
        "stripped": f"{one.removed} stripped",
        "rewritten": f"{one.removed} rewritten as {one.added}",
        "repeated": "the prompt ends there",
        "fields": "rows of a field differ",
        "left": "it left the history",
    }
    return (
        f"of {one_line(ids[one.trajectory], max_chars=60)}: at {one.position:,} came "
        f"{shown(one.came)}, turn {one.history} has {shown(one.expected)}; {words[one.reason]}"
    )
