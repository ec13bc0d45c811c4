"""Importance weights of tokens, and rules for the ratios of two policies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.reduce.segment_reduce import (
    check_segments,
    owners_of_entries,
    segment_sum,
)
from trajpack.kernels.validation import (
    check_boundaries,
    check_choice,
    check_number,
    check_segments_within,
    check_tensor,
)

Level: TypeAlias = Literal["token", "segment", "geometric", "none"]
Outside: TypeAlias = Literal["truncate", "mask", "keep"]
OF_SEGMENTS = ("segment", "geometric")


@dataclass(frozen=True)
class Rejection:
    """Set the weight of every token to 0 whose ratio lies outside a window.

    Bounds are of the ratio, trainer over rollout, ``exp(logprobs - rollout_logprobs)``; for bounds
    of its inverse see `of_inverse`. At level ``"segment"`` or ``"geometric"`` all tokens of a
    segment are kept or rejected together (sequence rejection).

    Attributes:
        low: Smallest ratio that is kept.
        high: Largest ratio that is kept.
        level: Ratio that is compared: ``"token"``, ``"segment"`` or ``"geometric"``, as in
            `Correction.level`.

    Example:
        >>> Rejection(0.999, 1.001)
        Rejection(low=0.999, high=1.001, level='geometric')

    Reference:
        ``compute_rollout_rejection_mask`` of verl 0.9.1, see `of_inverse`; ``seq-mask-tis`` of
        NeMo-RL is ``Correction(outside="keep", rejection=Rejection(low, high))``.
    """

    low: float = 0.0
    high: float = math.inf
    level: Level = "geometric"

    def __post_init__(self) -> None:
        check_choice("Rejection", "level", self.level, get_args(Level)[:3])
        _check_window("Rejection", self.low, self.high)

    @classmethod
    def of_inverse(
        cls, low: float = 0.0, high: float = math.inf, level: Level = "geometric"
    ) -> Rejection:
        """Return the rejection by a window of the inverse ratio, rollout over trainer.

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

    @property
    def log_window(self) -> tuple[float, float]:
        """Logarithms of the bounds."""
        return math.log(self.low) if self.low else -math.inf, math.log(self.high)


@dataclass(frozen=True)
class Correction:
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
        IcePop, arXiv 2510.18855. The geometric level: GSPO, arXiv 2507.18071.
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
        """Weigh a token by its ratio inside the window, and by 0 outside.

        Reference:
            Every Step Evolves (Ring-1T), arXiv 2510.18855; ``icepop_function`` of slime.
        """
        return cls(level="token", outside="mask", low=low, high=high)

    @classmethod
    def mis(cls, low: float = 0.0, high: float = 2.0, level: Level = "segment") -> Correction:
        """Weigh whole segments by their ratio inside the window, and by 0 outside.

        Reference:
            Liu et al., When Speed Kills Stability, 2025: masked importance sampling over
            sequences. (``seq-mask-tis`` of NeMo-RL keeps the ratios of tokens: `Rejection`.)
        """
        return cls(level=level, outside="mask", low=low, high=high)

    @property
    def needs_segments(self) -> bool:
        """Whether a level is one of segments."""
        levels = {self.level, self.rejection.level if self.rejection else "none"}
        return not levels.isdisjoint(OF_SEGMENTS)


def _check_window(kind: str, low: float, high: float) -> None:
    check_number(kind, "low", low)
    check_number(kind, "high", high)
    if not 0 <= low <= high or high == 0 or low == math.inf:
        raise ValueError(f"{kind}: must have 0 <= low <= high, got low={low} and high={high}")


OP = "importance_weights"
DTYPES = (torch.float32, torch.float64)
LOG_BOUND = 20.0
"""Logarithms of ratios are clamped to ``[-LOG_BOUND, LOG_BOUND]``, as in verl."""

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


