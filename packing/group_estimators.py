"""Estimators that compare the trajectories of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trajpack.packing.estimators import Estimator, check_rate

if TYPE_CHECKING:
    from trajpack.kernels.group_advantages import Singleton


@dataclass(frozen=True)
class GroupEstimator(Estimator):
    """What estimators have that compare the trajectories of a group.

    A trajectory's score is the sum of its turns' rewards, undiscounted; each of its generated
    tokens is given the trajectory's advantage. Its group is `Trajectory.group`; without one it is
    a group of one. Where every group of a batch has one member, `with_advantages` warns.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        singleton, eps = getattr(self, "singleton", "raw"), getattr(self, "eps", 0.0)
        if singleton not in ("raw", "zero"):
            raise ValueError(f"{self.name}: singleton must be 'raw' or 'zero', got {singleton!r}")
        if getattr(self, "scale", "std") not in ("std", "none"):
            raise ValueError(f"{self.name}: scale must be 'std' or 'none', got {self.scale!r}")  # type: ignore[attr-defined]
        check_rate(self.name, "eps", eps)


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

    Needs ``state_ids``. A turn's step score is `PackedBatch.turn_returns`; it is compared with
    those of turns that were taken in the same state by trajectories of the same group.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_clip is not None:
            raise ValueError("GiGPO: reward_clip cannot change the turns' returns, got one")
