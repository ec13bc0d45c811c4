"""Estimators that compare the trajectories of a group."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal

from trajpack.packing.credit.estimators import Estimator, check_rate

if TYPE_CHECKING:
    from trajpack.kernels.groups.group_advantages import Singleton


def _check_choice(op: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        *all_but_last, last = map(repr, choices)
        raise ValueError(f"{op}: {name} must be {', '.join(all_but_last)} or {last}, got {value!r}")


@dataclass(frozen=True)
class GroupEstimator(Estimator):
    """What estimators have that compare the trajectories of a group.

    A trajectory's score is the sum of its turns' rewards, undiscounted; each of its generated
    tokens is given the trajectory's advantage. Its group is `Trajectory.group`; without one it is
    a group of one. Where every group of a batch has one member, `with_advantages` warns.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice(self.name, "singleton", getattr(self, "singleton", "raw"), ("raw", "zero"))
        check_rate(self.name, "eps", getattr(self, "eps", 0.0))


@dataclass(frozen=True)
class GRPO(GroupEstimator):
    """Score less the group's mean, divided by its standard deviation.

    Args:
        eps: Added to the standard deviation.
        singleton: What a group of one has: its score (``"raw"``), or ``"zero"``.
        baseline: What is subtracted: the group's ``"mean"``, or that of the others
            (``"leave_one_out"``).
        scale: What divides: the group's ``"std"``, that of the others (``"leave_one_out_std"``,
            only with ``baseline="leave_one_out"``), or the one about the baseline
            (``"std_about_baseline"``); see `trajpack.kernels.group_advantages`.
        ddof: The variance is divided by the number of scores less this, 0 or 1.

    Reference:
        `trajpack.kernels.grpo`. NeMo-RL's default is ``GRPO(singleton="zero",
        baseline="leave_one_out", scale="leave_one_out_std")``; whose the others are,
        ``docs/credit/systems.md`` says.
    """

    eps: float = 1e-6
    singleton: Singleton = "raw"
    _: KW_ONLY
    baseline: Literal["mean", "leave_one_out"] = "mean"
    scale: Literal["std", "leave_one_out_std", "std_about_baseline"] = "std"
    ddof: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice(self.name, "baseline", self.baseline, ("mean", "leave_one_out"))
        scales = ("std", "leave_one_out_std", "std_about_baseline")
        _check_choice(self.name, "scale", self.scale, scales)
        if self.scale == "leave_one_out_std" and self.baseline == "mean":
            raise ValueError(
                f"{self.name}: scale='leave_one_out_std' needs baseline='leave_one_out', got 'mean'"
            )


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
        ddof: The variance is divided by the number of tokens less this, 0 or 1.
    """

    singleton: Singleton = "raw"
    _: KW_ONLY
    ddof: int = 1

    @property
    def whitening(self) -> int:
        """The ``ddof`` that advantages are whitened with."""
        return self.ddof


@dataclass(frozen=True)
class MaxRL(GroupEstimator):
    """Score less the group's mean, divided by that. Reference: `trajpack.kernels.max_rl`.

    Args:
        singleton: What a group of one has: its score (``"raw"``), or ``"zero"``.
        scale: Where the mean is not positive, advantages are 0 (``"mean"``), or it divides all
            the same and their signs change (``"signed_mean"``).
        eps: Added to the mean, for ``"signed_mean"`` alone.
    """

    singleton: Singleton = "zero"
    _: KW_ONLY
    scale: Literal["mean", "signed_mean"] = "mean"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice(self.name, "scale", self.scale, ("mean", "signed_mean"))


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

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice(self.name, "scale", self.scale, ("std", "none"))


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
        _check_choice(self.name, "scale", self.scale, ("std", "none"))
        if self.reward_clip is not None:
            raise ValueError("GiGPO: reward_clip cannot change the turns' returns, got one")
