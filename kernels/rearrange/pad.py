"""Packed tokens laid out as a padded rectangle, for any dtype and trailing dimensions."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from trajpack.kernels.dispatch import LIBRARY, Impl, resolve_impl
from trajpack.kernels.rearrange.padding import (
    BITS,
    Side,
    check_count,
    check_tokens,
    sequence_places,
)
from trajpack.kernels.validation import check_boundaries, check_cu_seqlens

Number: TypeAlias = bool | int | float | complex


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
        packed: ``[tokens, *rest]`` of any dtype; moved bit for bit. A stride over tokens is
            followed; trailing dimensions that are not contiguous are first copied.
        cu_seqlens: ``[batch + 1]`` int32 boundaries: starts at 0, ends at ``tokens``, never
            decreases.
        max_seqlen: Tokens of a row, at least those of the longest sequence.
        value: What stands where no token does; must be a value of the dtype.
        side: Where the padding stands: ``"right"`` after the tokens, ``"left"`` before them.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.

    Returns:
        ``[batch, max_seqlen, *rest]``, contiguous, of the dtype of ``packed``. Differentiable
        with respect to ``packed``; the gradient of padding is dropped.

    Raises:
        TypeError: If an argument is of the wrong type, or ``value`` is not one of the dtype.
        ValueError: If shapes or devices disagree. On the host, where boundaries can be read
            for nothing, also if they are ill-formed or a sequence is longer than
            ``max_seqlen``. On a device they are not read: the tail of such a sequence is
            dropped, and no address outside the tensors is touched.

    Cost: one launch, no copy, no host synchronisation; every byte of the result is written
    once. The gradient costs the same, and saves nothing but ``cu_seqlens``.

    Example:
        >>> packed, cu_seqlens = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]).int()
        >>> pad(packed, cu_seqlens, 3, value=-1, side="left")
        tensor([[-1, -1,  1],
                [-1,  2,  3]])
    """
    check_tokens("pad", "packed", packed, 1, side)
    check_cu_seqlens("pad", cu_seqlens, device=packed.device)
    check_count("pad", "max_seqlen", max_seqlen)
    _check_value(value, packed.dtype)
    chosen = resolve_impl("pad", impl, packed)
    padded: torch.Tensor = torch.ops.trajpack.pad(
        packed, cu_seqlens.contiguous(), max_seqlen, value, side, chosen
    )
    return padded


def pad_reference(
    packed: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    value: Number = 0,
    side: Side = "right",
) -> torch.Tensor:
    """Say in plain torch what `pad` means: each place asks which token it holds, if any.

    No value is read by the host, so it runs on any device.
    """
    bits = packed.view(BITS[packed.element_size()])
    fill = torch.full((), value, dtype=packed.dtype, device=packed.device).view(bits.dtype)
    begin, end, before = sequence_places(cu_seqlens, max_seqlen, side)
    position = torch.arange(max_seqlen, device=packed.device) - before[:, None]
    token = begin[:, None] + position
    holds = (position >= 0) & (token < end[:, None])
    shape = (*holds.shape, *packed.shape[1:])
    if packed.shape[0] == 0:
        return fill.expand(shape).contiguous().view(packed.dtype)
    moved = bits[token.clamp(0, packed.shape[0] - 1)]
    holds = holds.reshape(*holds.shape, *[1] * (packed.ndim - 1))
    return torch.where(holds, moved, fill).view(packed.dtype)


def _check_value(value: Number, dtype: torch.dtype) -> None:
    kind = str(dtype).removeprefix("torch.")
    allowed: Any = (bool, int, float)
    low, high = float("-inf"), float("inf")
    if dtype.is_complex:
        allowed = (*allowed, complex)
    elif not dtype.is_floating_point:
        allowed = (bool, int)
        low, high = (0, 1) if dtype == torch.bool else _limits(dtype)
    if not isinstance(value, allowed):
        raise TypeError(f"pad: value must be a value of {kind}, got {value!r}")
    if isinstance(value, int) and not low <= value <= high:
        raise ValueError(f"pad: value must be in [{low}, {high}] for {kind}, got {value}")


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def _run(
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
    if packed.device.type == "cpu":
        from trajpack.kernels.rearrange.pad_host import pad_on_host

        return pad_on_host(packed, cu_seqlens, max_seqlen, value, side)
    return pad_reference(packed, cu_seqlens, max_seqlen, value=value, side=side)


def _fake(
    packed: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    value: Number,
    side: Side,
    impl: str,
) -> torch.Tensor:
    return packed.new_empty((cu_seqlens.shape[0] - 1, max_seqlen, *packed.shape[1:]))


def _setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    packed, cu_seqlens, _, _, ctx.side, ctx.impl = inputs
    ctx.num_tokens = packed.shape[0]
    ctx.save_for_backward(cu_seqlens)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
    (cu_seqlens,) = ctx.saved_tensors
    unpadded = torch.ops.trajpack.unpad(grad, cu_seqlens, ctx.num_tokens, ctx.side, ctx.impl)
    return unpadded, None, None, None, None, None


LIBRARY.define(
    "pad(Tensor packed, Tensor cu_seqlens, SymInt max_seqlen, Scalar value, str side, str impl)"
    " -> Tensor"
)
LIBRARY.impl("pad", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::pad", _fake, lib=LIBRARY)
torch.library.register_autograd(
    "trajpack::pad", _backward, setup_context=_setup_context, lib=LIBRARY
)
