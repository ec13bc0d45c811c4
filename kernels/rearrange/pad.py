"""Packed tokens as a padded rectangle and back, for any dtype and trailing dimensions.

The first touch of fresh memory dominates on the host. Results are taken from numpy, whose large
arrays come in huge pages, and every byte of them is written once.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.fields.gather_fields import UNITS
from trajpack.kernels.validation import (
    check_boundaries,
    check_choice,
    check_cu_seqlens,
    check_integer,
    check_tensor,
)

Side: TypeAlias = Literal["left", "right"]
Number: TypeAlias = bool | int | float | complex
Ints: TypeAlias = npt.NDArray[np.int64]
Array: TypeAlias = npt.NDArray[Any]

MAX_ROWS = 2**31 - 4096
"""Most tokens, and largest ``max_seqlen``: kernels count in int32, up to a tile further."""
BITS = {**UNITS, 16: torch.complex128}
"""Dtype that moves an element bit for bit, by the element's bytes."""
SHORT = 1024
"""Mean bytes of a sequence below which one gather is faster than a copy for each (measured)."""


def pad(
    packed: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    value: Number = 0,
    side: Side = "right",
    impl: Impl = "auto",
) -> torch.Tensor:
    """Lay packed sequences out as rows of one length.

    Args:
        packed: ``[tokens, *rest]`` of any dtype; moved bit for bit. Only trailing dimensions that
            are not contiguous are copied first.
        cu_seqlens: ``[batch + 1]`` int32 boundaries: starts at 0, ends at ``tokens``, never
            decreases.
        max_seqlen: Tokens of a row, at least those of the longest sequence.
        value: Padding value; must be a value of the dtype.
        side: Side of the padding: ``"right"`` after the tokens, ``"left"`` before them.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.

    Returns:
        ``[batch, max_seqlen, *rest]``, contiguous, of the dtype of ``packed``. Differentiable
        with respect to ``packed``; the gradient of padding is dropped.

    Raises:
        TypeError: If an argument is of the wrong type, or ``value`` is not one of the dtype.
        ValueError: If shapes or devices disagree; on the host also if boundaries are ill-formed or
            a sequence is longer than ``max_seqlen``. On a device they are not read: the tail of
            such a sequence is dropped, and no address outside the tensors is touched.

    Cost: one launch, no copy, no host synchronisation; every byte of the result is written
    once. The gradient costs the same, and saves nothing but ``cu_seqlens``.

    Example:
        >>> packed, cu_seqlens = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]).int()
        >>> pad(packed, cu_seqlens, 3, value=-1, side="left")
        tensor([[-1, -1,  1],
                [-1,  2,  3]])
    """
    check_tensor("pad", "packed", packed, or_more=True)
    check_choice("pad", "side", side, get_args(Side))
    check_cu_seqlens("pad", cu_seqlens, device=packed.device)
    check_integer("pad", "max_seqlen", max_seqlen, most=MAX_ROWS)
    _check_value(value, packed.dtype)
    chosen = resolve_impl("pad", impl, packed)
    padded: torch.Tensor = torch.ops.trajpack.pad(
        packed, cu_seqlens.contiguous(), max_seqlen, value, side, chosen
    )
    return padded


def unpad(
    padded: torch.Tensor,
    cu_seqlens: torch.Tensor,
    num_tokens: int,
    *,
    side: Side = "right",
    impl: Impl = "auto",
) -> torch.Tensor:
    """Take the tokens of padded rows, one sequence after another.

    Args:
        padded: ``[batch, max_seqlen, *rest]`` of any dtype; moved bit for bit. Only trailing
            dimensions that are not contiguous are copied first; ``logits[:, :-1]`` is not.
        cu_seqlens: ``[batch + 1]`` int32 boundaries of the result: starts at 0, ends at
            ``num_tokens``, never decreases.
        num_tokens: Tokens of all sequences.
        side: Side of the padding: ``"right"`` after the tokens, ``"left"`` before them.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.

    Returns:
        ``[num_tokens, *rest]``, contiguous, of the dtype of ``padded``. Differentiable with
        respect to ``padded``; the gradient of padding is 0.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If shapes or devices disagree; on the host also if boundaries are ill-formed or
            a sequence is longer than ``max_seqlen``. On a device they are not read: a token that
            no row holds is 0.

    Cost: one launch, no copy, no host synchronisation; memory for the result and no more. The
    gradient costs one launch, and saves nothing but ``cu_seqlens``.

    Example:
        >>> padded = torch.tensor([[0, 0, 1], [0, 2, 3]])
        >>> unpad(padded, torch.tensor([0, 1, 3]).int(), 3, side="left")
        tensor([1, 2, 3])
    """
    check_tensor("unpad", "padded", padded, ndim=2, or_more=True)
    check_choice("unpad", "side", side, get_args(Side))
    check_cu_seqlens("unpad", cu_seqlens, device=padded.device)
    check_integer("unpad", "num_tokens", num_tokens, most=MAX_ROWS)
    batch, max_seqlen = padded.shape[:2]
    check_integer("unpad", "padded.shape[1]", max_seqlen, most=MAX_ROWS)
    if cu_seqlens.shape[0] != batch + 1:
        raise ValueError(
            f"unpad: cu_seqlens must have {batch + 1} entries for padded of shape "
            f"{list(padded.shape)}, got {cu_seqlens.shape[0]}"
        )
    chosen = resolve_impl("unpad", impl, padded)
    packed: torch.Tensor = torch.ops.trajpack.unpad(
        padded, cu_seqlens.contiguous(), num_tokens, side, chosen
    )
    return packed


