"""Sums, means and maxima over segments: sequences by their boundaries, or turns by their spans."""

from __future__ import annotations

from typing import Any

import torch

from trajpack.kernels.dispatch import LIBRARY, Impl, resolve_impl
from trajpack.kernels.reduce.segment_reduce_host import check_bounds, segment_reduce_on_host
from trajpack.kernels.reduce.segment_reduce_reference import (
    bounds_of_segments,
    dtype_of,
    owners_of_entries,
    segment_reduce_reference,
)
from trajpack.kernels.validation import check_device, check_tensor

FLOATS = (torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def segment_sum(
    x: torch.Tensor,
    segments: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Add up the entries of each segment: log-probabilities of sequences, lengths of responses.

    A segment's sum is bitwise the same whatever it is packed with, and in every run. Entries
    outside all segments count nowhere.

    Args:
        x: ``[entries]``, float32, float64, int32, int64 or bool.
        segments: ``[segments + 1]`` int32 boundaries that never decrease (``cu_seqlens``), or
            ``[segments, 2]`` int32 spans, first index and one past the last (``turn_spans``),
            in any order, that do not overlap. Either may hold empty segments.
        mask: ``[entries]`` bool: entries that count; all of them if None. What does not count
            may be NaN or infinite.
        max_seqlen: No segment is longer than this, as far as the caller knows. It decides
            how the work is cut, never a result: a wrong bound costs time alone.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.

    Returns:
        ``[segments]``: float32 of float32 and float64 of float64, summed in float64, or the
        exact int64 of integers and bools. The sum of nothing is 0; NaN that counts makes it NaN.
        Differentiable with respect to ``x``.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, or ``max_seqlen`` is negative. On the host,
            where segments can be read for nothing, also if they leave the entries or end
            before they begin. On a device they are not read: what lies outside is left out, and
            results of boundaries that decrease are arbitrary.

    Cost: one launch where ``max_seqlen`` is at most 4,096, where there are at most 8,192 entries,
    and for spans, each of which one warp then walks from its start, however long; else two, and
    an eighth of a byte of scratch for an entry. Every entry is read once. No copy, no host
    synchronisation. The gradient is made of plain torch operations over entries, without a
    synchronisation either; where segments are spans, they are sorted.

    Example:
        >>> logprobs = torch.tensor([-1.0, -2.0, -4.0, -8.0])
        >>> generated = torch.tensor([False, True, True, True])
        >>> cu_seqlens = torch.tensor([0, 3, 3, 4], dtype=torch.int32)
        >>> segment_sum(logprobs, cu_seqlens, mask=generated)
        tensor([-6.,  0., -8.])
        >>> segment_sum(generated, cu_seqlens)
        tensor([2, 0, 1])

    Reference:
        ``torch.segment_reduce``, with masks, spans and integers, and without NaN for the mean of
        nothing.
    """
    return _segment_reduce("sum", x, segments, mask, max_seqlen, impl)


def segment_mean(
    x: torch.Tensor,
    segments: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Average the entries of each segment that count.

    Args:
        x: ``[entries]``, float32, float64, int32, int64 or bool.
        segments: Boundaries or spans, as in `segment_sum`.
        mask: ``[entries]`` bool: entries that count; all of them if None.
        max_seqlen: As in `segment_sum`.
        impl: As in `segment_sum`.

    Returns:
        ``[segments]``, float64 of float64 and float32 of all others: the sum in float64, or of
        integers the exact one, divided by the number of entries that count. The mean of nothing
        is 0. Differentiable with respect to ``x``.

    Raises:
        TypeError: As in `segment_sum`.
        ValueError: As in `segment_sum`.

    Cost: as `segment_sum`, with half as much scratch again where there is a mask.

    Example:
        >>> logprobs = torch.tensor([-1.0, -2.0, -4.0, -8.0])
        >>> segment_mean(logprobs, torch.tensor([0, 3, 3, 4], dtype=torch.int32))
        tensor([-2.3333,  0.0000, -8.0000])

    Reference:
        ``torch.segment_reduce`` with ``reduce="mean"``, which has NaN for the mean of nothing.
    """
    return _segment_reduce("mean", x, segments, mask, max_seqlen, impl)


def segment_max(
    x: torch.Tensor,
    segments: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Return the greatest of the entries of each segment that count.

    Args:
        x: ``[entries]``, float32, float64, int32 or int64.
        segments: Boundaries or spans, as in `segment_sum`.
        mask: ``[entries]`` bool: entries that count; all of them if None.
        max_seqlen: As in `segment_sum`.
        impl: As in `segment_sum`.

    Returns:
        ``[segments]`` of the dtype of ``x``. The maximum of nothing is -inf, of integers the
        least of the dtype. NaN that counts makes it NaN. Differentiable with respect to ``x``:
        equal maxima share the gradient equally, as in ``torch.amax``.

    Raises:
        TypeError: As in `segment_sum`; also for bools.
        ValueError: As in `segment_sum`.

    Cost: as `segment_sum`. The gradient also counts the maxima, which is a sum.

    Example:
        >>> versions = torch.tensor([3, 3, 4, 1, 2])
        >>> turn_spans = torch.tensor([[3, 5], [0, 3]], dtype=torch.int32)
        >>> segment_max(versions, turn_spans)
        tensor([2, 4])

    Reference:
        ``torch.segment_reduce`` with ``reduce="max"``; gradients as those of ``torch.amax``.
    """
    return _segment_reduce("max", x, segments, mask, max_seqlen, impl)


def _segment_reduce(
    reduction: str,
    x: torch.Tensor,
    segments: torch.Tensor,
    mask: torch.Tensor | None,
    max_seqlen: int | None,
    impl: Impl,
) -> torch.Tensor:
    op = f"segment_{reduction}"
    bools = () if reduction == "max" else (torch.bool,)
    check_tensor(op, "x", x, ndim=1, dtypes=(*FLOATS, *INTEGERS, *bools))
    _check_segments(op, segments, x.device)
    if mask is not None:
        check_tensor(op, "mask", mask, ndim=1, dtypes=(torch.bool,))
        check_device(op, "mask", mask, x.device)
        if mask.shape != x.shape:
            raise ValueError(
                f"{op}: mask must have one entry for each of {x.shape[0]} of x, "
                f"got shape {list(mask.shape)}"
            )
        mask = mask.contiguous()
    if max_seqlen is not None:
        if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt)):
            raise TypeError(f"{op}: max_seqlen must be an int or None, got {max_seqlen!r}")
        if max_seqlen < 0:
            raise ValueError(f"{op}: max_seqlen must not be negative, got {max_seqlen}")
    chosen = resolve_impl(op, impl, x)
    reduced: torch.Tensor = torch.ops.trajpack.segment_reduce(
        x.contiguous(), segments.contiguous(), mask, reduction, chosen, max_seqlen
    )
    return reduced


def _check_segments(op: str, segments: torch.Tensor, device: torch.device) -> None:
    ndim = 2 if isinstance(segments, torch.Tensor) and segments.ndim == 2 else 1
    check_tensor(op, "segments", segments, ndim=ndim, dtypes=(torch.int32,))
    check_device(op, "segments", segments, device)
    if ndim == 1 and segments.shape[0] == 0:
        raise ValueError(f"{op}: segments must have segments + 1 boundaries, got none")
    if ndim == 2 and segments.shape[1] != 2:
        raise ValueError(
            f"{op}: segments must be boundaries [segments + 1] or spans [segments, 2], "
            f"got shape {list(segments.shape)}"
        )


def _run(
    x: torch.Tensor,
    segments: torch.Tensor,
    mask: torch.Tensor | None,
    reduction: str,
    impl: str,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    check_bounds(f"segment_{reduction}", segments, x.shape[0])
    if impl == "triton":
        from trajpack.kernels.reduce.segment_reduce_triton import segment_reduce_forward

        out = _fake(x, segments, mask, reduction, impl)
        segment_reduce_forward(x, segments, mask, out, reduction, max_seqlen)
        return out
    if x.device.type == "cpu":
        return segment_reduce_on_host(x, segments, mask, reduction, dtype_of(x, reduction))
    return segment_reduce_reference(x, segments, mask, reduction)


def _fake(
    x: torch.Tensor,
    segments: torch.Tensor,
    mask: torch.Tensor | None,
    reduction: str,
    impl: str,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    num_segments = segments.shape[0] - (segments.ndim == 1)
    return x.new_empty((num_segments,), dtype=dtype_of(x, reduction))


def _setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    x, segments, mask, ctx.reduction, ctx.impl, ctx.max_seqlen = inputs
    ctx.num_entries = x.shape[0]
    ctx.save_for_backward(segments, mask, *((x, output) if ctx.reduction == "max" else ()))


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
    segments, mask, *maxima = ctx.saved_tensors
    owner, held = owners_of_entries(segments, ctx.num_entries)
    held = held if mask is None else held & mask
    if grad.shape[0] == 0:  # no segment, so nobody to ask
        return grad.new_zeros(ctx.num_entries), None, None, None, None, None
    counted = mask
    if maxima:
        x, most = maxima[0], maxima[1][owner]
        counted = held = held & ((x == most) | (x.isnan() & most.isnan()))
    if ctx.reduction != "sum":
        begin, end = bounds_of_segments(segments, ctx.num_entries)
        count = end - begin
        if counted is not None:
            count = torch.ops.trajpack.segment_reduce(
                counted, segments, None, "sum", ctx.impl, ctx.max_seqlen
            )
        grad = (grad.double() / count.clamp(1)).to(grad.dtype)
    return torch.where(held, grad[owner], 0.0), None, None, None, None, None


LIBRARY.define(
    "segment_reduce(Tensor x, Tensor segments, Tensor? mask, str reduction, str impl, "
    "SymInt? max_seqlen=None) -> Tensor"
)
LIBRARY.impl("segment_reduce", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::segment_reduce", _fake, lib=LIBRARY)
torch.library.register_autograd(
    "trajpack::segment_reduce", _backward, setup_context=_setup_context, lib=LIBRARY
)
