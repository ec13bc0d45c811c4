"""Trees by brute force: a node is a distinct prefix, an ancestor is a prefix of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from trajpack import Trajectory, TreeBatch, Turn

Path = tuple[int, ...]


def path_of(turn: Turn) -> Path:
    """Return the tokens of a turn: prompt, then completion."""
    return tuple(int(token) for ids in (turn.prompt_ids, turn.completion_ids) for token in ids)


def turns_of(trajectories: Sequence[Trajectory]) -> list[Turn]:
    return [turn for trajectory in trajectories for turn in trajectory.turns]


def prefixes(trajectories: Sequence[Trajectory]) -> list[Path]:
    """Return all distinct prefixes of the turns, sorted: the nodes in their order."""
    paths = map(path_of, turns_of(trajectories))
    return sorted({path[:end] for path in paths for end in range(1, len(path) + 1)})


def entries(trajectories: Sequence[Trajectory]) -> list[Path]:
    """Return the path to each generated token, turn after turn."""
    return [
        path_of(turn)[:end]
        for turn in turns_of(trajectories)
        for end in range(len(turn.prompt_ids) + 1, len(path_of(turn)) + 1)
    ]


def paths_of(batch: TreeBatch) -> list[Path]:
    """Return the tokens from the root to each node, by the parents."""
    paths: list[Path] = []
    for token, parent in zip(batch.input_ids.tolist(), batch.tree_parent.tolist(), strict=True):
        assert -1 <= parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def mask_of(batch: TreeBatch) -> torch.Tensor:
    """Return which keys each query attends to, by the rule of `TreeBatch.tree_end`."""
    node = torch.arange(batch.num_nodes)
    return (node <= node[:, None]) & (node[:, None] < batch.tree_end)


def chains_of(trajectory: Trajectory) -> list[Path]:
    """Return the tokens of the chains of a trajectory, as the layout "merged" has them."""
    chains: list[Path] = []
    for turn in trajectory.turns:
        prompt = path_of(turn)[: len(turn.prompt_ids)]
        held = [chain for chain in chains if prompt[: len(chain)] == chain]
        if held:
            chains.remove(max(held, key=len))
        chains.append(path_of(turn))
    return chains


def chain_weights(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return the weights of the entries: chains through the node, over the entries on it."""
    chains = [chain for trajectory in trajectories for chain in chains_of(trajectory)]
    through = Counter(chain[:end] for chain in chains for end in range(1, len(chain) + 1))
    count = Counter(entries(trajectories))
    return [through[path] / count[path] for path in entries(trajectories)]


def sum_of_lengths_without_common(paths: Sequence[Path]) -> int:
    """Return ``sum(lengths) - sum(common prefixes of neighbours)`` of sorted sequences."""
    ordered = sorted(paths)
    common = 0
    for one, other in pairwise(ordered):
        least = min(len(one), len(other))
        same = np.array(one[:least]) == np.array(other[:least])
        common += least if same.all() else int(same.argmin())
    return sum(map(len, ordered)) - common