def _check_value(value: Number, dtype: torch.dtype) -> None:
    kind = str(dtype).removeprefix("torch.")
    allowed: Any = (bool, int, float)
    low, high = float("-inf"), float("inf")
    if dtype.is_complex:
        allowed = (*allowed, complex)
    elif not dtype.is_floating_point:
        allowed = (bool, int)
        limits = None if dtype == torch.bool else torch.iinfo(dtype)
        low, high = (limits.min, limits.max) if limits else (0, 1)
    if not isinstance(value, allowed):
        raise TypeError(f"pad: value must be a value of {kind}, got {value!r}")
    if isinstance(value, int) and not low <= value <= high:
        raise ValueError(f"pad: value must be in [{low}, {high}] for {kind}, got {value}")


def _sequence_places(
    cu_seqlens: torch.Tensor, max_seqlen: int, side: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return begin, end and length of the padding before each sequence, int64 ``[batch]``."""
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    room = (max_seqlen - (end - begin)).clamp(min=0)
    return begin, end, room if side == "left" else torch.zeros_like(room)


def pad_reference(
    packed: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    value: Number = 0,
    side: Side = "right",
) -> torch.Tensor:
    """Define `pad` in plain torch: each place looks up its token.

    No value is read by the host, so it runs on any device.
    """
    bits = packed.view(BITS[packed.element_size()])
    fill = torch.full((), value, dtype=packed.dtype, device=packed.device).view(bits.dtype)
    begin, end, before = _sequence_places(cu_seqlens, max_seqlen, side)
    position = torch.arange(max_seqlen, device=packed.device) - before[:, None]
    token = begin[:, None] + position
    holds = (position >= 0) & (token < end[:, None])
    shape = (*holds.shape, *packed.shape[1:])
    if packed.shape[0] == 0:
        return fill.expand(shape).contiguous().view(packed.dtype)
    moved = bits[token.clamp(0, packed.shape[0] - 1)]
    holds = holds.reshape(*holds.shape, *[1] * (packed.ndim - 1))
    return torch.where(holds, moved, fill).view(packed.dtype)


def unpad_reference(
    padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int, *, side: Side = "right"
) -> torch.Tensor:
    """Define `unpad` in plain torch: each token looks up its sequence, then its place.

    No value is read by the host, so it runs on any device.
    """
    batch, max_seqlen = padded.shape[:2]
    bits = padded.view(BITS[padded.element_size()])
    if batch == 0 or max_seqlen == 0:
        return bits.new_zeros((num_tokens, *padded.shape[2:])).view(padded.dtype)
    begin, end, before = _sequence_places(cu_seqlens, max_seqlen, side)
    token = torch.arange(num_tokens, device=padded.device)
    sequence = torch.searchsorted(end, token, right=True).clamp(max=batch - 1)
    position = token - begin[sequence] + before[sequence]
    held = (token < end[sequence]) & (position < max_seqlen)
    moved = bits[sequence, position.clamp(0, max_seqlen - 1)]
    held = held.reshape(-1, *[1] * (padded.ndim - 2))
    return torch.where(held, moved, bits.new_zeros(())).view(padded.dtype)


def _pad_on_host(
    packed: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *, value: Number, side: str
) -> torch.Tensor:
    source, ends = _bits(packed), cu_seqlens.numpy().astype(np.int64)
    fill = _bits(torch.full((1,), value, dtype=packed.dtype, device="cpu"))[0]
    out = np.empty((ends.size - 1, max_seqlen, *source.shape[1:]), source.dtype)
    if source.nbytes < SHORT * len(out):
        out[...] = fill
        rows = out.reshape(len(out) * max_seqlen, *source.shape[1:])
        rows[_places(ends, max_seqlen, side)] = source
    else:
        bounds = ends.tolist()
        for row, begin, end in zip(out, bounds[:-1], bounds[1:], strict=True):
            first = max_seqlen - (end - begin) if side == "left" else 0
            last = first + end - begin
            row[:first], row[first:last], row[last:] = fill, source[begin:end], fill
    return torch.from_numpy(out).view(packed.dtype)


def _unpad_on_host(
    padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int, side: str
) -> torch.Tensor:
    source, ends = _bits(padded), cu_seqlens.numpy().astype(np.int64)
    max_seqlen = source.shape[1]
    out = np.empty((num_tokens, *source.shape[2:]), source.dtype)
    if out.nbytes < SHORT * len(source):
        place = _places(ends, max_seqlen, side)
        if source.flags.c_contiguous:
            flat = source.reshape(len(source) * max_seqlen, *source.shape[2:])
            np.take(flat, place, 0, out, mode="clip")  # in range; "raise" would copy twice
        else:
            out[...] = source[np.divmod(place, max(max_seqlen, 1))]
    else:
        bounds = ends.tolist()
        for row, begin, end in zip(source, bounds[:-1], bounds[1:], strict=True):
            first = max_seqlen - (end - begin) if side == "left" else 0
            out[begin:end] = row[first : first + end - begin]
    return torch.from_numpy(out).view(padded.dtype)


def _bits(tensor: torch.Tensor) -> Array:
    """Return the memory of a tensor as numbers that numpy knows; nothing is copied."""
    bits: Array = tensor.detach().view(BITS[tensor.element_size()]).numpy()
    return bits


def _places(ends: Ints, max_seqlen: int, side: str) -> Ints:
    """Return the index of each token among the ``batch · max_seqlen`` places."""
    lengths = np.diff(ends)
    first = np.arange(lengths.size) * max_seqlen
    if side == "left":
        first += max_seqlen - lengths
    return np.arange(ends[-1]) + np.repeat(first - ends[:-1], lengths)


def _pad_run(
    packed: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    value: Number,
    side: Side,
    impl: str,
) -> torch.Tensor:
    check_boundaries("pad", cu_seqlens, packed.shape[0], max_seqlen)
    if impl == "triton":
        from trajpack.kernels.rearrange.pad_triton import pad_forward

        return pad_forward(packed, cu_seqlens, max_seqlen, value, side)
    on_host = packed.device.type == "cpu"
    run = _pad_on_host if on_host else pad_reference
    return run(packed, cu_seqlens, max_seqlen, value=value, side=side)


def _unpad_run(
    padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int, side: Side, impl: str
) -> torch.Tensor:
    check_boundaries("unpad", cu_seqlens, num_tokens, padded.shape[1])
    if impl == "triton":
        from trajpack.kernels.rearrange.pad_triton import unpad_forward

        return unpad_forward(padded, cu_seqlens, num_tokens, side)
    if padded.device.type == "cpu":
        return _unpad_on_host(padded, cu_seqlens, num_tokens, side)
    return unpad_reference(padded, cu_seqlens, num_tokens, side=side)


def _pad_fake(packed: torch.Tensor, cu_seqlens: Any, max_seqlen: int, *_: Any) -> torch.Tensor:
    return packed.new_empty((cu_seqlens.shape[0] - 1, max_seqlen, *packed.shape[1:]))


def _unpad_fake(padded: torch.Tensor, cu_seqlens: Any, num_tokens: int, *_: Any) -> torch.Tensor:
    return padded.new_empty((num_tokens, *padded.shape[2:]))


def _setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    rows, cu_seqlens, *_, ctx.side, ctx.impl = inputs
    ctx.shape = rows.shape
    ctx.save_for_backward(cu_seqlens)


def _pad_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (cu_seqlens,) = ctx.saved_tensors
    packed = torch.ops.trajpack.unpad(grad, cu_seqlens, ctx.shape[0], ctx.side, ctx.impl)
    return packed, None, None, None, None, None


def _unpad_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (cu_seqlens,) = ctx.saved_tensors
    padded = torch.ops.trajpack.pad(grad, cu_seqlens, ctx.shape[1], 0, ctx.side, ctx.impl)
    return padded, None, None, None, None


register_op(
    "pad(Tensor packed, Tensor cu_seqlens, SymInt max_seqlen, Scalar value, str side, str impl)"
    " -> Tensor",
    _pad_run,
    _pad_fake,
    setup_context=_setup_context,
    backward=_pad_backward,
)
register_op(
    "unpad(Tensor padded, Tensor cu_seqlens, SymInt num_tokens, str side, str impl) -> Tensor",
    _unpad_run,
    _unpad_fake,
    setup_context=_setup_context,
    backward=_unpad_backward,
)
