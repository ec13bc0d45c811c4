"""Sums and means over segments: sequences by boundaries, or turns by spans."""

from __future__ import annotations

from typing import Any

import torch

from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.runs import MAX_TOKENS
from trajpack.kernels.scan.scan_inputs import Scan
from trajpack.kernels.segments import bounds_of_segments, check_segments, owners_of_entries
from trajpack.kernels.validation import (
    check_integer,
    check_max_seqlen,
    check_segments_within,
    check_tensor,
)

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)


def segment_sum(
    x: torch.Tensor,
    segments: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Sum the entries of each segment: log-probabilities of sequences, lengths of responses.

    A segment's sum is bitwise the same whatever it is packed with, and in every run. Entries
    outside all segments count nowhere.

    Args:
        x: ``[entries]`` float32, float64, int32, int64 or bool.
        segments: ``[segments + 1]`` int32 boundaries that never decrease (``cu_seqlens``), or
            ``[segments, 2]`` int32 spans, first index and one past the last (``turn_spans``),
            in any order, that do not overlap. Segments may be empty.
        mask: ``[entries]`` bool: True for entries that count; all if None. Other entries may be
            NaN or infinite.
        max_seqlen: Upper bound of a segment's length, if known. It decides how the work is cut,
            never a result.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.

    Returns:
        ``[segments]``: float32 of float32 and float64 of float64, summed in float64, or the
        exact int64 of integers and bools. An empty sum is 0; NaN that counts makes it NaN.
        Differentiable with respect to ``x``.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, there are 2³¹ entries or more, or ``max_seqlen``
            is negative. On the host also if segments leave the entries or end before they begin. On
            a device segments are not read: entries outside are left out, and results of boundaries
            that decrease are arbitrary.

    Example:
        >>> logprobs = torch.tensor([-1.0, -2.0, -4.0, -8.0])
        >>> generated = torch.tensor([False, True, True, True])
        >>> cu_seqlens = torch.tensor([0, 3, 3, 4], dtype=torch.int32)
        >>> segment_sum(logprobs, cu_seqlens, mask=generated)
        tensor([-6.,  0., -8.])
        >>> segment_sum(generated, cu_seqlens)
        tensor([2, 0, 1])

    Reference:
        ``torch.segment_reduce``, with masks, spans and integers.
    """
    return _checked_sum("segment_sum", x, segments, mask, max_seqlen, impl)


def segment_mean(
    x: torch.Tensor, segments: torch.Tensor, *, mask: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """Average the entries of each segment that count; 0 of none. Arguments as of `segment_sum`.

    Returns:
        ``[segments]``, float64 of float64 and float32 of all others. Differentiable with respect to
        ``x``.

    Example:
        >>> logprobs = torch.tensor([-1.0, -2.0, -4.0, -8.0])
        >>> segment_mean(logprobs, torch.tensor([0, 3, 3, 4], dtype=torch.int32))
        tensor([-2.3333,  0.0000, -8.0000])
    """
    total = _checked_sum("segment_mean", x, segments, mask, **options)
    if mask is None:
        begin, end = bounds_of_segments(segments, x.shape[0])
        count = end - begin
    else:
        count = _checked_sum("segment_mean", mask, segments, None, **options)
    mean = total.double() / count.clamp(min=1)
    return mean.to(total.dtype if total.is_floating_point() else torch.float32)


def _checked_sum(
    op: str,
    x: torch.Tensor,
    segments: torch.Tensor,
    mask: torch.Tensor | None,
    max_seqlen: int | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    check_tensor(op, "x", x, dtypes=DTYPES)
    check_integer(op, "number of entries", x.shape[0], most=MAX_TOKENS)
    check_segments(op, segments, x.device)
    if mask is not None:
        each: dict[str, Any] = {"device": x.device, "entries": x.shape[0], "per": "entry"}
        check_tensor(op, "mask", mask, dtypes=(torch.bool,), **each)
        mask = mask.contiguous()
    check_max_seqlen(op, max_seqlen)
    total: torch.Tensor = torch.ops.trajpack.segment_sum(
        x.contiguous(), segments.contiguous(), mask, op, resolve_impl(op, impl, x.device),
        max_seqlen,
    )  # fmt: skip
    return total


def segment_sum_reference(
    x: torch.Tensor, segments: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Define `segment_sum` in plain torch; no value is read by the host.

    Floats are added in the entries' order, in float64: ``index_put_`` adds serially on the host,
    and after a stable sort on CUDA.
    """
    if not x.is_floating_point():
        counts = x.long() if mask is None else torch.where(mask, x.long(), 0)
        totals = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        begin, end = bounds_of_segments(segments, x.shape[0])
        return totals[end] - totals[begin]
    owner, counted = owners_of_entries(segments, x.shape[0])
    num_segments = segments.shape[0] - (segments.ndim == 1)
    counted = counted if mask is None else counted & mask
    owner = torch.where(counted, owner, num_segments)  # one more takes all that count nowhere
    sums = x.new_zeros(num_segments + 1, dtype=torch.float64)
    return _of_dtype(sums.index_put_((owner,), x.double(), accumulate=True)[:-1], x)


def _segment_sum_by_scan(
    x: torch.Tensor, segments: torch.Tensor, mask: torch.Tensor | None, max_seqlen: int | None
) -> torch.Tensor:
    """Sum float32 between boundaries: returns without a discount, at the first entries."""
    from trajpack.kernels.scan.credit_scan_triton import credit_scan_forward

    entries = x.shape[0]
    # entries in front of all segments and behind them have a segment of their own
    within = segments.clamp(0, entries)
    bounds = torch.cat([torch.zeros_like(within[:1]), within, torch.full_like(within[:1], entries)])
    rewards = x if mask is None else torch.where(mask, x, 0.0)
    returns, _ = credit_scan_forward(Scan(bounds, rewards, kind="returns", max_seqlen=max_seqlen))
    begin, end = bounds_of_segments(segments, entries)
    returns = torch.nn.functional.pad(returns, (0, 1))[begin]
    return _of_dtype(torch.where(end > begin, returns, 0.0), x)


def _of_dtype(sums: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return sums of the dtype of ``x``, with one NaN and no negative 0."""
    return torch.where(sums.isnan(), float("nan"), sums + 0.0).to(x.dtype)


def _run(*inputs: Any) -> torch.Tensor:
    x, segments, mask, op, impl, max_seqlen = inputs
    check_segments_within(op, "segments", segments, x.shape[0])
    if impl == "triton" and x.dtype == torch.float32 and segments.ndim == 1:
        return _segment_sum_by_scan(x, segments, mask, max_seqlen)
    return segment_sum_reference(x, segments, mask)


def _fake(x: torch.Tensor, segments: torch.Tensor, *_: Any) -> torch.Tensor:
    dtype = x.dtype if x.is_floating_point() else torch.int64
    return x.new_empty((segments.shape[0] - int(segments.ndim == 1),), dtype=dtype)


def _setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    x, segments, mask, *_ = inputs
    ctx.num_entries = x.shape[0]
    ctx.save_for_backward(segments, mask)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    segments, mask = ctx.saved_tensors
    owner, counted = owners_of_entries(segments, ctx.num_entries)
    counted = counted if mask is None else counted & mask
    if grad.shape[0] == 0:  # no segments
        return grad.new_zeros(ctx.num_entries), *[None] * 5
    return torch.where(counted, grad[owner], 0.0), *[None] * 5


register_op(
    "segment_sum(Tensor x, Tensor segments, Tensor? mask, str op, str impl, SymInt? max_seqlen) "
    "-> Tensor",
    _run,
    _fake,
    setup_context=_setup_context,
    backward=_backward,
)
