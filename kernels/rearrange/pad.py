"""Packed tokens as a padded rectangle and back, for any dtype and trailing dimensions."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import torch

from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.fields.stretches import moved
from trajpack.kernels.fields.units import UNITS
from trajpack.kernels.validation import (
    check_boundaries,
    check_choice,
    check_cu_seqlens,
    check_integer,
    check_tensor,
)

Side: TypeAlias = Literal["left", "right"]
Number: TypeAlias = bool | int | float | complex

MAX_ROWS = 2**31 - 4096
"""Most tokens, and largest ``max_seqlen``: kernels count in int32, up to a tile further."""
BITS = {**UNITS, 16: torch.complex128}
"""Dtype that moves an element bit for bit, by the element's bytes."""


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

    Example:
        >>> packed, cu_seqlens = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]).int()
        >>> pad(packed, cu_seqlens, 3, value=-1, side="left")
        tensor([[-1, -1,  1],
                [-1,  2,  3]])
    """
    check_tensor("pad", "packed", packed, or_more=True)
    check_integer("pad", "number of tokens", packed.shape[0], most=MAX_ROWS)
    check_choice("pad", "side", side, get_args(Side))
    check_cu_seqlens("pad", cu_seqlens, device=packed.device)
    check_integer("pad", "max_seqlen", max_seqlen, most=MAX_ROWS)
    _check_value(value, packed.dtype)
    chosen = resolve_impl("pad", impl, packed.device)
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
        cu_seqlens: As for `pad`; they end at ``num_tokens``.
        num_tokens: Tokens of all sequences.
        side: As for `pad`.
        impl: As for `pad`.

    Returns:
        ``[num_tokens, *rest]``, contiguous, of the dtype of ``padded``. Differentiable with
        respect to ``padded``; the gradient of padding is 0.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If shapes or devices disagree; on the host also if boundaries are ill-formed or
            a sequence is longer than ``max_seqlen``. On a device they are not read: a token that
            no row holds is 0.

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
    chosen = resolve_impl("unpad", impl, padded.device)
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


def _pad(
    packed: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *options: Any
) -> torch.Tensor:
    value, side, impl = options
    check_boundaries("pad", cu_seqlens, packed.shape[0], max_seqlen)
    if impl == "triton":
        from trajpack.kernels.rearrange.pad_triton import pad_forward

        return pad_forward(packed, cu_seqlens, max_seqlen, value, side)
    bits = packed.detach().view(BITS[packed.element_size()])
    fill = torch.full((), value, dtype=packed.dtype, device=packed.device).view(bits.dtype)
    first, begin, size = _places(cu_seqlens, max_seqlen, max_seqlen, side)
    padded = moved(bits, first, begin, size, len(size) * max_seqlen, fill)
    return padded.view(packed.dtype).view(len(size), max_seqlen, *packed.shape[1:])


def _unpad(
    padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int, side: str, impl: str
) -> torch.Tensor:
    check_boundaries("unpad", cu_seqlens, num_tokens, padded.shape[1])
    if impl == "triton":
        from trajpack.kernels.rearrange.pad_triton import unpad_forward

        return unpad_forward(padded, cu_seqlens, num_tokens, side)
    bits = padded.detach().view(BITS[padded.element_size()])
    (batch, max_seqlen, *rest), (step, stride, *inner) = bits.shape, bits.stride()
    apart, rows = max_seqlen, batch * max_seqlen
    if bits.numel() and stride and step % stride == 0:  # as of ``logits[:, :-1]``
        apart = step // stride
        rows = (batch - 1) * apart + max_seqlen
        bits = bits.as_strided((rows, *rest), (stride, *inner))
    first, begin, size = _places(cu_seqlens, max_seqlen, apart, side)
    bits = bits.reshape(rows, *rest)
    return moved(bits, begin, first, size, num_tokens, 0).view(padded.dtype)


def _places(
    cu_seqlens: torch.Tensor, max_seqlen: int, apart: int, side: str
) -> tuple[torch.Tensor, ...]:
    """Return each sequence's first place, in rows that begin ``apart``, first token, and size."""
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    size = (end - begin).clamp(0, max_seqlen)
    first = torch.arange(len(size), device=size.device) * apart
    return first + (max_seqlen - size) if side == "left" else first, begin, size


def _setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    rows, cu_seqlens, *_, ctx.side, ctx.impl = inputs
    ctx.shape = rows.shape
    ctx.save_for_backward(cu_seqlens)


def _pad_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    sizes = *ctx.saved_tensors, ctx.shape[0]
    return torch.ops.trajpack.unpad(grad, *sizes, ctx.side, ctx.impl), *[None] * 5


def _unpad_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    sizes = *ctx.saved_tensors, ctx.shape[1]
    return torch.ops.trajpack.pad(grad, *sizes, 0, ctx.side, ctx.impl), *[None] * 4


register_op(
    "pad(Tensor packed, Tensor cu_seqlens, SymInt max_seqlen, Scalar value, str side, str impl)"
    " -> Tensor",
    _pad,
    lambda packed, cu_seqlens, max_seqlen, *_: packed.new_empty(
        (cu_seqlens.shape[0] - 1, max_seqlen, *packed.shape[1:])
    ),
    setup_context=_setup_context,
    backward=_pad_backward,
)
register_op(
    "unpad(Tensor padded, Tensor cu_seqlens, SymInt num_tokens, str side, str impl) -> Tensor",
    _unpad,
    lambda padded, _, num_tokens, *__: padded.new_empty((num_tokens, *padded.shape[2:])),
    setup_context=_setup_context,
    backward=_unpad_backward,
)
