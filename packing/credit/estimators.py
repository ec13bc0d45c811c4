"""Estimators: frozen values that name a method of credit assignment and its parameters."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Literal, TypeAlias, get_args

from trajpack.kernels.corrections.kl_penalty import KL_ESTIMATORS, KLEstimator
from trajpack.kernels.groups.group_advantages import Singleton
from trajpack.kernels.scan.observations import OBSERVATIONS, Observation
from trajpack.kernels.validation import check_choice, check_number

Truncated: TypeAlias = Literal["keep", "mask", "bootstrap"]
"""Treatment of a trajectory whose last turn was truncated:

- ``"keep"``: as any other.
- ``"mask"``: its advantages are 0 and it is in no statistics. Its returns stay, for a critic;
  `PackedBatch.loss_weights` can exclude its tokens from a loss.
- ``"bootstrap"``: the value after its last token is ``bootstrap``.
"""


def check_rate(op: str, name: str, rate: float) -> None:
    """Raise unless ``rate`` is a finite number, not negative."""
    if isinstance(rate, bool) or not isinstance(rate, Real):
        raise TypeError(f"{op}: {name} must be a number, got {rate!r}")
    if not 0 <= rate < float("inf"):
        raise ValueError(f"{op}: {name} must be finite and not negative, got {rate!r}")


@dataclass(frozen=True)
class KLPenalty:
    """A penalty for each generated token, subtracted from its reward.

    Reference: `trajpack.kernels.kl_penalty`; in the reward as in InstructGPT, arXiv 2203.02155.

    Args:
        coefficient: What the estimate is multiplied by.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``, see `trajpack.kernels.kl_penalty`.
        clamp: Bound of an estimate on either side, or ``None``.
    """

    coefficient: float
    estimator: KLEstimator = "k1"
    clamp: float | None = 10.0

    def __post_init__(self) -> None:
        check_rate("KLPenalty", "coefficient", self.coefficient)
        if self.estimator not in KL_ESTIMATORS:
            known = ", ".join(repr(name) for name in KL_ESTIMATORS)
            raise ValueError(f"KLPenalty: estimator must be one of {known}, got {self.estimator!r}")
        if self.clamp is not None:
            check_number("KLPenalty", "clamp", self.clamp, above=0)


@dataclass(frozen=True)
class Estimator:
    """Base class of all estimators.

    Args:
        truncated: Treatment of a trajectory whose last turn was truncated.
        reward_clip: Rewards are first brought within ``[-reward_clip, reward_clip]``: a turn's, or
            the score of a trajectory where the estimator compares trajectories.
    """

    _: KW_ONLY
    truncated: Truncated = "keep"
    reward_clip: float | None = None

    def __post_init__(self) -> None:
        if self.truncated not in get_args(Truncated):
            known = ", ".join(repr(name) for name in get_args(Truncated))
            raise ValueError(
                f"{self.name}: truncated must be one of {known}, got {self.truncated!r}"
            )
        if self.truncated == "bootstrap" and not isinstance(self, TokenEstimator):
            raise ValueError(f"{self.name}: truncated='bootstrap' needs an estimator over tokens")
        if self.reward_clip is not None:
            check_number(self.name, "reward_clip", self.reward_clip, above=0)
        for rate in ("gamma", "lam"):
            if hasattr(self, rate):
                check_rate(self.name, rate, getattr(self, rate))
        ddof = getattr(self, "ddof", 1)
        if isinstance(ddof, bool) or not isinstance(ddof, int):
            raise TypeError(f"{self.name}: ddof must be an int, got {ddof!r}")
        if ddof not in (0, 1):
            raise ValueError(f"{self.name}: ddof must be 0 or 1, got {ddof}")

    @property
    def name(self) -> str:
        """Name in error messages."""
        return type(self).__name__

    @property
    def whitening(self) -> int | None:
        """The ``ddof`` that advantages are whitened with, None where they are not."""
        return getattr(self, "ddof", 1) if getattr(self, "whiten", False) else None


@dataclass(frozen=True)
class TokenEstimator(Estimator):
    """Base class of estimators that scan the tokens of a trajectory from its end.

    A turn's reward is at its last generated token; the reward of a turn without tokens is at the
    last token generated before it. The walk goes through all turns of a trajectory
    in order, so that both layouts give a token the same value. `Trajectory.turn_discount` has no
    part in it: ``gamma`` discounts.

    Args:
        kl: Penalty in the reward, against ``ref_logprobs``.
        whiten: Whether advantages are brought to mean 0 and standard deviation 1 over the batch.
        ddof: Where they are, the variance is divided by the number of tokens less this, 0 or 1.
    """

    _: KW_ONLY
    kl: KLPenalty | None = None
    whiten: bool = False
    ddof: int = 1


@dataclass(frozen=True)
class GAE(TokenEstimator):
    """Generalized advantage estimation, token by token; needs ``values``.

    Args:
        gamma: Discount from one token to the next.
        lam: λ.
        observation: What tokens between generated ones mean, see
            `trajpack.kernels.scan.observations.Observation`.

    Reference:
        `trajpack.kernels.gae`.
    """

    gamma: float = 1.0
    lam: float = 0.95
    observation: Observation = "carry"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.name, "observation", self.observation, OBSERVATIONS)


@dataclass(frozen=True)
class TurnGAE(TokenEstimator):
    """Generalized advantage estimation, turn by turn; needs ``values``.

    A turn is one action: its value is that of its first token, and its tokens share its
    advantage. A turn without tokens is none; its reward belongs to the one before it.

    Args:
        gamma: Discount from one turn to the next.
        lam: λ.

    Reference:
        `trajpack.kernels.turn_gae`.
    """

    gamma: float = 1.0
    lam: float = 0.95


@dataclass(frozen=True)
class VTrace(TokenEstimator):
    """V-trace: GAE for tokens of an older policy; needs ``values`` and ``logprobs``.

    Args:
        gamma: Discount from one token to the next.
        lam: Factor of the traces.
        rho_clip: Largest weight of a temporal difference.
        c_clip: Largest weight of a trace.
        advantage_rho_clip: Largest weight of an advantage.
        observation: What tokens between generated ones mean.

    Reference:
        `trajpack.kernels.vtrace`.
    """

    gamma: float = 1.0
    lam: float = 1.0
    rho_clip: float = 1.0
    c_clip: float = 1.0
    advantage_rho_clip: float = 1.0
    observation: Observation = "carry"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.name, "observation", self.observation, OBSERVATIONS)
        for clip in ("rho_clip", "c_clip", "advantage_rho_clip"):
            check_number(self.name, clip, getattr(self, clip), above=0)


@dataclass(frozen=True)
class ReinforcePlusPlus(TokenEstimator):
    """REINFORCE++: discounted returns of tokens, whitened over the batch.

    Without ``whiten`` it is plain reward-to-go.

    Args:
        gamma: Discount from one token to the next.
        observation: What tokens between generated ones mean.

    Reference:
        Hu, REINFORCE++, arXiv 2501.03262.
    """

    gamma: float = 1.0
    observation: Observation = "carry"
    _: KW_ONLY
    whiten: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.name, "observation", self.observation, OBSERVATIONS)


@dataclass(frozen=True)
class TurnReturns(Estimator):
    """The return of a token's turn, `PackedBatch.turn_returns`: discounted over the turns.

    Args:
        whiten: Whether they are brought to mean 0 and standard deviation 1 over the batch.
        ddof: Where they are, the variance is divided by the number of tokens less this, 0 or 1.

    Reference:
        AReaL's ``MathMultiTurnAgent``.
    """

    _: KW_ONLY
    whiten: bool = False
    ddof: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_clip is not None:
            raise ValueError("TurnReturns: reward_clip cannot change returns as packed, got one")


def _check_choice(op: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        *all_but_last, last = map(repr, choices)
        raise ValueError(f"{op}: {name} must be {', '.join(all_but_last)} or {last}, got {value!r}")


@dataclass(frozen=True)
class GroupEstimator(Estimator):
    """Base class of estimators that compare the trajectories of a group.

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
