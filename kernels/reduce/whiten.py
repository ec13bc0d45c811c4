"""Moments of masked entries, and whitening: entries scaled to mean 0 and deviation 1."""

from __future__ import annotations

import numpy as np
import torch

from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.validation import check_integer, check_number, check_tensor

OP = "whiten"
NOISE = 2.0**-46
"""Part of the sum of squares that is treated as rounding: the square of 2⁻²³, the spacing of
float32, and about 100 roundings of float64."""
CHUNK = 32_768
"""Entries computed at once on the host: 256 KB of float64."""


def masked_moments(x: torch.Tensor, mask: torch.Tensor, *, impl: Impl = "auto") -> torch.Tensor:
    """Return count, mean, sum of squared deviations, minimum and maximum of counted entries.

    Each chunk of fixed size is centred on its own mean, and chunks are merged in a fixed order:
    the relative error of the deviations is about 10⁻¹⁶ · mean / std, not of its square. Chunks
    start at the first entry, so uncounted entries appended at the end change no bit.

    Args:
        x: ``[entries]`` float32 or float64. Uncounted entries may have any value, NaN included.
        mask: ``[entries]`` bool: True for entries that count.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.

    Returns:
        ``[5]`` float64: count, mean, Σ(x - mean)², min, max; of no entries 0, 0, 0, inf, -inf.
        Where all are equal the third is exactly 0; where one is NaN, so are the last four. Not
        differentiable.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, or ``x`` requires a gradient.

    Cost: one launch, two in a captured graph, and 40 bytes of scratch for 4,096 entries. No copy of
    contiguous tensors that begin at a multiple of 16 bytes, no host synchronisation.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 6.0, float("nan")])
        >>> masked_moments(x, torch.tensor([True, True, True, False])).tolist()
        [3.0, 3.0, 14.0, 1.0, 6.0]

    Reference:
        Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample
        variances, 1979.
    """
    _check_counted("masked_moments", x, mask)
    return moments_and_sums(x, mask, impl=resolve_impl("masked_moments", impl, x))[:5]


def moment_sums(
    x: torch.Tensor, mask: torch.Tensor, *, shift: float = 0.0, impl: Impl = "auto"
) -> torch.Tensor:
    """Return sums that data-parallel ranks add up, with one all-reduce, for `whiten`.

    Arguments, errors and cost are those of `masked_moments`. ``shift`` is a finite number that is
    subtracted from every entry, the same on every rank: the nearer to the mean, the more precise is
    the variance from the sums; see `whiten`.

    Returns:
        ``[3]`` float64: count, Σ(x - shift), Σ(x - shift)². Not differentiable.

    Example:
        >>> x, mask = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False])
        >>> moment_sums(x, mask).tolist()
        [2.0, 3.0, 5.0]

    Reference:
        ``distributed_masked_mean`` of verl (``verl/utils/torch_functional.py``), which reduces
        count and sum; here also the squares, in one message.
    """
    _check_counted("moment_sums", x, mask)
    check_number("moment_sums", "shift", shift, finite=True)
    impl = resolve_impl("moment_sums", impl, x)
    return moments_and_sums(x, mask, shift=float(shift), impl=impl)[5:]


