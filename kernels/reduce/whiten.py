"""Moments of masked entries, and whitening: entries brought to mean 0 and deviation 1."""

from __future__ import annotations

import numpy as np
import torch

from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.validation import check_number, check_tensor

OP = "whiten"
NOISE = 2.0**-46
"""Share of the sum of squares that cannot be told from rounding: the square of 2⁻²³, the spacing
of float32, and about 100 roundings of float64."""
CHUNK = 32_768
"""Entries computed at once on the host: 256 KB of float64."""


def masked_moments(x: torch.Tensor, mask: torch.Tensor, *, impl: Impl = "auto") -> torch.Tensor:
    """Return count, mean, sum of squared deviations, minimum and maximum of counted entries.

    Each chunk of fixed size is centred on its own mean, and chunks are merged in a fixed order:
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
    _check_counted("masked_moments", x, mask)
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
    _check_counted("moment_sums", x, mask)
    check_number("moment_sums", "shift", shift, finite=True)
    chosen = resolve_impl("moment_sums", impl, x)
    sums: torch.Tensor = torch.ops.trajpack.moment_sums(
        x.contiguous(), mask.contiguous(), float(shift), chosen
    )
    return sums


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
    _check_counted(OP, x, mask)
    check_number(OP, "shift", shift, finite=True)
    _check_scaling(ddof, eps, center)
    if sums is None:
        return whiten_with_moments(x, mask, ddof=ddof, eps=eps, center=center, impl=impl)[0]
    check_tensor(OP, "sums", sums, dtypes=(torch.float64,), device=x.device)
    if sums.shape[0] != 3:
        raise ValueError(f"{OP}: sums must have 3 entries, got shape {list(sums.shape)}")
    chosen = resolve_impl(OP, impl, x)
    whitened: torch.Tensor = torch.ops.trajpack.whiten_with_sums(
        x.contiguous(), mask.contiguous(), sums.detach().contiguous(), float(shift),
        ddof, float(eps), center, chosen,
    )  # fmt: skip
    return whitened


def whiten_with_moments(
    x: torch.Tensor,
    mask: torch.Tensor,
    *,
    ddof: int,
    eps: float = 0.0,
    center: bool = True,
    impl: Impl = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `whiten` and `masked_moments` in two launches; checks no argument."""
    chosen = resolve_impl(OP, impl, x)
    whitened, moments = torch.ops.trajpack.whiten_with_moments(
        x.contiguous(), mask.contiguous(), ddof, float(eps), center, chosen
    )
    return whitened, moments


