"""`TreeStatistics`: what a tree shares, between whom, and where prefixes broke."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from trajpack.packing.tree.breaks import PrefixBreak, Reason, reason_of
from trajpack.packing.tree.merged import tree_of
from trajpack.packing.tree.paths import Paths
from trajpack.packing.tree.trie import Ints

if TYPE_CHECKING:
    from trajpack.packing.tree.tree_batch import TreeBatch

AT_ONCE = 256
"""Breaks whose tokens are read at once."""


@dataclass(frozen=True)
class TreeStatistics:
    """Plain numbers about a `TreeBatch`.

    ``num_tokens_turns`` is ``num_tokens_merged + shared_in_sequences``, and ``num_tokens_merged``
    is ``num_nodes + shared_in_trajectories + shared_in_groups + shared_across_groups``.

    Attributes:
        num_sequences: Sequences of layout ``"merged"``.
        num_entries: Generated tokens.
        num_tokens_turns: Tokens of layout ``"turns"``.
        num_tokens_merged: Tokens of layout ``"merged"``.
        shared_in_sequences: Tokens saved where prompts repeat the turns before them; layout
            ``"merged"`` saves them.
        shared_in_trajectories: Tokens saved between sequences of one trajectory: branches,
            attempts, broken prefixes.
        shared_in_groups: Tokens saved between trajectories of one group.
        shared_across_groups: Tokens saved between groups. A trajectory without a group is one of
            its own.
        breaks: Turns, but a trajectory's first, that begin a sequence, in the order of the turns.
    """

    num_trees: int
    num_trajectories: int
    num_turns: int
    num_sequences: int
    num_nodes: int
    num_entries: int
    num_tokens_turns: int
    num_tokens_merged: int
    shared_in_sequences: int
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


class _Turns(NamedTuple):
    """Turns of a tree on the host, ``[turns]`` each."""

    branch: Ints
    """Path of the turn's chain."""
    prompt: Ints
    """Tokens of the prompt."""
    end: Ints
    """Tokens of prompt and completion."""
    owner: Ints
    """Trajectory."""
    first: Ints
    """First turn of the trajectory."""


def statistics_of(tree: TreeBatch) -> TreeStatistics:
    """Implement `TreeBatch.statistics`."""
    entries, paths = tree.entries, Paths(tree.chains.trie)
    prompt = _on_host(tree.position_ids[tree.turn_prompt_node.long()]) + 1
    bounds = _on_host(entries.cu_turns)
    owner = np.repeat(np.arange(len(entries.ids)), np.diff(bounds))
    ends = prompt + np.diff(_on_host(entries.cu_generated))
    turns = _Turns(tree.chains.turn_branch, prompt, ends, owner, bounds[owner])
    _, opening = np.unique(turns.branch, return_index=True)
    trajectory = owner[opening]
    num_tokens, num_merged = int(ends.sum()), int(paths.lengths.sum())
    in_trajectories = paths.num_distinct(trajectory)
    broke = np.sort(opening[opening > turns.first[opening]])
    in_groups = paths.num_distinct(_on_host(entries.group_ids)[trajectory])
    return TreeStatistics(
        num_trees=len(tree),
        num_trajectories=len(entries.ids),
        num_turns=tree.num_turns,
        num_sequences=len(opening),
        num_nodes=tree.num_nodes,
        num_entries=tree.num_entries,
        num_tokens_turns=num_tokens,
        num_tokens_merged=num_merged,
        shared_in_sequences=num_tokens - num_merged,
        shared_in_trajectories=num_merged - in_trajectories,
        shared_in_groups=in_trajectories - in_groups,
        shared_across_groups=in_groups - tree.num_nodes,
        breaks=tuple(_breaks(tree, paths, turns, broke)),
    )


def _breaks(tree: TreeBatch, paths: Paths, turns: _Turns, broke: Ints) -> Iterator[PrefixBreak]:
    """Yield the breaks of the turns ``broke``, of which none is the first of its trajectory."""
    if not broke.size:
        return
    if tree.boundary == "duplicate":  # its paths part a token early
        yield from statistics_of(tree_of(tree.merged(), ("once", "shared"))).breaks
        return
    tokens = _on_host(tree.input_ids)
    for some in np.split(broke, range(AT_ONCE, len(broke), AT_ONCE)):
        position, first_prompt, history = np.zeros((3, len(some)), np.int64)
        for number, turn in enumerate(some.tolist()):
            before = np.arange(turns.first[turn], turn)
            shared = paths.common(np.full_like(before, turns.branch[turn]), turns.branch[before])
            shared = np.minimum(shared, turns.prompt[turn])  # no later turn adds to what is shared
            alike = before[shared == shared.max()]
            position[number] = shared.max()
            first_prompt[number], history[number] = turns.prompt[alike[0]], alike[-1]
        expected = paths.nodes(turns.branch[history], position, turns.end[history])
        came = paths.nodes(turns.branch[some], position, turns.prompt[some])
        for number, turn in enumerate(some.tolist()):
            one, other = tokens[expected[number]], tokens[came[number]]
            first, shares = int(turns.first[turn]), int(position[number])
            yield PrefixBreak(
                int(turns.owner[turn]),
                turn - first,
                int(history[number]) - first,
                shares,
                int(one[0]) if one.size else None,
                int(other[0]) if other.size else None,
                *reason_of(one, other, shares, first_prompt=int(first_prompt[number])),
            )


def _on_host(tensor: torch.Tensor) -> Ints:
    return tensor.cpu().numpy().astype(np.int64)
