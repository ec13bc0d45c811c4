"""Sums, means and maxima over segments: sequences by boundaries, or turns by spans."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trajpack.kernels.dispatch import Impl, call_op, register_op, resolve_impl
from trajpack.kernels.validation import check_max_seqlen, check_segments_within, check_tensor

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
        ValueError: If shapes or devices disagree, or ``max_seqlen`` is negative. On the host also
            if segments leave the entries or end before they begin. On a device segments are not
            read: entries outside are left out, and results of boundaries that decrease are
            arbitrary.

    Cost: one launch where ``max_seqlen`` is at most 4,096, where there are at most 8,192 entries,
    and for spans, each read by one warp; else two, and an eighth of a byte of scratch for an
    entry. Every entry is read once. No copy, no host synchronisation, nor in the gradient, which
    is plain torch operations over entries and sorts spans.

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

    Arguments, errors and cost are those of `segment_sum`, with half as much scratch again where
    there is a mask.

    Returns:
        ``[segments]``, float64 of float64 and float32 of all others: `segment_sum` divided by the
        number of entries that count; 0 of no entries. Differentiable with respect to ``x``.

    Example:
        >>> logprobs = torch.tensor([-1.0, -2.0, -4.0, -8.0])
        >>> segment_mean(logprobs, torch.tensor([0, 3, 3, 4], dtype=torch.int32))
        tensor([-2.3333,  0.0000, -8.0000])

    Reference:
        ``torch.segment_reduce`` with ``reduce="mean"``, which has NaN for an empty segment.
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
    """Return the maximum of the entries of each segment that count.

    Arguments, errors and cost are those of `segment_sum`, but bools are refused. The gradient also
    counts the maxima.

    Returns:
        ``[segments]`` of the dtype of ``x``; of no entries -inf, or the lowest integer. NaN that
        counts makes it NaN. Differentiable with respect to ``x``: equal maxima share the gradient
        equally, as in ``torch.amax``.

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
    check_tensor(op, "x", x, dtypes=(*FLOATS, *INTEGERS, *bools))
    check_segments(op, segments, x.device)
    if mask is not None:
        each: dict[str, Any] = {"device": x.device, "entries": x.shape[0], "per": "entry"}
        check_tensor(op, "mask", mask, dtypes=(torch.bool,), **each)
        mask = mask.contiguous()
    check_max_seqlen(op, max_seqlen)
    rows, chosen = (x.contiguous(), segments.contiguous(), mask), resolve_impl(op, impl, x.device)
    reduced: torch.Tensor = call_op("segment_reduce", *rows, reduction, chosen, max_seqlen)
    return reduced


def check_segments(op: str, segments: torch.Tensor, device: torch.device) -> None:
    """Raise unless ``segments`` can be boundaries or spans; values are not read."""
    ndim = 2 if isinstance(segments, torch.Tensor) and segments.ndim == 2 else 1
    check_tensor(op, "segments", segments, ndim=ndim, dtypes=(torch.int32,), device=device)
    if ndim == 1 and segments.shape[0] == 0:
        raise ValueError(f"{op}: segments must have segments + 1 boundaries, got none")
    if ndim == 2 and segments.shape[1] != 2:
        raise ValueError(
            f"{op}: segments must be boundaries [segments + 1] or spans [segments, 2], "
            f"got shape {list(segments.shape)}"
        )


def segment_reduce_reference(
    x: torch.Tensor, segments: torch.Tensor, mask: torch.Tensor | None, reduction: str
) -> torch.Tensor:
    """Define the reductions "sum", "mean" and "max" in plain torch; no value is read by the host.

    Sums are made in the entries' order, of floats in float64: ``index_put_`` adds serially on the
    host, and after a stable sort on CUDA.
    """
    owner, inside = owners_of_entries(segments, x.shape[0])
    num_segments = segments.shape[0] - (segments.ndim == 1)
    counted = inside if mask is None else inside & mask
    owner = torch.where(counted, owner, num_segments)  # one more takes all that count nowhere
    if reduction == "max":
        least = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
        result = x.new_full((num_segments + 1,), least).scatter_reduce(0, owner, x, "amax")
    else:
        values = x.double() if x.is_floating_point() else x.long()
        result = values.new_zeros(num_segments + 1).index_put_((owner,), values, accumulate=True)
    if reduction == "mean":
        count = owner.new_zeros(num_segments + 1)
        count = count.index_put_((owner,), torch.ones_like(owner), accumulate=True)
        result = result.double() / count.clamp(1)
    if result.is_floating_point():
        result = torch.where(result.isnan(), float("nan"), result + 0.0)  # one NaN, and no -0
    return result[:-1].to(_dtype_of(x, reduction))


