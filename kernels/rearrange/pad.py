"""Packed tokens as a padded rectangle and back, for any dtype and trailing dimensions."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.rearrange.pad_host import BITS, pad_on_host, unpad_on_host
from trajpack.kernels.validation import check_boundaries, check_cu_seqlens

Side: TypeAlias = Literal["left", "right"]

MAX_ROWS = 2**31 - 4096
"""Most tokens, and largest ``max_seqlen``: kernels count in int32, up to a tile further."""


def _sequence_places(
    cu_seqlens: torch.Tensor, max_seqlen: int, side: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return begin, end and length of the padding before each sequence, int64 ``[batch]``."""
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    room = (max_seqlen - (end - begin)).clamp(min=0)
    return begin, end, room if side == "left" else torch.zeros_like(room)


def _check_tokens(op: str, name: str, tensor: torch.Tensor, ndim: int, side: str) -> None:
    """Raise unless ``tensor`` has ``ndim`` dimensions or more, and ``side`` is one."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.ndim < ndim:
        shape = list(tensor.shape)
        raise ValueError(f"{op}: {name} must have at least {ndim} dimension(s), got shape {shape}")
    if side not in ("left", "right"):
        raise ValueError(f"{op}: side must be 'left' or 'right', got {side!r}")


def _check_count(op: str, name: str, count: int) -> None:
    """Raise unless ``count`` is in [0, MAX_ROWS]."""
    if not isinstance(count, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be an integer, got {count!r}")
    if not 0 <= count <= MAX_ROWS:
        raise ValueError(f"{op}: {name} must be in [0, {MAX_ROWS}], got {count}")


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
    _check_tokens("pad", "packed", packed, 1, side)
    check_cu_seqlens("pad", cu_seqlens, device=packed.device)
    _check_count("pad", "max_seqlen", max_seqlen)
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
    """Compute `pad` in plain torch: each place looks up its token.

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
    if packed.device.type == "cpu":
        return pad_on_host(packed, cu_seqlens, max_seqlen, value, side)
    return pad_reference(packed, cu_seqlens, max_seqlen, value=value, side=side)


def _pad_fake(
    packed: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    value: Number,
    side: Side,
    impl: str,
) -> torch.Tensor:
    return packed.new_empty((cu_seqlens.shape[0] - 1, max_seqlen, *packed.shape[1:]))


def _pad_setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    packed, cu_seqlens, _, _, ctx.side, ctx.impl = inputs
    ctx.num_tokens = packed.shape[0]
    ctx.save_for_backward(cu_seqlens)


def _pad_backward(
    ctx: Any, grad: torch.Tensor
) -> tuple[torch.Tensor, None, None, None, None, None]:
    (cu_seqlens,) = ctx.saved_tensors
    unpadded = torch.ops.trajpack.unpad(grad, cu_seqlens, ctx.num_tokens, ctx.side, ctx.impl)
    return unpadded, None, None, None, None, None


register_op(
    "pad(Tensor packed, Tensor cu_seqlens, SymInt max_seqlen, Scalar value, str side, str impl)"
    " -> Tensor",
    _pad_run,
    _pad_fake,
    setup_context=_pad_setup_context,
    backward=_pad_backward,
)


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
        padded: ``[batch, max_seqlen, *rest]`` of any dtype; moved bit for bit. Strides of the
            first two dimensions are followed, so ``logits[:, :-1]`` is not copied; trailing
            dimensions that are not contiguous are.
        cu_seqlens: ``[batch + 1]`` int32 boundaries of the result: starts at 0, ends at
            ``num_tokens``, never decreases.
        num_tokens: Tokens of all sequences.
        side: Where the padding stands: ``"right"`` after the tokens, ``"left"`` before them.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.

    Returns:
        ``[num_tokens, *rest]``, contiguous, of the dtype of ``padded``. Differentiable with
        respect to ``padded``; the gradient of padding is 0.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If shapes or devices disagree. On the host also if boundaries are
            ill-formed or a sequence is longer than ``max_seqlen``. On a device they are not
            read: a token that no row holds is 0.

    Cost: one launch, no copy, no host synchronisation; memory for the result and no more. The
    gradient costs one launch, and saves nothing but ``cu_seqlens``.

    Example:
        >>> padded = torch.tensor([[0, 0, 1], [0, 2, 3]])
        >>> unpad(padded, torch.tensor([0, 1, 3]).int(), 3, side="left")
        tensor([1, 2, 3])
    """
    _check_tokens("unpad", "padded", padded, 2, side)
    check_cu_seqlens("unpad", cu_seqlens, device=padded.device)
    _check_count("unpad", "num_tokens", num_tokens)
    batch, max_seqlen = padded.shape[:2]
    _check_count("unpad", "padded.shape[1]", max_seqlen)
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


def unpad_reference(
    padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int, *, side: Side = "right"
) -> torch.Tensor:
    """Compute `unpad` in plain torch: each token looks up its sequence, then its place.

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


def _unpad_run(
    padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int, side: Side, impl: str
) -> torch.Tensor:
    check_boundaries("unpad", cu_seqlens, num_tokens, padded.shape[1])
    if impl == "triton":
        from trajpack.kernels.rearrange.pad_triton import unpad_forward

        return unpad_forward(padded, cu_seqlens, num_tokens, side)
    if padded.device.type == "cpu":
        return unpad_on_host(padded, cu_seqlens, num_tokens, side)
    return unpad_reference(padded, cu_seqlens, num_tokens, side=side)


def _unpad_fake(
    padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int, side: Side, impl: str
) -> torch.Tensor:
    return padded.new_empty((num_tokens, *padded.shape[2:]))


def _unpad_setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    padded, cu_seqlens, _, ctx.side, ctx.impl = inputs
    ctx.max_seqlen = padded.shape[1]
    ctx.save_for_backward(cu_seqlens)


def _unpad_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (cu_seqlens,) = ctx.saved_tensors
    padded = torch.ops.trajpack.pad(grad, cu_seqlens, ctx.max_seqlen, 0, ctx.side, ctx.impl)
    return padded, None, None, None, None


register_op(
    "unpad(Tensor padded, Tensor cu_seqlens, SymInt num_tokens, str side, str impl) -> Tensor",
    _unpad_run,
    _unpad_fake,
    setup_context=_unpad_setup_context,
    backward=_unpad_backward,
)
