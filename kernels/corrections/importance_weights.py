"""Importance weights of tokens, and rules for the ratios of two policies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from trajpack.kernels.corrections.slots import (
    LOG_BOUND,
    Places,
    slots_of_tokens,
    sum_logarithms,
)
from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.segments import check_segments, owners_of_entries
from trajpack.kernels.validation import (
    check_choice,
    check_number,
    check_segments_within,
    check_tensor,
)

Level: TypeAlias = Literal["token", "segment", "geometric", "none"]
Measure: TypeAlias = Literal["ratio", "tv", "binary_kl"]
Outside: TypeAlias = Literal["truncate", "mask", "keep"]
OF_SEGMENTS = ("segment", "geometric", "any")


class _Window:
    """Bounds of a ratio; a base class."""

    low: float
    high: float

    def _check(self) -> None:
        kind, low, high = type(self).__name__, self.low, self.high
        check_number(kind, "low", low)
        check_number(kind, "high", high)
        if not 0 <= low <= high or high == 0 or low == math.inf:
            raise ValueError(f"{kind}: must have 0 <= low <= high, got low={low} and high={high}")

    @property
    def log_window(self) -> tuple[float, float]:
        """Float32 logarithms of the bounds, rounded inward."""
        logs = np.array([math.log(self.low) if self.low else -math.inf, math.log(self.high)])
        least, most = logs.astype(np.float32)
        least = np.nextafter(least, np.float32(math.inf)) if least < logs[0] else least
        most = np.nextafter(most, np.float32(-math.inf)) if most > logs[1] else most
        return float(least), float(most)


@dataclass(frozen=True)
class Rejection(_Window):
    """Set the weight of every token to 0 whose ratio or divergence lies outside a window.

    Bounds are of the ratio, trainer over rollout, ``exp(logprobs - rollout_logprobs)``; for bounds
    of its inverse see `of_inverse`. At level ``"segment"`` or ``"geometric"`` all tokens of a
    segment are kept or rejected together (sequence rejection).

    Attributes:
        low: Smallest ratio that is kept. Of a divergence: the largest that is kept where the
            trainer's probability is below the rollout's; 0 is as ``high``.
        high: Largest ratio that is kept. Of a divergence: the largest where it is above.
        level: Ratio that is compared: ``"token"``, ``"segment"`` or ``"geometric"``, as in
            `Correction.level`. Of divergences: ``"token"``, ``"geometric"``, the mean over the
            segment, or ``"any"``, which rejects a segment with a token outside.
        measure: What is compared: ``"ratio"``; ``"tv"``, the difference of the probabilities of the
            token (total variation); or ``"binary_kl"``, the KL divergence of rollout from trainer
            between this token and all others.
        one_sided: Whether a token is rejected only if its probability went where its advantage
            pushes it: up where the advantage is above 0, else down. For divergences of tokens.

    Example:
        >>> Rejection(0.999, 1.001).level
        'geometric'
        >>> dppo = Rejection(high=0.2, level="token", measure="tv", one_sided=True)

    Reference:
        ``compute_rollout_rejection_mask`` of verl 0.9.1, see `of_inverse`; ``seq-mask-tis`` of
        NeMo-RL is ``Correction(outside="keep", rejection=Rejection(low, high))``. Divergences:
        DPPO, arXiv 2602.04879; ``dppo_tv`` and ``dppo_kl`` of verl 0.9.1, ``is_correction_gating``
        of OpenRLHF 0.11.
    """

    low: float = 0.0
    high: float = math.inf
    level: Level | Literal["any"] = "geometric"
    measure: Measure = "ratio"
    one_sided: bool = False

    def __post_init__(self) -> None:
        check_choice("Rejection", "measure", self.measure, get_args(Measure))
        levels = get_args(Level)[:3] if self.measure == "ratio" else ("token", "geometric", "any")
        check_choice("Rejection", "level", self.level, levels)
        if self.one_sided and (self.measure == "ratio" or self.level == "geometric"):
            what = f"measure={self.measure!r} and level={self.level!r}"
            raise ValueError(f"Rejection: one_sided needs a divergence of tokens, got {what}")
        if self.measure == "ratio":
            self._check()
            return
        for name in ("low", "high"):
            check_number("Rejection", name, getattr(self, name))
            if getattr(self, name) < 0:
                raise ValueError(f"Rejection: {name} must be 0 or more, got {getattr(self, name)}")

    @classmethod
    def of_inverse(
        cls, low: float = 0.0, high: float = math.inf, level: Level = "geometric"
    ) -> Rejection:
        """Return the rejection by a window of the inverse ratio, rollout over trainer.

        That is ``Rejection(1 / high, 1 / low, level)``.

        Example:
            >>> Rejection.of_inverse(0.5, 4.0, "token") == Rejection(0.25, 2.0, "token")
            True

        Reference:
            verl 0.9.1, ``compute_rollout_rejection_mask``, whose k1 is minus the logarithm of the
            ratio: a threshold ``"low_high"`` of ``token_k1`` is level ``"token"`` here, of
            ``seq_sum_k1`` ``"segment"``, of ``seq_mean_k1`` ``"geometric"``; a single number is
            ``"high"``, with ``low = 1 / high``.
        """
        cls(low, high, level)  # which checks them
        return cls(1.0 / high, 1.0 / low if low else math.inf, level)


@dataclass(frozen=True)
class Correction(_Window):
    """Rule by which importance ratios become weights.

    `tis`, `icepop` and `mis` are published ones. Level ``"segment"`` is elsewhere called sequence
    level: the segments are those given to `importance_weights`: trajectories, turns or sequences.

    Attributes:
        level: ``"token"``: each token has its own ratio. ``"segment"``: all tokens of a segment (a
            turn, a sequence) have the product of their ratios. ``"geometric"``: they have its n-th
            root for n generated tokens. ``"none"``: the weight is 1; only ``rejection`` applies.
        outside: Treatment of ratios outside ``[low, high]``. ``"truncate"``: replaced by the nearer
            bound. ``"mask"``: weight 0. ``"keep"``: unchanged.
        low: Lower end of the window.
        high: Upper end of the window.
        normalize: Whether bounded weights are divided by their mean before ``rejection``: over
            generated tokens, or over segments at a level of segments.
        rejection: Additional rejection of tokens or segments.

    Example:
        >>> Correction.tis(2.0) == Correction(level="token", outside="truncate", high=2.0)
        True
        >>> Correction.icepop().outside
        'mask'

    Reference:
        Levels and windows: verl, ``rollout_corr_helper.py``. Truncation: Yao et al., Your
        Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025. Masked tokens:
        IcePop, arXiv 2510.18855. Masked sequences: Liu et al., When Speed Kills Stability, 2025.
        The geometric level: GSPO, arXiv 2507.18071.
    """

    level: Level = "token"
    outside: Outside = "truncate"
    low: float = 0.0
    high: float = math.inf
    normalize: bool = False
    rejection: Rejection | None = None

    def __post_init__(self) -> None:
        check_choice("Correction", "level", self.level, get_args(Level))
        check_choice("Correction", "outside", self.outside, get_args(Outside))
        self._check()
        if not isinstance(self.normalize, bool):
            raise TypeError(f"Correction: normalize must be a bool, got {self.normalize!r}")
        if not isinstance(self.rejection, (Rejection, type(None))):
            raise TypeError(
                f"Correction: rejection must be a Rejection or None, got {self.rejection!r}"
            )

    @classmethod
    def tis(cls, cap: float = 2.0, level: Level = "token") -> Correction:
        """Truncate: ``min(ratio, cap)``, as ``vanilla_tis_function`` of slime."""
        return cls(level=level, outside="truncate", high=cap)

    @classmethod
    def icepop(cls, low: float = 0.5, high: float = 5.0) -> Correction:
        """Weigh a token by its ratio inside the window, and by 0 outside."""
        return cls(level="token", outside="mask", low=low, high=high)

    @classmethod
    def mis(cls, low: float = 0.0, high: float = 2.0, level: Level = "segment") -> Correction:
        """Weigh whole segments by their ratio inside the window, and by 0 outside.

        ``seq-mask-tis`` of NeMo-RL keeps the ratios of tokens: `Rejection`.
        """
        return cls(level=level, outside="mask", low=low, high=high)

    @property
    def needs_segments(self) -> bool:
        """Whether a level is one of segments."""
        levels = {self.level, self.rejection.level if self.rejection else "none"}
        return not levels.isdisjoint(OF_SEGMENTS)


OP = "importance_weights"
OTHERS_EPS = 1e-8
"""Added to the probability of all other tokens, as in verl."""
DTYPES = (torch.float32, torch.float64)
IMPORTANCE_METRICS = (
    "tokens",
    "ratio_mean",
    "ratio_min",
    "ratio_max",
    "low_fraction",
    "high_fraction",
    "rejected_fraction",
    "weight_mean",
    "weight_max",
    "effective_sample_size",
    "k1",
    "k3",
)
"""Names of the metrics of `importance_weights`, in order."""


def importance_weights(  # noqa: PLR0913 - columns of a batch
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    correction: Correction,
    *,
    segments: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    metrics: bool = True,
    impl: Impl = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weigh tokens that the rollout's policy sampled as if the trainer's had sampled them.

    A token's ratio is ``exp(logprobs - rollout_logprobs)``. Level ``"segment"`` sums these
    logarithms over the segment's generated tokens, level ``"geometric"`` averages them; the
    logarithm is then clamped to ±20. For a `Rejection` the logarithms of tokens are clamped to ±20
    before they are summed, and sums and means are not: as in verl. Logarithms are float32. Their
    sums are exact, of multiples of 2⁻³², if their magnitudes add up to less than 2³¹; a token's
    finite logarithm beyond ±1024 counts as ±1024. Infinities of both signs add up to NaN.
    `Correction` defines the weight of a ratio. For turns, pass ``turn_spans`` and ``turn_ids`` of a
    packed batch; for sequences, ``cu_seqlens``.

    Args:
        logprobs: ``[tokens]`` float32 or float64: of the trainer's policy, before its update.
        rollout_logprobs: ``[tokens]`` float32 or float64: of the policy that sampled.
        loss_mask: ``[tokens]`` bool: True on generated tokens. Log-probabilities elsewhere may
            have any value, NaN included.
        correction: Rule for the ratios.
        segments: int32 boundaries ``[segments + 1]``, or spans ``[segments, 2]`` of first token
            and one past the last. Needed for a level of segments, else unused.
        segment_ids: ``[tokens]`` int32 or int64: the token's segment; outside ``[0, segments)``:
            none, and weight 0. Without it the segment is searched in ``segments``.
        advantages: ``[tokens]`` float32 or float64, for a one-sided rejection, else unused.
        metrics: Whether to measure. Without it Triton takes a launch and half of the work less.
        impl: As of `segment_sum`. The implementations agree to 3e-7 of a weight and to 1e-6 of a
            metric; counts and shares are equal.

    Returns:
        weights: ``[tokens]`` float32: 0 where ``loss_mask`` is False. Not differentiable. A NaN in
            a ratio is outside every window, and stays NaN in a weight that is not masked or
            rejected.
        metrics: ``[12]`` float64, named by ``IMPORTANCE_METRICS`` of the module
            ``trajpack.kernels.corrections.importance_weights``, over generated tokens (those of a
            segment, where segments are needed); all 0 where there are none; ``[0]`` without
            ``metrics``. The ratios are
            those of ``correction.level``, before any bound; ``low_fraction`` and
            ``high_fraction`` are the tokens beyond the ends of its window. The effective sample
            size is ``(Σw)² / (n · Σw²)`` of the weights, in ``[0, 1]``; ``k1`` and ``k3``
            estimate the KL divergence of rollout from trainer (`kl_penalty`).

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, a level of segments has none, a one-sided
            rejection has no advantages, or Triton is named for a rejection by a divergence,
            which plain torch computes.

    Example:
        >>> logprobs = torch.tensor([-1.0, -0.1, 0.0])
        >>> rollout_logprobs = torch.tensor([-1.5, -2.0, -9.9])
        >>> loss_mask = torch.tensor([True, True, False])
        >>> importance_weights(logprobs, rollout_logprobs, loss_mask, Correction.tis(2.0))[0]
        tensor([1.6487, 2.0000, 0.0000])

    Reference:
        Levels, bounds and rejection: verl ``rollout_corr_helper.py``. The geometric ratio: GSPO,
        arXiv 2507.18071. The rules: `Correction`.
    """
    check_weighed(logprobs, rollout_logprobs, loss_mask, correction)
    places = None
    if correction.needs_segments:
        if segments is None:
            raise ValueError(f"{OP}: a level of segments needs segments, got {correction!r}")
        num_tokens = loss_mask.shape[0]
        check_segments(OP, segments, loss_mask.device)
        num_segments = segments.shape[0] - int(segments.ndim == 1)
        if segment_ids is not None:
            each: dict[str, Any] = {"device": loss_mask.device, "entries": num_tokens}
            check_tensor(OP, "segment_ids", segment_ids, dtypes=(torch.int32, torch.int64), **each)
        elif segments.ndim == 2:
            check_segments_within(OP, "segments", segments, num_tokens)
            owner, inside = owners_of_entries(segments, num_tokens)
            segment_ids = torch.where(inside, owner, -1)
        bounds = segments.contiguous() if segment_ids is None else None
        places = Places(bounds, segment_ids, None, num_segments, num_segments)
    tokens = logprobs, rollout_logprobs, loss_mask
    return weigh_tokens(
        *tokens, correction, places, advantages=advantages, metrics=metrics, impl=impl
    )