def segment_reduce_torch(
    x: torch.Tensor, segments: torch.Tensor, mask: torch.Tensor | None, reduction: str
) -> torch.Tensor:
    """Compute `segment_reduce_reference` for ``impl="torch"``: on the host by numpy.

    One ``ufunc.reduceat`` is more than 3 times as fast as ``index_put_`` and ``scatter_reduce``.
    """
    if x.device.type != "cpu":
        return segment_reduce_reference(x, segments, mask, reduction)
    begin, end = (side.numpy() for side in _sides(segments))
    entries = x.detach().numpy()
    reduce: np.ufunc = np.maximum if reduction == "max" else np.add
    initial, dtype = 0.0, np.dtype(np.float64 if x.is_floating_point() else np.int64)
    if reduction == "max":
        dtype = entries.dtype
        initial = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    values = np.full(entries.size + 1, initial, dtype)  # an index of reduceat may be the end
    np.copyto(values[:-1], entries, where=True if mask is None else mask.numpy())
    result = np.full(begin.size, initial, dtype)
    (held,) = np.nonzero(end > begin)
    with np.errstate(all="ignore"):
        if held.size:
            held = held[np.argsort(begin[held], kind="stable")]  # reduceat also reduces the gaps
            edges = np.stack([begin[held], end[held]], 1).reshape(-1)
            result[held] = reduce.reduceat(values, edges)[::2]
        if reduction == "mean":
            count = end - begin
            if mask is not None:
                count = segment_reduce_torch(mask, segments, None, "sum").numpy()
            result = result.astype(np.float64) / np.maximum(count, 1)
        if result.dtype.kind == "f":
            result = np.where(np.isnan(result), np.nan, result + 0.0)  # one NaN, and no -0
        return torch.from_numpy(result).to(_dtype_of(x, reduction))


def owners_of_entries(
    segments: torch.Tensor, num_entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the segment of each entry, int64 ``[entries]``, and bool ``[entries]`` if in one.

    The segment of an entry outside all segments is arbitrary.
    """
    begin, end = _bounds_of_segments(segments, num_entries)
    index = torch.arange(num_entries, device=segments.device)
    if begin.shape[0] == 0:
        return index, torch.zeros_like(index, dtype=torch.bool)
    if segments.ndim == 1:
        owner = torch.searchsorted(end, index, right=True).clamp(max=begin.shape[0] - 1)
    else:
        order = torch.where(begin < end, begin, num_entries).sort(stable=True)
        place = torch.searchsorted(order.values, index, right=True) - 1
        owner = order.indices[place.clamp(min=0)]
    return owner, (begin[owner] <= index) & (index < end[owner])


def _bounds_of_segments(
    segments: torch.Tensor, num_entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 ``[segments]`` first index and one past the last, clamped to the entries."""
    begin, end = _sides(segments)
    begin = begin.long().clamp(0, num_entries)
    return begin, torch.maximum(begin, end.long().clamp(0, num_entries))


def _sides(segments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first index of each segment, and one past its last."""
    begin, end = segments.T if segments.ndim == 2 else (segments[:-1], segments[1:])
    return begin, end


def _dtype_of(x: torch.Tensor, reduction: str) -> torch.dtype:
    if reduction == "max" or x.is_floating_point():
        return x.dtype
    return torch.float32 if reduction == "mean" else torch.int64


def _run(*inputs: Any) -> torch.Tensor:
    x, segments, mask, reduction, impl, max_seqlen = inputs
    check_segments_within(f"segment_{reduction}", "segments", segments, x.shape[0])
    if impl == "torch":
        return segment_reduce_torch(x, segments, mask, reduction)
    from trajpack.kernels.reduce.segment_reduce_triton import segment_reduce_forward

    out = _fake(*inputs)
    segment_reduce_forward(x, segments, mask, out, reduction=reduction, max_seqlen=max_seqlen)
    return out


def _fake(x: torch.Tensor, segments: torch.Tensor, *inputs: Any) -> torch.Tensor:
    num_segments = segments.shape[0] - int(segments.ndim == 1)
    return x.new_empty((num_segments,), dtype=_dtype_of(x, inputs[1]))


def _setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    x, segments, mask, ctx.reduction, ctx.impl, ctx.max_seqlen = inputs
    ctx.num_entries = x.shape[0]
    ctx.save_for_backward(segments, mask, *((x, output) if ctx.reduction == "max" else ()))


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    segments, mask, *maxima = ctx.saved_tensors
    owner, held = owners_of_entries(segments, ctx.num_entries)
    held, counted = held if mask is None else held & mask, mask
    if grad.shape[0] == 0:  # no segments
        return grad.new_zeros(ctx.num_entries), *[None] * 5
    if maxima:
        x, most = maxima[0], maxima[1][owner]
        counted = held = held & ((x == most) | (x.isnan() & most.isnan()))
    if ctx.reduction != "sum":
        begin, end = _bounds_of_segments(segments, ctx.num_entries)
        count = end - begin
        if counted is not None:
            count = call_op(
                "segment_reduce", counted, segments, None, "sum", ctx.impl, ctx.max_seqlen
            )
        grad = (grad.double() / count.clamp(1)).to(grad.dtype)
    return torch.where(held, grad[owner], 0.0), *[None] * 5


register_op(
    "segment_reduce(Tensor x, Tensor segments, Tensor? mask, str reduction, str impl, "
    "SymInt? max_seqlen) -> Tensor",
    _run,
    _fake,
    setup_context=_setup_context,
    backward=_backward,
)
