"""Rows as lists, for formats in which rollouts travel as Python numbers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.rows.rows import prompt_lengths_of, row_trajectories, row_turns


class RowLists:
    """What a packed batch says of each sequence, on the host, prompts and responses apart.

    Cost: reads the tables of turns back to the host, which synchronises a device; each tensor
    that is asked for is one more copy, and an object for each of its numbers.
    """

    def __init__(self, batch: PackedBatch) -> None:
        batch.check_unpadded()
        bounds = batch.cu_seqlens.tolist()
        prompts = prompt_lengths_of(batch).tolist()
        self.batch = batch
        self.spans = [
            (begin, begin + prompt, end)
            for (begin, end), prompt in zip(pairwise(bounds), prompts, strict=True)
        ]
        self.turns = row_turns(batch)
        self.trajectories = row_trajectories(batch)

    def __len__(self) -> int:
        """Rows."""
        return len(self.spans)

    def wholes(self, packed: torch.Tensor) -> list[list[Any]]:
        """Return what a tensor over the batch's tokens holds for each sequence."""
        values = packed.tolist()
        return [values[begin:end] for begin, _, end in self.spans]

    def prompts(self, packed: torch.Tensor) -> list[list[Any]]:
        """Return what it holds for each prompt."""
        values = packed.tolist()
        return [values[begin:split] for begin, split, _ in self.spans]

    def responses(self, packed: torch.Tensor) -> list[list[Any]]:
        """Return what it holds for each response."""
        values = packed.tolist()
        return [values[split:end] for _, split, end in self.spans]

    def truncated(self) -> list[bool]:
        """Return for each sequence whether its last turn was cut off."""
        cut = self.batch.turn_truncated.tolist()
        return [bool(of) and cut[of[-1]] for of in self.turns]

    def versions(self) -> list[list[int]]:
        """Return the policy version that sampled the end of each turn, by sequence."""
        last = self.batch.turn_version_end.tolist()
        return [[last[turn] for turn in of] for of in self.turns]

    def numbers_in_group(self) -> list[int]:
        """Return for each sequence which of its group's trajectories it is of, from 0."""
        seen: dict[int, int] = {}
        numbers = []
        for group in self.batch.group_ids.tolist():
            numbers.append(seen.get(group, 0))
            seen[group] = numbers[-1] + 1
        return [numbers[trajectory] for trajectory in self.trajectories]