def weigh_tokens(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    correction: Correction,
    places: Places | None,
    *,
    advantages: torch.Tensor | None = None,
    metrics: bool = True,
    impl: Impl,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `importance_weights` of checked tensors, by slots of ``places``."""
    rejection = correction.rejection or Rejection()
    if not correction.needs_segments:
        places = None
    if rejection.measure != "ratio":
        check_choice(OP, "impl", impl, ("auto", "torch"))
        if rejection.one_sided:
            if advantages is None:
                raise ValueError(f"{OP}: a one-sided rejection needs advantages, got none")
            each: dict[str, Any] = {"device": logprobs.device, "entries": logprobs.shape[0]}
            check_tensor(OP, "advantages", advantages, dtypes=DTYPES, **each)
        with torch.no_grad():
            weights, measured = importance_weights_reference(
                logprobs, rollout_logprobs, loss_mask, correction, places, advantages
            )
        return weights, measured if metrics else measured.new_empty(0)
    *tables, num_segments, num_slots = places or Places(None, None, None, 0, 0)
    weights, measured = torch.ops.trajpack.importance_weights(
        [one.detach().contiguous() for one in (logprobs, rollout_logprobs, loss_mask)],
        [None if one is None else one.contiguous() for one in tables],
        [num_segments, num_slots],
        [correction.level, correction.outside, rejection.level if correction.rejection else ""],
        [correction.low, correction.high, rejection.low, rejection.high],
        correction.normalize,
        metrics,
        resolve_impl(OP, impl, logprobs.device),
    )
    return weights, measured


def importance_weights_reference(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    correction: Correction,
    places: Places | None,
    advantages: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Define `weigh_tokens` in plain torch; no value is read by the host."""
    slots, num_slots, used = loss_mask, 0, loss_mask

    def of_slots(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(num_slots + 1).index_add_(0, slots, values)[:num_slots]

    log_ratios = (logprobs - rollout_logprobs).float()
    if places is not None:
        num_slots = places.num_slots
        slots = slots_of_tokens(places, loss_mask.shape[0], loss_mask.device)
        loss_mask = loss_mask & (slots < num_slots)
        counts = of_slots(loss_mask.long())
        used = counts > 0

    def of_level(logarithms: torch.Tensor, level: str) -> torch.Tensor:
        """Return the logarithms, or their sum or mean over each slot."""
        if level not in OF_SEGMENTS:
            return logarithms
        sums = sum_logarithms(torch.where(loss_mask, logarithms, 0.0), slots, num_slots)
        return sums if level == "segment" else sums / counts.clamp(min=1)

    def at_tokens(values: torch.Tensor, level: str) -> torch.Tensor:
        """Return the value of each token, or of its slot."""
        return torch.cat([values, values.new_zeros(1)])[slots] if level in OF_SEGMENTS else values

    level, rejection = correction.level, correction.rejection
    logs = of_level(log_ratios, level).clamp(-LOG_BOUND, LOG_BOUND)
    bounded = _bounded(logs, correction)
    if correction.normalize:
        counted = used if level in OF_SEGMENTS else loss_mask
        mean = torch.where(counted, bounded, 0.0).sum() / counted.sum().clamp(min=1)
        bounded = bounded / torch.where(mean > 0, mean, 1.0)
    weights, logs = at_tokens(bounded, level), at_tokens(logs, level)
    kept = loss_mask
    if rejection is not None and rejection.measure != "ratio":
        beyond = _beyond(rejection, logprobs, rollout_logprobs, advantages)
        sizes = _divergence(rejection, logprobs, rollout_logprobs)
        if rejection.level != "token":
            sizes = sizes if rejection.level == "geometric" else beyond.double()
            means = of_slots(torch.where(loss_mask, sizes, 0.0)) / counts.clamp(min=1)
            bound = rejection.high if rejection.level == "geometric" else 0.0
            beyond = at_tokens(~(means <= bound), rejection.level)
        kept = kept & ~beyond
    elif rejection is not None:
        looked = of_level(log_ratios.clamp(-LOG_BOUND, LOG_BOUND), rejection.level)
        low, high = rejection.log_window
        kept = kept & at_tokens((looked >= low) & (looked <= high), rejection.level)
    weights = torch.where(kept, weights, 0.0)
    metrics = _metrics(loss_mask, correction, log_ratios, logs=logs, kept=kept, weights=weights)
    return weights.float(), metrics


def _divergence(
    rejection: Rejection, logprobs: torch.Tensor, rollout_logprobs: torch.Tensor
) -> torch.Tensor:
    """Return the divergence of each token, float64."""
    trained, sampled = logprobs.double(), rollout_logprobs.double()
    now, before = trained.exp(), sampled.exp()
    if rejection.measure == "tv":
        return (now - before).abs()
    others = torch.log((1 - before + OTHERS_EPS) / (1 - now + OTHERS_EPS))
    return before * (sampled - trained) + (1 - before) * others


def _beyond(
    rejection: Rejection,
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor | None,
) -> torch.Tensor:
    """Return where a token's divergence is beyond the bound of its side."""
    size = _divergence(rejection, logprobs, rollout_logprobs)
    rose, fell = logprobs > rollout_logprobs, logprobs < rollout_logprobs
    above = rose & (size > rejection.high)
    below = fell & (size > (rejection.low or rejection.high))
    if not rejection.one_sided or advantages is None:
        beyond = above | below
    else:
        beyond = torch.where(advantages > 0, above, below)
    return beyond | size.isnan()  # a NaN is beyond every bound, as in verl


def _bounded(logs: torch.Tensor, correction: Correction) -> torch.Tensor:
    """Return weights of clamped logarithms, before normalization and rejection."""
    ratios = logs.double().exp()
    if correction.level == "none":
        return torch.ones_like(ratios)
    if correction.outside == "keep":
        return ratios
    low, high = correction.log_window
    if correction.outside == "mask":
        return torch.where((logs >= low) & (logs <= high), ratios, 0.0)
    ratios = torch.where(logs < low, correction.low, ratios)
    return torch.where(logs > high, correction.high, ratios)


def _metrics(
    mask: torch.Tensor,
    correction: Correction,
    log_ratios: torch.Tensor,
    *,
    logs: torch.Tensor,
    kept: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the metrics of `IMPORTANCE_METRICS`."""
    if mask.shape[0] == 0:
        return weights.new_zeros(len(IMPORTANCE_METRICS))
    num, ratios, (low, high) = mask.sum(), logs.double().exp(), correction.log_window

    def mean(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values, 0.0).sum() / num

    total, squares = weights.sum(), (weights * weights).sum()
    x = log_ratios.double().clamp(-LOG_BOUND, LOG_BOUND)
    measured = (
        num.double(),
        mean(ratios),
        torch.where(mask, ratios, torch.inf).amin(),
        torch.where(mask, ratios, -torch.inf).amax(),
        mean((logs < low).double()),
        mean((logs > high).double()),
        mean((~kept).double()),
        total / num,
        torch.where(mask, weights, 0.0).amax(),
        total * total / (num * squares).clamp(min=torch.finfo(torch.float64).tiny),
        mean(-x),
        mean(torch.expm1(x) - x),
    )
    return torch.where(num > 0, torch.stack(measured), 0.0)


def check_weighed(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    correction: Correction,
) -> None:
    """Raise unless the inputs over tokens agree; the errors of `importance_weights`."""
    if not isinstance(correction, Correction):
        raise TypeError(f"{OP}: correction must be a Correction, got {correction!r}")
    check_tensor(OP, "logprobs", logprobs, dtypes=DTYPES)
    each: dict[str, Any] = {"device": logprobs.device, "entries": logprobs.shape[0]}
    check_tensor(OP, "rollout_logprobs", rollout_logprobs, dtypes=DTYPES, **each)
    check_tensor(OP, "loss_mask", loss_mask, dtypes=(torch.bool,), **each)


def _run(
    tokens: list[torch.Tensor], tables: list[Any], sizes: list[int], names: list[Any],
    bounds: list[Any], normalize: bool, measures: bool, impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    level, outside, rejected = names
    low, high, reject_low, reject_high = bounds
    rejection = Rejection(reject_low, reject_high, rejected) if rejected else None
    correction = Correction(level, outside, low, high, normalize, rejection)
    places = Places(*tables, *sizes) if correction.needs_segments else None
    if tables[0] is not None:
        check_segments_within(OP, "segments", tables[0], tokens[0].shape[0])
    inputs: list[Any] = [*tokens, correction, places]
    if impl == "torch":
        weights, metrics = importance_weights_reference(*inputs)
        return weights, metrics if measures else metrics.new_empty(0)
    from trajpack.kernels.corrections.importance_weights_triton import importance_weights_forward

    return importance_weights_forward(*inputs, measures=measures)


register_op(
    "importance_weights(Tensor[] tokens, Tensor?[] tables, SymInt[] sizes, str[] names, "
    "float[] bounds, bool normalize, bool measures, str impl) -> (Tensor, Tensor)",
    _run,
    lambda tokens, *inputs: (
        tokens[0].new_empty(tokens[0].shape, dtype=torch.float32),
        tokens[0].new_empty(len(IMPORTANCE_METRICS) if inputs[-2] else 0, dtype=torch.float64),
    ),
)
