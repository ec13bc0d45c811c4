"""A window of trajectories, packed, with the plans of all ranks and the weights of their loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from trajpack.packing.batch.batch import UNALIGNED, PackedBatch
from trajpack.packing.buffer.buffer import pack
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.micro_batches.micro_batch import MicroBatch
from trajpack.packing.plan.plan import plan_ranks
from trajpack.packing.plan.units import Ints, Policy
from trajpack.packing.token_fields import TokenField
from trajpack.packing.tree.chain_plan import ChainPlan
from trajpack.packing.tree.entries import BatchEntries
from trajpack.packing.tree.micro_batches import TreeMicroBatch
from trajpack.packing.tree.pack_tree import pack_tree
from trajpack.packing.tree.tree_batch import TreeBatch
from trajpack.packing.types import Trajectory

Piece: TypeAlias = MicroBatch | TreeMicroBatch
Batch: TypeAlias = PackedBatch | TreeBatch
LoaderLayout: TypeAlias = Literal["merged", "turns", "tree"]
"""Layout of the micro-batches: of `trajpack.pack`, or `trajpack.pack_tree`."""
WEIGHTS = "loss_weights"
"""Field of a micro-batch with the weight of each token."""


@dataclass(frozen=True)
class CutOptions:
    """Options that decide which trajectories are in which micro-batch."""

    capacity: int
    seed: int | None
    num_ranks: int
    accumulate: int
    lookahead: int
    layout: LoaderLayout
    oversized: Policy
    alignment: Alignment = UNALIGNED


@dataclass(frozen=True)
class Cuts:
    """A packed window and the plans of all ranks, with as many micro-batches for each."""

    batch: Batch
    plans: tuple[Any, ...]
    """`Plan` or `ChainPlan` of each rank."""

    @classmethod
    def of(
        cls, window: Sequence[Trajectory], fields: Sequence[TokenField], options: CutOptions
    ) -> Cuts:
        """Pack a window on the host and plan its micro-batches."""
        if options.layout == "tree":
            tree = pack_tree(window, device="cpu", fields=fields)
            plans = tree.plan_ranks(options.num_ranks, options.capacity)
            missing = -len(plans[0]) % options.accumulate
            return cls(tree, tuple(_with_dummies(plan, missing) for plan in plans))
        batch = pack(window, options.layout, device="cpu", fields=fields)
        is_cut = options.oversized == "truncate_at_turn"
        ranks = plan_ranks(
            batch.seqlens,
            options.num_ranks,
            options.capacity,
            multiple_of=options.accumulate,
            max_sequences=options.alignment.max_sequences,
            align=options.alignment.sequence_multiple,
            oversized=options.oversized,
            turn_ends=batch.turn_ends() if is_cut else None,
        )
        return cls(batch, ranks.plans)

    def __len__(self) -> int:
        """Number of micro-batches of each rank."""
        return len(self.plans[0])

    def pieces(
        self, rank: int, numbers: Ints, weights: torch.Tensor, alignment: Alignment
    ) -> Iterator[Piece]:
        """Return some micro-batches of a rank, in the given order, with their `WEIGHTS`."""
        plan = self.plans[rank]
        if isinstance(self.batch, TreeBatch):
            part = replace(plan, bounds=plan.bounds[numbers], loads=plan.loads[numbers])
            return self.batch.micro_batches(part, alignment, tensors={WEIGHTS: weights})
        bins = [plan[number] for number in numbers.tolist()]
        order = np.concatenate([plan.order[:0], *bins])
        part = replace(plan, order=order, cu_bins=np.cumsum([0, *map(len, bins)]))
        return self.batch.micro_batches(part, alignment, tensors={WEIGHTS: weights})

    def loss_weights(self, steps: Ints) -> torch.Tensor:
        """Return 1 over the generated tokens of its step for each generated token, else 0.

        Args:
            steps: ``[micro-batches of a rank]``: step of each.
        """
        tokens: PackedBatch | BatchEntries
        if isinstance(self.batch, TreeBatch):
            tokens, chains = self.batch.entries, self.batch.chains
            of_place = np.full(len(chains.trie.order), -1)
            for plan in self.plans:
                for step, (begin, end) in zip(steps, plan.bounds, strict=True):
                    of_place[begin:end] = step
            step_of, owner, is_kept = of_place[chains.place], tokens.turn_ids, None
        else:
            tokens, step_of = self.batch, np.full(len(self.batch), -1)
            for plan in self.plans:
                step_of[plan.order] = np.repeat(steps, np.diff(plan.cu_bins))
            owner, kept = tokens.sequence_ids, torch.tensor(self.plans[0].seqlens)
            is_kept = tokens.position_ids < kept[owner.long()]  # a sequence may be cut off
        step = torch.from_numpy(step_of)[owner.long()]
        counted = tokens.loss_mask & (step >= 0)
        counted = counted if is_kept is None else counted & is_kept
        counts = torch.bincount(step[counted], minlength=1).double()
        return torch.where(counted, 1 / counts.clamp(min=1)[step], 0.0).float()


def _with_dummies(plan: ChainPlan, count: int) -> ChainPlan:
    """Return a plan with more micro-batches at its end, without chains."""
    bounds = np.pad(plan.bounds, ((0, count), (0, 0)))
    return replace(plan, bounds=bounds, loads=np.pad(plan.loads, (0, count)))