def importance_weights(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    correction: Correction,
    *,
    segments: torch.Tensor | None = None,
    segment_ids: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weigh tokens that the rollout's policy sampled as if the trainer's had sampled them.

    A token's ratio is ``exp(logprobs - rollout_logprobs)``. Level ``"segment"`` sums these
    logarithms over the segment's generated tokens, level ``"geometric"`` averages them; the
    logarithm is then clamped to ±20. For a `Rejection` the logarithms of tokens are clamped to ±20
    before they are summed, and sums and means are not: as in verl. `Correction` defines the weight
    of a ratio. For turns, pass ``turn_spans`` and ``turn_ids`` of a packed batch; for sequences,
    ``cu_seqlens``.

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
        impl: As of `segment_sum`. The implementations agree to 3e-7 of a weight, and to rounding
            of float64 in metrics.

    Returns:
        weights: ``[tokens]`` float32: 0 where ``loss_mask`` is False. Not differentiable. A NaN in
            a ratio is outside every window, and stays NaN in a weight that is not masked or
            rejected.
        metrics: ``[12]`` float64, named by ``IMPORTANCE_METRICS`` of the module
            ``trajpack.kernels.corrections.importance_weights``, over generated tokens (those of a
            segment, where segments are needed); all 0 where there are none. The ratios are
            those of ``correction.level``, before any bound; ``low_fraction`` and
            ``high_fraction`` are the tokens beyond the ends of its window. The effective sample
            size is ``(Σw)² / (n · Σw²)`` of the weights, in ``[0, 1]``; ``k1`` and ``k3``
            estimate the KL divergence of rollout from trainer (`kl_penalty`).

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, or a level of segments has none.

    Cost: two launches, which read 9 bytes of a token and write 4. Segments add one, which sums each
    by one warp, and reads the tokens once more; ``segment_ids`` that are not given add another.
    ``normalize`` adds one. Sums in float64. No copy of contiguous tensors that begin at a multiple
    of 16 bytes, no host synchronisation. With torch's implementation 55 to 95 small operations.
    Metrics and the mean of ``Correction(normalize=True)`` are of this rank; means combine by
    ``tokens``.

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
    return importance_of_groups(
        logprobs, rollout_logprobs, loss_mask, correction,
        segments=segments, segment_ids=segment_ids, groups=None, impl=impl,
    )  # fmt: skip


def importance_of_groups(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    correction: Correction,
    *,
    segments: torch.Tensor | None,
    segment_ids: torch.Tensor | None,
    groups: torch.Tensor | None,
    impl: Impl,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `importance_weights` where several segments may be one.

    ``groups`` are int32 boundaries ``[groups + 1]`` among the segments: those of one group have
    one ratio, which is of all their tokens. Each is a group of its own if None.
    """
    check_weighed(logprobs, rollout_logprobs, loss_mask, correction)
    if not correction.needs_segments:
        segments = segment_ids = groups = None
    elif segments is None:
        raise ValueError(f"{OP}: a level of segments needs segments, got {correction!r}")
    else:
        device, tokens = loss_mask.device, loss_mask.shape[0]
        check_segments(OP, segments, device)
        if segment_ids is not None:
            integers = (torch.int32, torch.int64)
            check_tensor(
                OP, "segment_ids", segment_ids, dtypes=integers, device=device, entries=tokens
            )
    rejection = correction.rejection or Rejection()
    weights, metrics = torch.ops.trajpack.importance_weights(
        *(one.detach().contiguous() for one in (logprobs, rollout_logprobs, loss_mask)),
        [None if one is None else one.contiguous() for one in (segments, segment_ids, groups)],
        [correction.level, correction.outside, rejection.level if correction.rejection else ""],
        [correction.low, correction.high, rejection.low, rejection.high],
        correction.normalize,
        resolve_impl(OP, impl, logprobs),
    )
    return weights, metrics


def importance_weights_reference(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    correction: Correction,
    segments: torch.Tensor | None,
    segment_ids: torch.Tensor | None,
    groups: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Define `importance_of_groups` in plain torch; no value is read by the host."""
    slots, num_slots = loss_mask, 0
    if segments is not None:
        slots, num_slots = _slots(loss_mask, segments, segment_ids, groups)
        loss_mask = loss_mask & (slots < num_slots)
    log_ratios = logprobs.double() - rollout_logprobs.double()

    def summed(values: torch.Tensor) -> torch.Tensor:
        """Return the sum of each group's counted entries."""
        assert segments is not None
        sums = segment_sum(values, segments, mask=loss_mask, impl="torch")
        return sums if groups is None else segment_sum(sums, groups, impl="torch")

    def of_level(logarithms: torch.Tensor, level: Level) -> torch.Tensor:
        """Return the logarithms, or their sum or mean over each group."""
        if level not in OF_SEGMENTS:
            return logarithms
        sums = summed(logarithms)
        return sums if level == "segment" else sums / summed(loss_mask).clamp(min=1)

    def at_tokens(values: torch.Tensor, level: Level) -> torch.Tensor:
        """Return the value of each token, or of its group."""
        return torch.cat([values, values.new_zeros(1)])[slots] if level in OF_SEGMENTS else values

    level, rejection = correction.level, correction.rejection
    ratios = of_level(log_ratios, level).clamp(-LOG_BOUND, LOG_BOUND).exp()
    bounded = _bounded(ratios, correction)
    if correction.normalize:
        counts = summed(loss_mask) > 0 if level in OF_SEGMENTS else loss_mask
        mean = torch.where(counts, bounded, 0.0).sum() / counts.sum().clamp(min=1)
        bounded = bounded / torch.where(mean > 0, mean, 1.0)
    weights, ratios = at_tokens(bounded, level), at_tokens(ratios, level)
    kept = loss_mask
    if rejection is not None:
        logarithms = of_level(log_ratios.clamp(-LOG_BOUND, LOG_BOUND), rejection.level)
        low, high = rejection.log_window
        kept = kept & at_tokens((logarithms >= low) & (logarithms <= high), rejection.level)
    weights = torch.where(kept, weights, 0.0)
    metrics = _metrics(loss_mask, correction, log_ratios, ratios=ratios, kept=kept, weights=weights)
    return weights.float(), metrics


def _bounded(ratios: torch.Tensor, correction: Correction) -> torch.Tensor:
    if correction.level == "none":
        return torch.ones_like(ratios)
    if correction.outside == "truncate":
        return ratios.clamp(correction.low, correction.high)
    if correction.outside == "mask":
        inside = (ratios >= correction.low) & (ratios <= correction.high)
        return torch.where(inside, ratios, 0.0)
    return ratios


def _metrics(
    mask: torch.Tensor,
    correction: Correction,
    log_ratios: torch.Tensor,
    *,
    ratios: torch.Tensor,
    kept: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the metrics of `IMPORTANCE_METRICS`."""
    if mask.shape[0] == 0:
        return weights.new_zeros(len(IMPORTANCE_METRICS))
    num = mask.sum()

    def mean(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values, 0.0).sum() / num

    total, squares = weights.sum(), (weights * weights).sum()
    x = log_ratios.clamp(-LOG_BOUND, LOG_BOUND)
    measured = (
        num.double(),
        mean(ratios),
        torch.where(mask, ratios, torch.inf).amin(),
        torch.where(mask, ratios, -torch.inf).amax(),
        mean((ratios < correction.low).double()),
        mean((ratios > correction.high).double()),
        mean((~kept).double()),
        total / num,
        torch.where(mask, weights, 0.0).amax(),
        total * total / (num * squares).clamp(min=torch.finfo(torch.float64).tiny),
        mean(-x),
        mean(torch.expm1(x) - x),
    )
    return torch.where(num > 0, torch.stack(measured), 0.0)


def _slots(
    loss_mask: torch.Tensor,
    segments: torch.Tensor,
    segment_ids: torch.Tensor | None,
    groups: torch.Tensor | None,
) -> tuple[torch.Tensor, int]:
    """Return the group of each token, their number for none; and the number of groups."""
    num = segments.shape[0] - (segments.ndim == 1)
    if segment_ids is not None:
        slots = torch.where((segment_ids < 0) | (segment_ids >= num), num, segment_ids).long()
    else:
        owner, inside = owners_of_entries(segments, loss_mask.shape[0])
        slots = torch.where(inside, owner, num)
    if groups is None:
        return slots, num
    segment = torch.arange(num + 1, device=loss_mask.device)
    owners = torch.searchsorted(groups[1:].long(), segment, right=True)
    owners[num:] = groups.shape[0] - 1
    return owners[slots], groups.shape[0] - 1


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
    for name, tensor, dtypes in (
        ("rollout_logprobs", rollout_logprobs, DTYPES),
        ("loss_mask", loss_mask, (torch.bool,)),
    ):
        check_tensor(
            OP, name, tensor, dtypes=dtypes, device=logprobs.device, entries=logprobs.shape[0]
        )


def _run(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    segmented: list[torch.Tensor | None],
    names: list[Any],
    bounds: list[float],
    normalize: bool,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    level, outside, rejected = names
    low, high, reject_low, reject_high = bounds
    rejection = Rejection(reject_low, reject_high, rejected) if rejected else None
    correction = Correction(level, outside, low, high, normalize, rejection)
    tensors = logprobs, rollout_logprobs, loss_mask
    segments, _, groups = segmented
    if segments is not None:
        check_segments_within(OP, "segments", segments, loss_mask.shape[0])
    if segments is not None and groups is not None:
        num_segments = segments.shape[0] - (segments.ndim == 1)
        check_boundaries(OP, groups, num_segments, name="groups", end="segments")
    if impl == "torch":
        return importance_weights_reference(*tensors, correction, *segmented)
    from trajpack.kernels.corrections.importance_weights_triton import importance_weights_forward

    return importance_weights_forward(*tensors, correction, *segmented)


register_op(
    "importance_weights(Tensor logprobs, Tensor rollout_logprobs, Tensor loss_mask, "
    "Tensor?[] segmented, str[] names, float[] bounds, bool normalize, str impl) "
    "-> (Tensor, Tensor)",
    _run,
    lambda logprobs, *_: (
        logprobs.new_empty(logprobs.shape, dtype=torch.float32),
        logprobs.new_empty(len(IMPORTANCE_METRICS), dtype=torch.float64),
    ),
)
