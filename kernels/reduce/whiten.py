"""Whitening: entries that a mask counts, brought to mean 0 and standard deviation 1."""

from __future__ import annotations

import torch

from trajpack.kernels.dispatch import LIBRARY, Impl, resolve_impl
from trajpack.kernels.reduce.moments import (
    check_counted,
    check_finite,
    masked_moments_reference,
    moments_of_sums,
)
from trajpack.kernels.reduce.whiten_host import moments_on_host, write_whitened
from trajpack.kernels.validation import check_device, check_tensor

OP = "whiten"


def whiten(
    x: torch.Tensor,
    mask: torch.Tensor,
    *,
    sums: torch.Tensor | None = None,
    shift: float = 0.0,
    center: bool = True,
    ddof: int = 1,
    eps: float = 0.0,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Centre and scale the entries that count, by their own mean and standard deviation.

    ::

        (x - mean) / (std + eps)        std² = Σ(x - mean)² / (count - ddof)

    A batch of little variance is scaled like any other. Where there is no spread to scale by,
    centred entries are exactly 0: if all are equal, or no more than ``ddof`` count. No entries
    give zeros. Nothing of this is ever NaN or raises.

    Args:
        x: ``[entries]``, float32 or float64. What is not counted may be anything, NaN too. A
            NaN or an infinity that counts, among others, makes all that count NaN: it is not
            hidden. Squares of differences must be in reach of float64.
        mask: ``[entries]`` bool: the entries that count.
        sums: ``[3]`` float64 of `moment_sums`, added up over the ranks of a data-parallel run:
            every rank then whitens by the moments of all. Default: those of ``x``.
        shift: What ``sums`` were made with. The variance is then off by about 10⁻¹⁶ of
            (mean - shift)² / variance. A spread below 2⁻²³ of the distance from ``shift`` to
            the mean, the spacing of float32 there, is not told from rounding and counts as none;
            a ``shift`` near the mean leaves any spread as it is.
        center: Whether the mean is taken away; else it is added back after scaling.
        ddof: 1 for the unbiased variance, 0 for the mean of squares.
        eps: Added to the standard deviation, at least 0. verl adds 1e-8 to the variance instead:
            that is within 5e-9 of ``eps=0`` at a variance of 1, but it turns a standard
            deviation of 1e-4, and of all below it, into 0.7, and less.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.

    Returns:
        ``[entries]`` float32, 0 where ``mask`` is False. Computed in float64. Advantages are
        constants of a loss, so it is not differentiable.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, ``x`` requires a gradient, ``shift`` or
            ``eps`` is not finite, ``eps`` is negative, or ``ddof`` is neither 0 nor 1.

    Cost: two launches, which read ``x`` twice, and 40 bytes of scratch for 4,096 entries; with
    ``sums`` one. No copy of contiguous tensors that begin at a multiple of 16 bytes, no host
    synchronisation.

    Example:
        >>> x, mask = torch.tensor([1.0, 2.0, 9.0, 3.0]), torch.tensor([True, True, False, True])
        >>> whiten(x, mask)
        tensor([-1.,  0.,  0.,  1.])
        >>> from trajpack.kernels import moment_sums
        >>> all_ranks = moment_sums(x, mask) * 2  # torch.distributed.all_reduce, of two alike
        >>> whiten(x, mask, sums=all_ranks, ddof=0)
        tensor([-1.2247,  0.0000,  0.0000,  1.2247])

    Reference:
        ``masked_whiten`` of verl (``verl/utils/torch_functional.py``), where ``center`` is
        ``shift_mean``; moments as in `masked_moments`.
    """
    check_counted(OP, x, mask)
    check_finite(OP, "shift", shift)
    _check_scaling(ddof, eps, center)
    if sums is None:
        return whiten_with_moments(x, mask, ddof, eps, center, impl)[0]
    check_tensor(OP, "sums", sums, ndim=1, dtypes=(torch.float64,))
    check_device(OP, "sums", sums, x.device)
    if sums.shape[0] != 3:
        raise ValueError(f"{OP}: sums must have 3 entries, got shape {list(sums.shape)}")
    chosen = resolve_impl(OP, impl, x)
    whitened: torch.Tensor = torch.ops.trajpack.whiten_with_sums(
        x.contiguous(), mask.contiguous(), sums.detach().contiguous(), float(shift),
        ddof, float(eps), center, chosen,
    )  # fmt: skip
    return whitened


def whiten_with_moments(
    x: torch.Tensor, mask: torch.Tensor, ddof: int, eps: float, center: bool, impl: Impl
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `whiten` and `masked_moments` do, in two launches; arguments are checked."""
    chosen = resolve_impl(OP, impl, x)
    whitened, moments = torch.ops.trajpack.whiten_with_moments(
        x.contiguous(), mask.contiguous(), ddof, float(eps), center, chosen
    )
    return whitened, moments


def whiten_reference(
    x: torch.Tensor,
    mask: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ddof: int,
    eps: float,
    center: bool,
) -> torch.Tensor:
    """Say in plain torch what whitening by count, mean and Σ(x - mean)² means."""
    mean, scale, kept = scaling(moments, ddof, eps, center)
    values = torch.where(scale == 0, 0.0, (x.double() - mean) * scale) + kept
    return torch.where(mask, values, 0.0).float()


def scaling(
    moments: tuple[torch.Tensor, torch.Tensor, torch.Tensor], ddof: int, eps: float, center: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what is taken away, multiplied by (0 without a spread) and added back."""
    count, mean, squares = moments
    varies = (count > ddof) & (squares != 0)
    std = squares.sqrt() / (count - ddof).clamp(min=1).sqrt()  # this way round, never 0
    scale = torch.where(varies, 1 / (std + eps), 0.0)
    return mean, scale, torch.zeros_like(mean) if center else mean


def _check_scaling(ddof: int, eps: float, center: bool) -> None:
    check_finite(OP, "eps", eps)
    if eps < 0:
        raise ValueError(f"{OP}: eps must not be negative, got {eps!r}")
    if isinstance(ddof, bool) or not isinstance(ddof, int):
        raise TypeError(f"{OP}: ddof must be an int, got {ddof!r}")
    if ddof not in (0, 1):
        raise ValueError(f"{OP}: ddof must be 0 or 1, got {ddof}")
    if not isinstance(center, bool):
        raise TypeError(f"{OP}: center must be a bool, got {center!r}")


def _whiten_by(
    x: torch.Tensor, mask: torch.Tensor, moments: torch.Tensor, ddof: int, eps: float, center: bool
) -> torch.Tensor:
    """Whiten by count, mean and Σ(x - mean)², in torch or on the host."""
    count, mean, squares = moments[:3].unbind()
    if x.device.type == "cpu":
        scales = scaling((count, mean, squares), ddof, eps, center)
        return write_whitened(x, mask, *(float(number) for number in scales))
    return whiten_reference(x, mask, (count, mean, squares), ddof, eps, center)


def _run_with_moments(
    x: torch.Tensor, mask: torch.Tensor, ddof: int, eps: float, center: bool, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if impl == "triton":
        from trajpack.kernels.reduce.whiten_triton import whiten_forward

        return whiten_forward(x, mask, ddof, eps, center)
    on_host = x.device.type == "cpu"
    moments = moments_on_host(x, mask) if on_host else masked_moments_reference(x, mask)
    return _whiten_by(x, mask, moments, ddof, eps, center), moments


def _run_with_sums(
    x: torch.Tensor,
    mask: torch.Tensor,
    sums: torch.Tensor,
    shift: float,
    ddof: int,
    eps: float,
    center: bool,
    impl: str,
) -> torch.Tensor:
    if impl == "triton":
        from trajpack.kernels.reduce.whiten_triton import whiten_by_sums_forward

        return whiten_by_sums_forward(x, mask, sums, shift, ddof, eps, center)
    moments = torch.stack(moments_of_sums(sums, shift))
    return _whiten_by(x, mask, moments, ddof, eps, center)


def _fake_with_moments(
    x: torch.Tensor, mask: torch.Tensor, ddof: int, eps: float, center: bool, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.float32), x.new_empty(5, dtype=torch.float64)


def _fake_with_sums(
    x: torch.Tensor,
    mask: torch.Tensor,
    sums: torch.Tensor,
    shift: float,
    ddof: int,
    eps: float,
    center: bool,
    impl: str,
) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


LIBRARY.define(
    "whiten_with_moments(Tensor x, Tensor mask, int ddof, float eps, bool center, str impl)"
    " -> (Tensor, Tensor)"
)
LIBRARY.impl("whiten_with_moments", _run_with_moments, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::whiten_with_moments", _fake_with_moments, lib=LIBRARY)
LIBRARY.define(
    "whiten_with_sums(Tensor x, Tensor mask, Tensor sums, float shift, int ddof, float eps, "
    "bool center, str impl) -> Tensor"
)
LIBRARY.impl("whiten_with_sums", _run_with_sums, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::whiten_with_sums", _fake_with_sums, lib=LIBRARY)
