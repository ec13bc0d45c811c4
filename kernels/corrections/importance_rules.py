"""What an off-policy correction does with importance ratios: small frozen values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Literal, TypeAlias, get_args

Level: TypeAlias = Literal["token", "segment", "geometric", "none"]
Outside: TypeAlias = Literal["truncate", "mask", "keep"]


@dataclass(frozen=True)
class Rejection:
    """Drop every token whose ratio lies outside a window, whatever weight it has.

    Bounds are of the ratio itself, trainer over rollout, ``exp(logprobs - rollout_logprobs)``:
    neither of its logarithm nor of its inverse, for which there is `of_inverse`. At level
    ``"segment"`` or ``"geometric"`` all tokens of a segment stay or go together: sequence
    rejection. The tokens that stay keep their weights.

    Example:
        >>> Rejection(0.999, 1.001)
        Rejection(low=0.999, high=1.001, level='geometric')

    Reference:
        ``compute_rollout_rejection_mask`` of verl 0.9.1, see `of_inverse`; ``seq-mask-tis`` of
        NeMo-RL is ``Correction(outside="keep", rejection=Rejection(low, high))``.
    """

    low: float = 0.0
    """The smallest ratio that stays."""
    high: float = math.inf
    """The largest ratio that stays."""
    level: Level = "geometric"
    """Which ratio is looked at: ``"token"``, ``"segment"`` or ``"geometric"``, as in
    `Correction.level`."""

    def __post_init__(self) -> None:
        _check_choice("Rejection", "level", self.level, get_args(Level)[:3])
        _check_window("Rejection", self.low, self.high)

    @classmethod
    def of_inverse(
        cls, low: float = 0.0, high: float = math.inf, level: Level = "geometric"
    ) -> Rejection:
        """Keep what has its inverse ratio, rollout over trainer, in the window.

        That is ``Rejection(1 / high, 1 / low, level)``.

        Example:
            >>> Rejection.of_inverse(0.5, 4.0, level="token")
            Rejection(low=0.25, high=2.0, level='token')

        Reference:
            verl 0.9.1, ``compute_rollout_rejection_mask``, whose k1 is minus the logarithm of the
            ratio: a threshold ``"low_high"`` of ``token_k1`` is level ``"token"`` here, of
            ``seq_sum_k1`` ``"segment"``, of ``seq_mean_k1`` ``"geometric"``; a single number is
            ``"high"``, with ``low = 1 / high``.
        """
        _check_window("Rejection", low, high)
        return cls(1.0 / high, 1.0 / low if low else math.inf, level)


@dataclass(frozen=True)
class Correction:
    """How importance ratios become weights.

    Named ones: `tis`, `icepop`, `mis`. Level ``"segment"`` is what others call sequence level: a
    segment is whatever `importance_weights` is given, a trajectory, a turn or a sequence.

    Example:
        >>> Correction.tis(2.0) == Correction(level="token", outside="truncate", high=2.0)
        True
        >>> Correction.icepop().outside
        'mask'

    Reference:
        Levels and windows: verl, ``rollout_corr_helper.py``. Truncation: Yao et al., Your
        Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025. Masked tokens:
        IcePop, arXiv 2510.18855. The geometric level: GSPO, arXiv 2507.18071.
    """

    level: Level = "token"
    """``"token"``: each token has its own ratio. ``"segment"``: all tokens of a segment (a turn,
    a sequence) have the product of their ratios. ``"geometric"``: they have its n-th root for n
    generated tokens. ``"none"``: the weight is 1, and only ``rejection`` has a say."""
    outside: Outside = "truncate"
    """What happens outside ``[low, high]``. ``"truncate"``: the nearer bound takes the ratio's
    place. ``"mask"``: the weight is 0. ``"keep"``: nothing."""
    low: float = 0.0
    """Lower end of the window."""
    high: float = math.inf
    """Upper end of the window."""
    normalize: bool = False
    """Whether weights, once bounded and before ``rejection``, are divided by their mean: over
    generated tokens, or over segments where the level is that of segments."""
    rejection: Rejection | None = None
    """What is dropped on top of that."""

    def __post_init__(self) -> None:
        _check_choice("Correction", "level", self.level, get_args(Level))
        _check_choice("Correction", "outside", self.outside, get_args(Outside))
        _check_window("Correction", self.low, self.high)
        if not isinstance(self.normalize, bool):
            raise TypeError(f"Correction: normalize must be a bool, got {self.normalize!r}")
        if not isinstance(self.rejection, (Rejection, type(None))):
            raise TypeError(
                f"Correction: rejection must be a Rejection or None, got {self.rejection!r}"
            )

    @classmethod
    def tis(cls, cap: float = 2.0, level: Level = "token") -> Correction:
        """Truncate: ``min(ratio, cap)``.

        Reference:
            Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training,
            2025: truncated importance sampling; ``vanilla_tis_function`` of slime.
        """
        return cls(level=level, outside="truncate", high=cap)

    @classmethod
    def icepop(cls, low: float = 0.5, high: float = 5.0) -> Correction:
        """Weigh a token with its ratio where that is in the window, and with 0 elsewhere.

        Reference:
            Every Step Evolves (Ring-1T), arXiv 2510.18855; ``icepop_function`` of slime.
        """
        return cls(level="token", outside="mask", low=low, high=high)

    @classmethod
    def mis(cls, low: float = 0.0, high: float = 2.0, level: Level = "segment") -> Correction:
        """Weigh whole segments with their ratio where it is in the window, else with 0.

        Reference:
            Liu et al., When Speed Kills Stability, 2025: masked importance sampling over
            sequences. (``seq-mask-tis`` of NeMo-RL keeps the ratios of tokens: `Rejection`.)
        """
        return cls(level=level, outside="mask", low=low, high=high)

    @property
    def needs_segments(self) -> bool:
        """Whether a level of it is one of segments."""
        levels = {self.level, self.rejection.level if self.rejection else "none"}
        return not levels.isdisjoint(("segment", "geometric"))


def _check_choice(kind: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = ", ".join(map(repr, choices))
        raise ValueError(f"{kind}: {name} must be one of {expected}, got {value!r}")


def _check_window(kind: str, low: float, high: float) -> None:
    for name, value in (("low", low), ("high", high)):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{kind}: {name} must be a number, got {value!r}")
    if not 0 <= low <= high or high == 0 or low == math.inf:
        raise ValueError(f"{kind}: must have 0 <= low <= high, got low={low} and high={high}")