def masked_moments_reference(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute `masked_moments` in plain torch, without reading a value on the host."""
    values = x.double()
    one = x.new_ones(1, dtype=torch.float64)  # one more entry, since amin needs one
    low = torch.cat([torch.where(mask, values, float("inf")), one / 0]).amin()
    high = torch.cat([torch.where(mask, values, float("-inf")), one / -0.0]).amax()
    count = mask.sum().double()
    mean = torch.where(mask, values, 0.0).sum() / count.clamp(min=1)
    mean = torch.where(low == high, low, mean)
    squares = torch.where(mask, values - mean, 0.0).square().sum()
    squares = torch.where(low == high, 0.0, squares)
    low, high = (torch.where(mean.isnan(), mean, bound) for bound in (low, high))
    return torch.stack([count, mean, squares, low, high])


def masked_moments_torch(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute `masked_moments` for ``impl="torch"``: on the host by numpy, in chunks.

    A chunk stays in cache, which is 3 to 5 times faster than whole tensors.
    """
    if x.device.type != "cpu":
        return masked_moments_reference(x, mask)
    values, counted, found = x.detach().numpy(), mask.numpy(), []
    with np.errstate(all="ignore"):
        for begin in range(0, values.size, CHUNK):
            chunk = values[begin : begin + CHUNK][counted[begin : begin + CHUNK]].astype(np.float64)
            if chunk.size:
                low, high, total = chunk.min(), chunk.max(), chunk.sum()
                chunk -= total / chunk.size
                found.append((chunk.size, total, (chunk * chunk).sum(), low, high))
        if not found:
            return torch.tensor([0.0, 0.0, 0.0, np.inf, -np.inf], dtype=torch.float64)
        counts, totals, squares, lows, highs = np.array(found).T
        low, high, count = lows.min(), highs.max(), counts.sum()
        mean = low if low == high else totals.sum() / count
        away = totals / counts - mean
        square = 0.0 if low == high else (squares + counts * (away * away)).sum()
        low, high = (mean, mean) if np.isnan(mean) else (low, high)
    return torch.tensor([count, mean, square, low, high], dtype=torch.float64)


def whiten_reference(
    x: torch.Tensor,
    mask: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    ddof: int,
    eps: float,
    center: bool,
) -> torch.Tensor:
    """Whiten in plain torch by count, mean and Σ(x - mean)²; on the host in chunks."""
    count, mean, squares = moments
    varies = (count > ddof) & (squares != 0)
    std = squares.sqrt() / (count - ddof).clamp(min=1).sqrt()  # squares / count may underflow to 0
    scale = torch.where(varies, 1 / (std + eps), 0.0)
    kept = torch.zeros_like(mean) if center else mean
    if x.device.type != "cpu":
        values = torch.where(varies, (x.double() - mean) * scale, 0.0) + kept
        return torch.where(mask, values, 0.0).float()
    entries, counted, factor = x.detach().numpy(), mask.numpy(), float(scale)
    whitened = np.full(entries.size, float(kept), np.float32)
    with np.errstate(all="ignore"):
        for begin in range(0, entries.size, CHUNK):
            part = slice(begin, begin + CHUNK)
            if factor:
                chunk = np.subtract(entries[part], float(mean), dtype=np.float64)
                chunk *= factor
                chunk += float(kept)
                whitened[part] = chunk
            bits = whitened[part].view(np.int32)
            bits *= counted[part]  # 0 where not counted, NaN too; faster than a masked store
    return torch.from_numpy(whitened)


def moments_of_sums(
    sums: torch.Tensor, shift: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return count, mean and Σ(x - mean)² of the entries of `moment_sums`.

    The last is 0 where it cannot be told from the rounding of the sums.
    """
    count, first, second = sums.unbind()
    away = first / count.clamp(min=1)
    squares = second - first * away
    squares = torch.where(squares <= second * NOISE, 0.0, squares)
    return count, shift + away, squares


def _check_counted(op: str, x: torch.Tensor, mask: torch.Tensor) -> None:
    check_tensor(op, "x", x, dtypes=(torch.float32, torch.float64), constant=True)
    entries = x.shape[0]
    check_tensor(
        op, "mask", mask, dtypes=(torch.bool,), device=x.device, entries=entries, per="entry"
    )


def _check_scaling(ddof: int, eps: float, center: bool) -> None:
    check_number(OP, "eps", eps, least=0, finite=True)
    if isinstance(ddof, bool) or not isinstance(ddof, int):
        raise TypeError(f"{OP}: ddof must be an int, got {ddof!r}")
    if ddof not in (0, 1):
        raise ValueError(f"{OP}: ddof must be 0 or 1, got {ddof}")
    if not isinstance(center, bool):
        raise TypeError(f"{OP}: center must be a bool, got {center!r}")


def _run_moments(x: torch.Tensor, mask: torch.Tensor, impl: str) -> torch.Tensor:
    if impl == "torch":
        return masked_moments_torch(x, mask)
    from trajpack.kernels.reduce.whiten_triton import moments_forward

    return moments_forward(x, mask, 0.0)[0]


def _run_sums(x: torch.Tensor, mask: torch.Tensor, shift: float, impl: str) -> torch.Tensor:
    if impl == "triton":
        from trajpack.kernels.reduce.whiten_triton import moments_forward

        return moments_forward(x, mask, shift)[1]
    count, mean, squares = masked_moments_torch(x, mask)[:3].unbind()
    away = torch.where(count > 0, mean - shift, 0.0)
    return torch.stack([count, count * away, squares + count * away * away])


def _run_with_moments(
    x: torch.Tensor, mask: torch.Tensor, ddof: int, eps: float, center: bool, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if impl == "triton":
        from trajpack.kernels.reduce.whiten_triton import whiten_forward

        return whiten_forward(x, mask, ddof=ddof, eps=eps, center=center)
    moments = masked_moments_torch(x, mask)
    count, mean, squares = moments[:3].unbind()
    whitened = whiten_reference(x, mask, (count, mean, squares), ddof=ddof, eps=eps, center=center)
    return whitened, moments


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

        return whiten_by_sums_forward(
            x, mask, sums, shift=shift, noise=NOISE, ddof=ddof, eps=eps, center=center
        )
    moments = moments_of_sums(sums, shift)
    return whiten_reference(x, mask, moments, ddof=ddof, eps=eps, center=center)


def _fake_with_moments(
    x: torch.Tensor, mask: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=torch.float32), x.new_empty(5, dtype=torch.float64)


register_op(
    "masked_moments(Tensor x, Tensor mask, str impl) -> Tensor",
    _run_moments,
    lambda x, *_: x.new_empty(5, dtype=torch.float64),
)
register_op(
    "moment_sums(Tensor x, Tensor mask, float shift, str impl) -> Tensor",
    _run_sums,
    lambda x, *_: x.new_empty(3, dtype=torch.float64),
)
register_op(
    "whiten_with_moments(Tensor x, Tensor mask, int ddof, float eps, bool center, str impl)"
    " -> (Tensor, Tensor)",
    _run_with_moments,
    _fake_with_moments,
)
register_op(
    "whiten_with_sums(Tensor x, Tensor mask, Tensor sums, float shift, int ddof, float eps, "
    "bool center, str impl) -> Tensor",
    _run_with_sums,
    lambda x, *_: x.new_empty(x.shape, dtype=torch.float32),
)
