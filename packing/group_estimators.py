"""Estimators that compare the trajectories of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trajpack.packing.estimators import Estimator

if TYPE_CHECKING:
    from trajpack.kernels.group_advantages import Singleton


@dataclass(frozen=True)
class GroupEstimator(Estimator):
    """What estimators have that compare the trajectories of a group.

    A trajectory's score is the sum of its turns' rewards, undiscounted; each of its generated
    tokens is given the trajectory's advantage.
    """


@dataclass(frozen=True)
class GRPO(GroupEstimator):
    """Score less the group's mean, divided by its standard deviation.

    Args:
        eps: Added to the standard deviation.
        singleton: What a group of one has: its score (``"raw"``), or ``"zero"``.

    Reference:
        `trajpack.kernels.grpo`.
    """

    eps: float = 1e-6
    singleton: Singleton = "raw"


@dataclass(frozen=True)
class DrGRPO(GroupEstimator):
    """Score less the group's mean. Reference: `trajpack.kernels.dr_grpo`.

    Args:
        singleton: What a group of one has: its score (``"raw"``), or ``"zero"``.
    """

    singleton: Singleton = "raw"


@dataclass(frozen=True)
class RLOO(GroupEstimator):
    """Score less the mean of the others. Reference: `trajpack.kernels.rloo`.

    Args:
        singleton: What a group of one has: its score (``"raw"``), or ``"zero"``.
    """

    singleton: Singleton = "raw"


@dataclass(frozen=True)
class OPO(GroupEstimator):
    """Score less the group's mean weighted by length. Reference: `trajpack.kernels.opo`.

    Args:
        singleton: What a group of one has: its score (``"raw"``), or ``"zero"``.
    """

    singleton: Singleton = "raw"


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(GroupEstimator):
    """Score less the group's mean, whitened over the batch's tokens.

    Reference: `trajpack.kernels.reinforce_plus_plus_baseline`.

    Args:
        singleton: What a group of one has: its score (``"raw"``), or ``"zero"``.
    """

    singleton: Singleton = "raw"


@dataclass(frozen=True)
class MaxRL(GroupEstimator):
    """Score less the group's mean, divided by that. Reference: `trajpack.kernels.max_rl`.

    Args:
        singleton: What a group of one has: its score (``"raw"``), or ``"zero"``.
    """

    singleton: Singleton = "zero"


@dataclass(frozen=True)
class GPG(GroupEstimator):
    """Score less the group's mean, scaled by those not scored 0. Reference: `trajpack.kernels.gpg`.

    Args:
        singleton: What a group of one has: its score (``"raw"``), or ``"zero"``.
    """

    singleton: Singleton = "raw"


@dataclass(frozen=True)
class PassAtK(GroupEstimator):
    """Best score less second best, for the best. Reference: `trajpack.kernels.grpo_pass_at_k`.

    Args:
        scale: ``"std"`` divides by the group's standard deviation.
        eps: Added to it.
    """

    scale: Literal["std", "none"] = "none"
    eps: float = 1e-6


@dataclass(frozen=True)
class GiGPO(GroupEstimator):
    """GRPO's advantage, and that of a turn among all turns from the same state.

    Needs ``state_ids``. A turn's step score is its return, as packed.

    Args:
        step_weight: What the turn's advantage is multiplied by.
        scale: Whether both advantages are divided by the standard deviation of their group.
        eps: Added to it.

    Reference:
        `trajpack.kernels.step_advantages`.
    """

    step_weight: float = 1.0
    scale: Literal["std", "none"] = "std"
    eps: float = 1e-6
