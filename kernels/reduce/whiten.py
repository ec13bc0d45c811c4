"""Moments of masked entries, and whitening: entries scaled to mean 0 and deviation 1."""

from __future__ import annotations

from typing import Any

import torch

from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.validation import check_integer, check_number, check_tensor

OP = "whiten"
NOISE = 2.0**-46
"""Part of the sum of squares that is treated as rounding: the square of 2⁻²³, the spacing of
float32, and about 100 roundings of float64."""


def whiten(
    x: torch.Tensor,
    mask: torch.Tensor,
    *,
    center: bool = True,
    ddof: int = 1,
    eps: float = 0.0,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Centre and scale the entries that count, by their own mean and standard deviation.

    ::

        (x - mean) / (std + eps)        std² = Σ(x - mean)² / (count - ddof)

    A batch of little variance is scaled like any other. Where there is no spread (all entries
    equal, or no more than ``ddof``), centred entries are exactly 0. No entries give zeros.

    Args:
        x: ``[entries]`` float32 or float64. Uncounted entries may have any value, NaN included. A
            NaN or infinity that counts makes all that count NaN. Squares of differences must be
            within the range of float64.
        mask: ``[entries]`` bool: True for entries that count.
        center: Whether the mean is subtracted; else it is added back after scaling.
        ddof: 1 for the unbiased variance, 0 for the mean of squares.
        eps: Added to the standard deviation, at least 0. verl adds 1e-8 to the variance instead:
            within 5e-9 of ``eps=0`` at a variance of 1, but it whitens a standard deviation of
            1e-4 to 0.7.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.

    Returns:
        ``[entries]`` float32, 0 where ``mask`` is False, computed in float64. Not differentiable.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, ``x`` requires a gradient, ``eps`` is negative or
            not finite, or ``ddof`` is neither 0 nor 1.

    Example:
        >>> x, mask = torch.tensor([1.0, 2.0, 9.0, 3.0]), torch.tensor([True, True, False, True])
        >>> whiten(x, mask)
        tensor([-1.,  0.,  0.,  1.])

    Reference:
        ``masked_whiten`` of verl (``verl/utils/torch_functional.py``), where ``center`` is
        ``shift_mean``; moments by Chan, Golub and LeVeque, Updating formulae and a pairwise
        algorithm for computing sample variances, 1979.
    """
    check_tensor(OP, "x", x, dtypes=(torch.float32, torch.float64), constant=True)
    each: dict[str, Any] = {"device": x.device, "entries": x.shape[0], "per": "entry"}
    check_tensor(OP, "mask", mask, dtypes=(torch.bool,), **each)
    check_number(OP, "eps", eps, least=0, finite=True)
    check_integer(OP, "ddof", ddof, most=1)
    if not isinstance(center, bool):
        raise TypeError(f"{OP}: center must be a bool, got {center!r}")
    impl = resolve_impl(OP, impl, x.device)
    return whiten_by(x, mask, None, ddof=ddof, eps=eps, center=center, impl=impl)[0]


def moments_of(x: torch.Tensor, counts: torch.Tensor, impl: str) -> torch.Tensor:
    """Return moments of entries that count as often as ``counts`` says: a mask or int32 numbers.

    Each chunk of fixed size is centred on its own mean, and chunks are merged in a fixed order:
    the relative error of the deviations is about 10⁻¹⁶ · mean / std, not of its square. Chunks
    start at the first entry, so with Triton uncounted entries appended at the end change no bit.

    Returns:
        ``[5]`` float64: count, mean, Σ(x - mean)², min, max; all 0 of no entries.
        Where all are equal the third is exactly 0; where one is NaN, so are the last four.
    """
    moments: torch.Tensor = torch.ops.trajpack.masked_moments(
        x.contiguous(), counts.contiguous(), impl
    )
    return moments


def whiten_by(
    x: torch.Tensor,
    counts: torch.Tensor,
    given: torch.Tensor | None,
    *,
    ddof: int,
    impl: str,
    eps: float = 0.0,
    center: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whiten the entries that count by ``[5]`` moments, their own if ``None``.

    Return the whitened entries, and ``[5]`` moments of the entries if none were given.
    """
    inputs = x.contiguous(), counts.contiguous(), given, ddof, float(eps), center, impl
    whitened: tuple[torch.Tensor, torch.Tensor] = torch.ops.trajpack.whiten(*inputs)
    return whitened


def masked_moments_reference(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Define `moments_of` in plain torch; no value is read by the host."""
    if not x.shape[0]:
        return x.new_zeros(5, dtype=torch.float64)
    mask = counts != 0
    values = torch.where(mask, x.double(), 0.0)
    low = torch.where(mask, values, torch.inf).amin()
    high = torch.where(mask, values, -torch.inf).amax()
    weights, count = counts.double(), counts.sum().double()
    mean = (weights * values).sum() / count.clamp(min=1)
    mean = torch.where(low == high, low, mean)
    away = torch.where(mask, values - mean, 0.0)
    squares = torch.where(low == high, 0.0, (weights * (away * away)).sum())
    low, high = (torch.where(mean.isnan() | (count == 0), mean, end) for end in (low, high))
    return torch.stack([count, mean, squares, low, high])


def whiten_reference(
    x: torch.Tensor, mask: torch.Tensor, given: torch.Tensor, *, ddof: int, eps: float, center: bool
) -> torch.Tensor:
    """Define `whiten_by` in plain torch."""
    count, mean, squares = given[:3].unbind()
    varies = (count > ddof) & (squares != 0)
    std = squares.sqrt() / (count - ddof).clamp(min=1).sqrt()  # squares / count may underflow to 0
    scale = torch.where(varies, 1 / (std + eps), 0.0)
    values = torch.where(varies, (x.double() - mean) * scale, 0.0)
    return torch.where(mask != 0, values if center else values + mean, 0.0).float()


def sums_of_moments(moments: torch.Tensor) -> torch.Tensor:
    """Return count, Σx and Σx² of ``[5]`` moments: float64 ``[3]``, which ranks can add up."""
    count, mean, squares = moments[:3].unbind()
    total = count * mean
    return torch.stack([count, total, torch.addcmul(squares, total, mean)])


def moments_of_sums(sums: torch.Tensor) -> torch.Tensor:
    """Return ``[5]`` moments of `sums_of_moments`; deviations within the sums' rounding are 0.

    The extremes are not known: any two that differ stand for them.
    """
    count, first, second = sums.detach().unbind()
    mean = first / count.clamp(min=1)
    squares = torch.addcmul(second, first, mean, value=-1)
    squares = torch.where(squares <= second * NOISE, 0.0, squares)
    return torch.stack([count, mean, squares, -count, count])


def _run_moments(x: torch.Tensor, counts: torch.Tensor, impl: str) -> torch.Tensor:
    if impl == "torch":
        return masked_moments_reference(x, counts)
    from trajpack.kernels.reduce.whiten_triton import moments_forward

    return moments_forward(x, counts)


def _run_whiten(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, counts, given, ddof, eps, center, impl = inputs
    options = {"ddof": ddof, "eps": eps, "center": center}
    if impl == "torch":
        moments = masked_moments_reference(x, counts) if given is None else given
        whitened = whiten_reference(x, counts, moments, **options)
    else:
        from trajpack.kernels.reduce.whiten_triton import whiten_forward

        whitened, moments = whiten_forward(x, counts, given, **options)
    return whitened, moments if given is None else moments.new_empty(0)


def _fake_moments(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(5, dtype=torch.float64)


def _fake_whiten(x: torch.Tensor, counts: Any, given: Any, *_: Any) -> tuple[Any, Any]:
    moments = _fake_moments(x) if given is None else x.new_empty(0, dtype=torch.float64)
    return torch.empty_like(x, dtype=torch.float32), moments


register_op(
    "masked_moments(Tensor x, Tensor counts, str impl) -> Tensor", _run_moments, _fake_moments
)
register_op(
    "whiten(Tensor x, Tensor counts, Tensor? given, int ddof, float eps, bool center, str impl) "
    "-> (Tensor, Tensor)",
    _run_whiten,
    _fake_whiten,
)
