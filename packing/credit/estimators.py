"""Advantage estimators: frozen dataclasses that name a method and its parameters."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from trajpack.kernels.corrections.penalties import KLEstimator
from trajpack.kernels.groups.group_advantages import (
    Baseline,
    Recipe,
    Rule,
    Scale,
    Singleton,
    rule_of,
)
from trajpack.kernels.scan.observations import Observation
from trajpack.kernels.validation import check_choice, check_integer, check_number

Truncated: TypeAlias = Literal["keep", "mask", "bootstrap"]
"""Treatment of a trajectory that was cut off, see `Trajectory.truncated`:

- ``"keep"``: as any other.
- ``"mask"``: its advantages are 0 and it counts in no statistics. Its returns stay, for a critic;
  `PackedBatch.loss_weights` can exclude its tokens from a loss.
- ``"bootstrap"``: the value after its last token is ``bootstrap``.
"""


NOT_NEGATIVE = ("gamma", "lam", "eps", "coefficient")
ABOVE_ZERO = ("reward_clip", "clamp", "rho_clip", "c_clip", "advantage_rho_clip")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def check_fields(owner: Any) -> None:
    """Raise unless each field of a dataclass has one of its choices or is within its bounds."""
    kind = owner.__class__.__name__
    for name, hint in _hints(owner.__class__).items():
        value: Any = getattr(owner, name, None)
        if get_origin(hint) is Literal:
            check_choice(kind, name, value, get_args(hint))
        elif value is None and type(None) in get_args(hint):
            continue
        elif name in NOT_NEGATIVE:
            check_number(kind, name, value, least=0, finite=True)
        elif name in ABOVE_ZERO:
            check_number(kind, name, value, above=0)
        elif name == "ddof":
            check_integer(kind, name, value, most=1)


@dataclass(frozen=True)
class KLPenalty:
    """A penalty for each generated token, subtracted from its reward.

    Reference: `trajpack.kernels.kl_penalty`; in the reward as in InstructGPT, arXiv 2203.02155.

    Args:
        coefficient: Factor of the estimate.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``, see `trajpack.kernels.kl_penalty`.
        clamp: Bound of an estimate on either side, or ``None``.
    """

    coefficient: float
    estimator: KLEstimator = "k1"
    clamp: float | None = 10.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Estimator:
    """Base class of all estimators.

    Args:
        truncated: Treatment of a trajectory that was cut off.
        reward_clip: Rewards are first brought within ``[-reward_clip, reward_clip]``: a turn's, or
            the score of a trajectory where the estimator compares trajectories.
    """

    _: KW_ONLY
    truncated: Truncated = "keep"
    reward_clip: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.truncated == "bootstrap" and not isinstance(self, TokenEstimator):
            raise ValueError(f"{self.name}: truncated='bootstrap' needs an estimator over tokens")

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
    last token generated before it. All turns of a trajectory are scanned in order, so both layouts
    give a token the same value. ``gamma`` discounts, and `Trajectory.turn_discount` is not used.

    More options are those of `Estimator`.

    Args:
        kl: Penalty in the reward, against ``ref_logprobs``.
        whiten: Whether advantages are scaled to mean 0 and standard deviation 1 over the batch.
        ddof: 0 or 1, subtracted from the number of tokens that divides their variance.
    """

    _: KW_ONLY
    kl: KLPenalty | None = None
    whiten: bool = False
    ddof: int = 1


@dataclass(frozen=True)
class GAE(TokenEstimator):
    """Generalized advantage estimation, token by token; needs ``values``.

    More options are those of `TokenEstimator`.

    Args:
        gamma: Discount from one token to the next.
        lam: λ.
        observation: Convention for tokens that were not generated, see
            `trajpack.kernels.gae`.

    Reference:
        `trajpack.kernels.gae`.
    """

    gamma: float = 1.0
    lam: float = 0.95
    observation: Observation = "carry"


@dataclass(frozen=True)
class TurnGAE(TokenEstimator):
    """Generalized advantage estimation, turn by turn; needs ``values``.

    A turn is one action: its value is that of its first token, and its tokens share its
    advantage. A turn without tokens is none; its reward belongs to the one before it.

    More options are those of `TokenEstimator`.

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

    More options are those of `TokenEstimator`.

    Args:
        gamma: Discount from one token to the next.
        lam: Factor of the traces.
        rho_clip: Largest weight of a temporal difference.
        c_clip: Largest weight of a trace.
        advantage_rho_clip: Largest weight of an advantage.
        observation: As of `GAE`.

    Reference:
        `trajpack.kernels.vtrace`.
    """

    gamma: float = 1.0
    lam: float = 1.0
    rho_clip: float = 1.0
    c_clip: float = 1.0
    advantage_rho_clip: float = 1.0
    observation: Observation = "carry"