def moments_and_sums(
    x: torch.Tensor, mask: torch.Tensor, *, shift: float = 0.0, impl: str
) -> torch.Tensor:
    """Return ``[8]``: `masked_moments`, then `moment_sums`; arguments are checked."""
    found: torch.Tensor = torch.ops.trajpack.masked_moments(
        x.contiguous(), mask.contiguous(), shift, impl
    )
    return found


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

    A batch of little variance is scaled like any other. Where there is no spread (all entries
    equal, or no more than ``ddof``), centred entries are exactly 0. No entries give zeros.

    Args:
        x: ``[entries]`` float32 or float64. Uncounted entries may have any value, NaN included. A
            NaN or infinity that counts makes all that count NaN. Squares of differences must be
            within the range of float64.
        mask: ``[entries]`` bool: True for entries that count.
        sums: ``[3]`` float64 of `moment_sums`, added up over the ranks of a data-parallel run:
            every rank then whitens by the moments of all. Default: those of ``x``.
        shift: The ``shift`` of ``sums``. The relative error of the variance is then about
            10⁻¹⁶ · (mean - shift)² / variance. A spread below 2⁻²³ of the distance from ``shift``
            to the mean, the spacing of float32 there, counts as none.
        center: Whether the mean is subtracted; else it is added back after scaling.
        ddof: 1 for the unbiased variance, 0 for the mean of squares.
        eps: Added to the standard deviation, at least 0. verl adds 1e-8 to the variance instead:
            within 5e-9 of ``eps=0`` at a variance of 1, but it whitens a standard deviation of
            1e-4 to 0.7.
        impl: As of `masked_moments`.

    Returns:
        ``[entries]`` float32, 0 where ``mask`` is False, computed in float64. Not differentiable.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, ``x`` requires a gradient, ``shift`` or
            ``eps`` is not finite, ``eps`` is negative, or ``ddof`` is neither 0 nor 1.

    Cost: `masked_moments`, and one launch, which reads ``x`` again; with ``sums`` that one alone.
    No copy of contiguous tensors that begin at a multiple of 16 bytes, no host synchronisation.

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
    check_number(OP, "eps", eps, least=0, finite=True)
    check_integer(OP, "ddof", ddof, most=1)
    if not isinstance(center, bool):
        raise TypeError(f"{OP}: center must be a bool, got {center!r}")
    if sums is not None:
        check_tensor(OP, "sums", sums, dtypes=(torch.float64,), device=x.device)
        if sums.shape[0] != 3:
            raise ValueError(f"{OP}: sums must have 3 entries, got shape {list(sums.shape)}")
    impl = resolve_impl(OP, impl, x)
    given = moments_and_sums(x, mask, impl=impl) if sums is None else sums.detach().contiguous()
    return whiten_by(x, mask, given, shift=shift, ddof=ddof, eps=eps, center=center, impl=impl)


def whiten_by(
    x: torch.Tensor,
    mask: torch.Tensor,
    given: torch.Tensor,
    *,
    ddof: int,
    impl: str,
    shift: float = 0.0,
    eps: float = 0.0,
    center: bool = True,
) -> torch.Tensor:
    """Whiten by ``given``: 3 entries of `moment_sums`, or the 8 of `moments_and_sums`.

    Arguments are checked. Cost: one launch.
    """
    whitened: torch.Tensor = torch.ops.trajpack.whiten(
        x.contiguous(), mask.contiguous(), given, float(shift), ddof, float(eps), center, impl
    )
    return whitened


def masked_moments_reference(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Define `masked_moments` in plain torch; no value is read by the host."""
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
    """Whiten by count, mean and Σ(x - mean)² in plain torch; on the host by numpy, in chunks."""
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
    """Return count, mean and Σ(x - mean)², 0 if within the rounding of the sums."""
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


def run_moments(x: torch.Tensor, mask: torch.Tensor, shift: float, impl: str) -> torch.Tensor:
    """Return `moments_and_sums` of contiguous tensors."""
    if impl == "triton":
        from trajpack.kernels.reduce.whiten_triton import moments_forward

        return moments_forward(x, mask, shift)
    moments = masked_moments_torch(x, mask)
    count, mean, squares = moments[:3].unbind()
    away = torch.where(count > 0, mean - shift, 0.0)
    sums = torch.stack([count, count * away, squares + count * away * away])
    return torch.cat([moments, sums])


def _run_whiten(
    x: torch.Tensor,
    mask: torch.Tensor,
    given: torch.Tensor,
    shift: float,
    ddof: int,
    eps: float,
    center: bool,
    impl: str,
) -> torch.Tensor:
    if impl == "triton":
        from trajpack.kernels.reduce.whiten_triton import whiten_forward

        return whiten_forward(
            x, mask, given, shift=shift, noise=NOISE, ddof=ddof, eps=eps, center=center
        )
    if given.shape[0] == 3:
        count, mean, squares = moments_of_sums(given, shift)
    else:
        count, mean, squares = given[:3].unbind()
    return whiten_reference(x, mask, (count, mean, squares), ddof=ddof, eps=eps, center=center)


register_op(
    "masked_moments(Tensor x, Tensor mask, float shift, str impl) -> Tensor",
    run_moments,
    lambda x, *_: x.new_empty(8, dtype=torch.float64),
)
register_op(
    "whiten(Tensor x, Tensor mask, Tensor given, float shift, int ddof, float eps, bool center, "
    "str impl) -> Tensor",
    _run_whiten,
    lambda x, *_: x.new_empty(x.shape, dtype=torch.float32),
)
