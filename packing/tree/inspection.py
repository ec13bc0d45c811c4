"""Text that shows in a terminal what a tree shares, and where prefixes broke."""

from __future__ import annotations

from collections.abc import Sequence

from trajpack.packing.batch.inspection import Decode, counted
from trajpack.packing.text import one_line
from trajpack.packing.tree.breaks import PrefixBreak
from trajpack.packing.tree.statistics import TreeStatistics

MOST_BREAKS = 8
"""Breaks that are shown, unless all are asked for."""


def describe_tree(statistics: TreeStatistics) -> list[tuple[str, str]]:
    """Return the statistics of a tree as pairs of a name and a value in words.

    Example:
        >>> from trajpack import Trajectory, Turn, pack_tree
        >>> turns = [Turn([1, 2], [8, 3, 4], [-0.1] * 3), Turn([1, 2, 3, 4, 5], [6], [-0.1])]
        >>> for name, value in describe_tree(pack_tree([Trajectory("a", turns)]).statistics()):
        ...     print(name, "=", value)
        tree = 9 nodes in 1 tree, for 11 tokens merged (a ratio of 1.22) or 11 as turns (1.22)
        shared tokens = 0 in chains, 2 in trajectories, 0 in groups, 0 across groups
        prefix breaks = 1 of 1 continuation: 1 stripped
    """
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

    Args:
        statistics: Statistics of a tree.
        ids: Names of the trajectories, as of ``batch.entries``.
        decode: Function from token ids to text; ``None`` shows the ids alone.
        full: Whether to leave no break out.

    Example:
        >>> from trajpack import Trajectory, Turn, pack_tree
        >>> turns = [Turn([1, 2], [8, 3, 4], [-0.1] * 3), Turn([1, 2, 3, 4, 5], [6], [-0.1])]
        >>> break_rows(pack_tree([Trajectory("a", turns)]).statistics(), ["a"])
        [('turn 1', 'of a: at 2 came 3, turn 0 has 8; 1 stripped')]
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
