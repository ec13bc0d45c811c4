"""Moments of the entries that a mask counts: one pass, stable, and additive between devices."""

from __future__ import annotations

from numbers import Real

import torch

from trajpack.kernels.dispatch import LIBRARY, Impl, resolve_impl
from trajpack.kernels.reduce.whiten_host import moments_on_host
from trajpack.kernels.validation import check_device, check_tensor

NOISE = 2.0**-46
"""Share of the sum of squares that is not told from its rounding: the square of 2⁻²³, the
spacing of float32, and about 100 roundings of float64."""


def masked_moments(x: torch.Tensor, mask: torch.Tensor, *, impl: Impl = "auto") -> torch.Tensor:
    """Return count, mean, sum of squared deviations, minimum and maximum of counted entries.

    Each chunk of fixed size is centred on its own mean and chunks are merged in a fixed order:
    the deviations are off by about 10⁻¹⁶ of mean / std, not of its square. Chunks are counted
    from the first entry: entries appended behind that are not counted change no bit.

    Args:
        x: ``[entries]``, float32 or float64. What is not counted may be anything, NaN too.
        mask: ``[entries]`` bool: the entries that count.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.

    Returns:
        ``[5]`` float64: count, mean, Σ(x - mean)², min, max; of no entries 0, 0, 0, inf, -inf.
        Where all are equal the third is exactly 0; where one is NaN, so are the last four. Not
        differentiable.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, or ``x`` requires a gradient.

    Cost: two launches, and 40 bytes of scratch for 4,096 entries. No copy of contiguous tensors
    that begin at a multiple of 16 bytes, no host synchronisation.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 6.0, float("nan")])
        >>> masked_moments(x, torch.tensor([True, True, True, False])).tolist()
        [3.0, 3.0, 14.0, 1.0, 6.0]

    Reference:
        Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample
        variances, 1979.
    """
    check_counted("masked_moments", x, mask)
    chosen = resolve_impl("masked_moments", impl, x)
    moments: torch.Tensor = torch.ops.trajpack.masked_moments(
        x.contiguous(), mask.contiguous(), chosen
    )
    return moments


def moment_sums(
    x: torch.Tensor, mask: torch.Tensor, *, shift: float = 0.0, impl: Impl = "auto"
) -> torch.Tensor:
    """Return sums that data-parallel ranks add up, with one all-reduce, for `whiten`.

    Args:
        x: ``[entries]``, float32 or float64. What is not counted may be anything, NaN too.
        mask: ``[entries]`` bool: the entries that count.
        shift: Number that is first taken from every entry, the same on every rank. The nearer
            to the mean, the more precise is the variance that the sums give; see `whiten`.
        impl: As for `masked_moments`.

    Returns:
        ``[3]`` float64: count, Σ(x - shift), Σ(x - shift)². Not differentiable.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, ``x`` requires a gradient or ``shift`` is not
            finite.

    Cost: that of `masked_moments`, from which the sums are made.

    Example:
        >>> x, mask = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False])
        >>> moment_sums(x, mask).tolist()
        [2.0, 3.0, 5.0]

    Reference:
        ``distributed_masked_mean`` of verl (``verl/utils/torch_functional.py``), which reduces
        count and sum; here the squares too, in one message.
    """
    check_counted("moment_sums", x, mask)
    check_finite("moment_sums", "shift", shift)
    chosen = resolve_impl("moment_sums", impl, x)
    sums: torch.Tensor = torch.ops.trajpack.moment_sums(
        x.contiguous(), mask.contiguous(), float(shift), chosen
    )
    return sums


def masked_moments_reference(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Say in plain torch what `masked_moments` means. No value is read by the host."""
    values = x.double()
    one = x.new_ones(1, dtype=torch.float64)  # an entry beyond the last, so that there is one
    low = torch.cat([torch.where(mask, values, float("inf")), one / 0]).amin()
    high = torch.cat([torch.where(mask, values, float("-inf")), one / -0.0]).amax()
    count = mask.sum().double()
    mean = torch.where(mask, values, 0.0).sum() / count.clamp(min=1)
    mean = torch.where(low == high, low, mean)
    squares = torch.where(mask, values - mean, 0.0).square().sum()
    squares = torch.where(low == high, 0.0, squares)
    broken = mean.isnan()
    low, high = (torch.where(broken, mean, bound) for bound in (low, high))
    return torch.stack([count, mean, squares, low, high])


def sums_of_moments(moments: torch.Tensor, shift: float) -> torch.Tensor:
    """Return count, Σ(x - shift) and Σ(x - shift)² of entries that have these moments."""
    count, mean, squares = moments[:3].unbind()
    away = torch.where(count > 0, mean - shift, 0.0)
    return torch.stack([count, count * away, squares + count * away * away])


def moments_of_sums(
    sums: torch.Tensor, shift: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return count, mean and Σ(x - mean)² of entries that have these sums.

    The last is 0 where it cannot be told from the rounding of the sums.
    """
    count, first, second = sums.unbind()
    away = first / count.clamp(min=1)
    squares = second - first * away
    squares = torch.where(squares <= second * NOISE, 0.0, squares)
    return count, shift + away, squares


def check_counted(op: str, x: torch.Tensor, mask: torch.Tensor) -> None:
    """Raise unless ``mask`` says of each entry of ``x`` whether it counts."""
    check_tensor(op, "x", x, ndim=1, dtypes=(torch.float32, torch.float64))
    check_tensor(op, "mask", mask, ndim=1, dtypes=(torch.bool,))
    check_device(op, "mask", mask, x.device)
    if mask.shape[0] != x.shape[0]:
        raise ValueError(
            f"{op}: mask must have one entry for each of {x.shape[0]} of x, "
            f"got shape {list(mask.shape)}"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: no gradient flows to x; pass x.detach()")


def check_finite(op: str, name: str, value: float) -> None:
    """Raise unless ``value`` is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (Real, torch.SymFloat)):
        raise TypeError(f"{op}: {name} must be a number, got {value!r}")
    if not -float("inf") < value < float("inf"):
        raise ValueError(f"{op}: {name} must be finite, got {value!r}")


def _run_moments(x: torch.Tensor, mask: torch.Tensor, impl: str) -> torch.Tensor:
    if impl == "torch" and x.device.type == "cpu":
        return moments_on_host(x, mask)
    if impl == "torch":
        return masked_moments_reference(x, mask)
    from trajpack.kernels.reduce.whiten_triton import moments_forward

    return moments_forward(x, mask, 0.0)[0]


def _run_sums(x: torch.Tensor, mask: torch.Tensor, shift: float, impl: str) -> torch.Tensor:
    if impl == "triton":
        from trajpack.kernels.reduce.whiten_triton import moments_forward

        return moments_forward(x, mask, shift)[1]
    return sums_of_moments(_run_moments(x, mask, impl), shift)


def _fake_moments(x: torch.Tensor, mask: torch.Tensor, impl: str) -> torch.Tensor:
    return x.new_empty(5, dtype=torch.float64)


def _fake_sums(x: torch.Tensor, mask: torch.Tensor, shift: float, impl: str) -> torch.Tensor:
    return x.new_empty(3, dtype=torch.float64)


LIBRARY.define("masked_moments(Tensor x, Tensor mask, str impl) -> Tensor")
LIBRARY.impl("masked_moments", _run_moments, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::masked_moments", _fake_moments, lib=LIBRARY)
LIBRARY.define("moment_sums(Tensor x, Tensor mask, float shift, str impl) -> Tensor")
LIBRARY.impl("moment_sums", _run_sums, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::moment_sums", _fake_sums, lib=LIBRARY)
