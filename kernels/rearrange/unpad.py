"""The tokens of padded rows, packed, for any dtype and trailing dimensions."""

from __future__ import annotations

from typing import Any

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
    check_tokens("unpad", "padded", padded, 2, side)
    check_cu_seqlens("unpad", cu_seqlens, device=padded.device)
    check_count("unpad", "num_tokens", num_tokens)
    batch, max_seqlen = padded.shape[:2]
    check_count("unpad", "padded.shape[1]", max_seqlen)
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
    """Say in plain torch what `unpad` means: each token looks up its sequence, then its place.

    No value is read by the host, so it runs on any device.
    """
    batch, max_seqlen = padded.shape[:2]
    bits = padded.view(BITS[padded.element_size()])
    if batch == 0 or max_seqlen == 0:
        return bits.new_zeros((num_tokens, *padded.shape[2:])).view(padded.dtype)
    begin, end, before = sequence_places(cu_seqlens, max_seqlen, side)
    token = torch.arange(num_tokens, device=padded.device)
    sequence = torch.searchsorted(end, token, right=True).clamp(max=batch - 1)
    position = token - begin[sequence] + before[sequence]
    held = (token < end[sequence]) & (position < max_seqlen)
    moved = bits[sequence, position.clamp(0, max_seqlen - 1)]
    held = held.reshape(-1, *[1] * (padded.ndim - 2))
    return torch.where(held, moved, bits.new_zeros(())).view(padded.dtype)


def _run(
    padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int, side: Side, impl: str
) -> torch.Tensor:
    check_boundaries("unpad", cu_seqlens, num_tokens, padded.shape[1])
    if impl == "triton":
        from trajpack.kernels.rearrange.pad_triton import unpad_forward

        return unpad_forward(padded, cu_seqlens, num_tokens, side)
    if padded.device.type == "cpu":
        from trajpack.kernels.rearrange.pad_host import unpad_on_host

        return unpad_on_host(padded, cu_seqlens, num_tokens, side)
    return unpad_reference(padded, cu_seqlens, num_tokens, side=side)


def _fake(
    padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int, side: Side, impl: str
) -> torch.Tensor:
    return padded.new_empty((num_tokens, *padded.shape[2:]))


def _setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    padded, cu_seqlens, _, ctx.side, ctx.impl = inputs
    ctx.max_seqlen = padded.shape[1]
    ctx.save_for_backward(cu_seqlens)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
    (cu_seqlens,) = ctx.saved_tensors
    padded = torch.ops.trajpack.pad(grad, cu_seqlens, ctx.max_seqlen, 0, ctx.side, ctx.impl)
    return padded, None, None, None, None


LIBRARY.define(
    "unpad(Tensor padded, Tensor cu_seqlens, SymInt num_tokens, str side, str impl) -> Tensor"
)
LIBRARY.impl("unpad", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::unpad", _fake, lib=LIBRARY)
torch.library.register_autograd(
    "trajpack::unpad", _backward, setup_context=_setup_context, lib=LIBRARY
)
