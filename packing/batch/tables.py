"""`PackTables`: what packing knows beside the fields of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class GroupOrder(NamedTuple):
    """Trajectories and turns in the order of their groups, int32 but for computed orders.

    Attributes:
        trajectories: ``[trajectories]``: a permutation, stable within a group.
        owners: ``[turns]``: the trajectory of each turn.
        cu_trajectories: ``[groups + 1]``: boundaries of the groups in ``trajectories``.
    """

    trajectories: torch.Tensor
    owners: torch.Tensor
    cu_trajectories: torch.Tensor


class Longest(NamedTuple):
    """Maxima over the trajectories and groups.

    Attributes:
        generated: Generated tokens of a trajectory.
        new: Tokens that are new with the turns of a trajectory, from `PackedBatch.turn_begin` on.
        group: Trajectories of a group.
    """

    generated: int = 0
    new: int = 0
    group: int = 0


class PackTables(NamedTuple):
    """What packing knows beside the fields of a batch: tables on its device, facts on the host.

    Attributes:
        runs: int32 ``[runs + 1, 8]``, see `trajpack.kernels.runs.Run`: which turn generated what.
        cu_new: int32 ``[turns + 1]``: tokens that are new with all turns before each.
        group_order: Trajectories in the order of their groups, and those of turns.
        generated_lens: Generated tokens of each sequence.
        value_lens: Values of each ragged field in each sequence, and generated tokens without any,
            by name: int64 ``[sequences, 2]``.
        longest: Maxima.
        loss_mask: The mask that packing wrote: all generated tokens.
    """

    runs: torch.Tensor
    cu_new: torch.Tensor
    group_order: GroupOrder
    generated_lens: tuple[int, ...]
    value_lens: Mapping[str, npt.NDArray[np.int64]]
    longest: Longest
    loss_mask: torch.Tensor

    def is_whole(self, mask: torch.Tensor) -> bool:
        """Return whether a mask is the one that packing wrote: all generated tokens."""
        return mask is self.loss_mask and not mask.is_inference() and mask._version == 0

    def mapped(
        self, change: Callable[[torch.Tensor], torch.Tensor], loss_mask: torch.Tensor
    ) -> PackTables:
        """Return the tables with other tensors."""
        return self._replace(
            runs=change(self.runs),
            cu_new=change(self.cu_new),
            group_order=GroupOrder(*map(change, self.group_order)),
            loss_mask=loss_mask,
        )