@dataclass(frozen=True)
class ReinforcePlusPlus(TokenEstimator):
    """REINFORCE++: discounted returns of tokens, whitened over the batch.

    Without ``whiten`` it is plain reward-to-go.

    More options are those of `TokenEstimator`.

    Args:
        gamma: Discount from one token to the next.
        observation: As of `GAE`.

    Reference:
        Hu, REINFORCE++, arXiv 2501.03262.
    """

    gamma: float = 1.0
    observation: Observation = "carry"
    _: KW_ONLY
    whiten: bool = True


@dataclass(frozen=True)
class TurnReturns(Estimator):
    """Return of each token's turn, discounted over turns: `PackedBatch.turn_returns`.

    More options are those of `Estimator`.

    Args:
        whiten: As of `TokenEstimator`.
        ddof: As of `TokenEstimator`.

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


@dataclass(frozen=True)
class GroupEstimator(Estimator):
    """Comparison of the trajectories of a group by a recipe.

    A trajectory's score is the undiscounted sum of its turns' rewards; each of its generated tokens
    gets the trajectory's advantage. Its group is `Trajectory.group`, or itself without one. Where
    every group of a batch has one member, `PackedBatch.with_advantages` warns.

    More options are those of `Estimator`.

    Args:
        recipe: As of `trajpack.kernels.group_advantages`, which explains each. With
            ``"reinforce_plus_plus_baseline"`` advantages are whitened over the batch's tokens.
        baseline: As of `trajpack.kernels.group_advantages`; that of the recipe if ``None``.
        scale: As ``baseline``.
        ddof: 0 or 1, subtracted from the number of scores that divides their variance, or from the
            number of tokens by which ``"reinforce_plus_plus_baseline"`` whitens; 1 if ``None``.
        eps: As ``baseline``.
        singleton: As ``baseline``.

    Example:
        >>> GroupEstimator("max_rl", scale="signed_mean", singleton="raw").rule
        Rule(baseline='mean', scale='signed_mean', ddof=1, eps=1e-06, singleton='raw')
    """

    recipe: Recipe = "grpo"
    _: KW_ONLY
    baseline: Baseline | None = None
    scale: Scale | None = None
    ddof: int | None = None
    eps: float | None = None
    singleton: Singleton | None = None

    def __post_init__(self) -> None:
        rule_of(self.name, self.recipe, **self._changes)
        super().__post_init__()

    @property
    def name(self) -> str:
        """Name in error messages."""
        kind = type(self).__name__
        return f"{kind}({self.recipe!r})" if type(self) is GroupEstimator else kind

    @property
    def rule(self) -> Rule:
        """The recipe's rule with the options that are not ``None``."""
        return rule_of(self.name, self.recipe, **self._changes)

    @property
    def whitening(self) -> int | None:
        """The ``ddof`` that advantages are whitened with, None where they are not."""
        return self.rule.ddof if self.recipe == "reinforce_plus_plus_baseline" else None

    @property
    def _changes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Rule._fields}


@dataclass(frozen=True)
class GRPO(GroupEstimator):
    """Score less the group's mean, divided by its standard deviation: `GroupEstimator` so named.

    NeMo-RL's default is ``GRPO(singleton="zero", baseline="leave_one_out",
    scale="leave_one_out_std")``; see ``docs/credit/systems.md`` for those of other systems.
    """

    recipe: Recipe = field(default="grpo", init=False)


@dataclass(frozen=True)
class DrGRPO(GroupEstimator):
    """Score less the group's mean: `GroupEstimator` with ``recipe="dr_grpo"``."""

    recipe: Recipe = field(default="dr_grpo", init=False)


@dataclass(frozen=True)
class RLOO(GroupEstimator):
    """Score less the mean of the others: `GroupEstimator` with ``recipe="rloo"``."""

    recipe: Recipe = field(default="rloo", init=False)


@dataclass(frozen=True)
class GiGPO(GroupEstimator):
    """GRPO's advantage, and that of a turn among all turns from the same state.

    Needs ``state_ids``. A turn's step score is its `PackedBatch.turn_returns`, compared with those
    of all turns from the same state in the same group.

    More options are those of `GroupEstimator`, of both comparisons.

    Args:
        step_weight: Factor of the turn's advantage.
        scale: Whether both advantages are divided by the standard deviation of their group.
        singleton: Advantage of a group of one, and of the only turn of a state.

    Reference:
        Feng et al. 2025, Group-in-Group Policy Optimization, arXiv 2505.10978.
    """

    recipe: Recipe = field(default="grpo", init=False)
    step_weight: float = 1.0
    _: KW_ONLY
    baseline: Literal["mean", "leave_one_out"] = "mean"
    scale: Literal["std", "none"] = "std"
    singleton: Singleton = "zero"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward_clip is not None:
            raise ValueError("GiGPO: reward_clip cannot change the turns' returns, got one")
