"""Discounted returns of packed segments: the reverse scan ``y[t] = x[t] + discount * y[t + 1]``."""

from __future__ import annotations

import torch

from trajpack.kernels.dispatch import LIBRARY, Impl, resolve_impl
from trajpack.kernels.scan.discounted_returns_host import discounted_returns_on_host
from trajpack.kernels.scan.observations import Observation
from trajpack.kernels.scan.scan_inputs import (
    check_max_seqlen,
    check_rates,
    check_rest,
    check_tokens,
)
from trajpack.kernels.validation import check_boundaries

OP = "discounted_returns"


def discounted_returns(
    rewards: torch.Tensor,
    cu_seqlens: torch.Tensor,
    discount: float | torch.Tensor,
    impl: Impl = "auto",
    *,
    loss_mask: torch.Tensor | None = None,
    observation: Observation = "carry",
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Discount rewards backward inside each segment.

    Walking a segment from its last entry to its first::

        Gₜ = rₜ + discount · Gₜ₊₁          G = 0 past the last entry

    Nothing crosses a segment boundary, and a segment's returns are bitwise the same
    whatever it is packed with.

    Args:
        rewards: ``[entries]``, float32 or float64, one per turn (or per token).
        cu_seqlens: ``[segments + 1]`` int32 boundaries: starts at 0, ends at ``entries``,
            never decreases. An empty segment is allowed.
        discount: One for all segments, or a ``[segments]`` float32 or float64 tensor. Where
            powers of it pass the reach of float64, returns are infinite or NaN.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.
        loss_mask: ``[entries]`` bool: False for tokens that were not generated. All were, or
            the entries are turns, without it.
        observation: What a token that was not generated means, see
            `trajpack.kernels.scan.observations.Observation`; without ``loss_mask`` nothing.
        max_seqlen: No segment is longer than this, as far as the caller knows. It decides
            how the work is cut, never a result: a wrong bound costs time alone.

    Returns:
        ``[entries]`` float32, 0 where ``loss_mask`` is False; the sums are made in float64.
        Differentiable with respect to ``rewards``.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, ``observation`` is unknown, or ``max_seqlen`` is
            negative. On the host, where boundaries can be read for nothing, also if they do not go
            from 0 to ``entries``.

    Cost: one launch where ``max_seqlen`` is at most 4,096 or there are at most 8,192 entries;
    else two, and a float64 of scratch for 1,024 entries. One more launch fills ``discount`` in
    where it is a float. No copy, no host synchronisation.

    Example:
        >>> rewards = torch.tensor([-1.0, -1.0, 1.0, 5.0])
        >>> cu_seqlens = torch.tensor([0, 3, 4], dtype=torch.int32)
        >>> discounted_returns(rewards, cu_seqlens, 0.5)
        tensor([-1.2500, -0.5000,  1.0000,  5.0000])

    Reference:
        Sutton and Barto, Reinforcement Learning, 2nd edition, equation 3.9.
    """
    check_tokens(OP, rewards, cu_seqlens)
    check_rest(OP, rewards, cu_seqlens, loss_mask, observation)
    check_max_seqlen(OP, max_seqlen)
    [rate, rates] = check_rates(OP, rewards, cu_seqlens, discount=discount)
    chosen = resolve_impl(OP, impl, rewards)
    if loss_mask is not None:
        from trajpack.kernels.credit.gae import returns_of_tokens  # an op that packing does without

        how = chosen, max_seqlen
        return returns_of_tokens(rewards, loss_mask, cu_seqlens, (rate, rates), observation, *how)
    if rates is None:
        rates = rewards.new_full((cu_seqlens.shape[0] - 1,), rate, dtype=torch.float64)
    returns: torch.Tensor = torch.ops.trajpack.discounted_returns(
        rewards.contiguous(), cu_seqlens.contiguous(), rates, chosen, max_seqlen
    )
    return returns


def discounted_returns_reference(
    rewards: torch.Tensor, cu_seqlens: torch.Tensor, discount: torch.Tensor
) -> torch.Tensor:
    """Say in plain torch what `discounted_returns` means, for ``discount`` of shape [segments].

    Doubling: after round k an entry holds the discounted sum of the 2ᵏ entries from it on,
    so it takes in the entry 2ᵏ further on, if that is still in its segment. A tensor on the
    host is asked for its longest segment, which bounds the rounds; one on a device is not read.
    """
    entries = longest = rewards.shape[0]
    if entries and cu_seqlens.device.type == "cpu":
        longest = int(cu_seqlens.diff().max())
    index = torch.arange(entries, device=rewards.device)
    segment = torch.searchsorted(cu_seqlens[1:].long(), index, right=True)
    end = cu_seqlens[1:].long()[segment]
    weight = discount.double()[segment]
    sums = rewards.double() + 0.0  # no -0, which a round of adding 0 would turn into 0
    reach = 1
    while reach < longest:
        later = torch.where(index[:-reach] + reach < end[:-reach], sums[reach:], 0.0)
        # a weight may overflow only where `later` is 0: keep 0 · inf out
        step = torch.where(later == 0, 0.0, weight[:-reach] * later)
        sums = torch.cat([sums[:-reach] + step, sums[-reach:]])
        weight = weight * weight
        reach *= 2
    return sums.float()


def _run(
    rewards: torch.Tensor,
    cu_seqlens: torch.Tensor,
    discount: torch.Tensor,
    impl: str,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    check_boundaries(OP, cu_seqlens, rewards.shape[0])
    if impl == "torch" and rewards.device.type == "cpu":
        return discounted_returns_on_host(rewards, cu_seqlens, discount)
    if impl == "torch":
        return discounted_returns_reference(rewards, cu_seqlens, discount)
    from trajpack.kernels.scan.discounted_returns_triton import discounted_returns_forward

    return discounted_returns_forward(rewards, cu_seqlens, discount, max_seqlen)


def _fake(
    rewards: torch.Tensor,
    cu_seqlens: torch.Tensor,
    discount: torch.Tensor,
    impl: str,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    return torch.empty_like(rewards, dtype=torch.float32)


def _setup_context(
    ctx: torch.autograd.function.FunctionCtx,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, str, int | None],
    output: torch.Tensor,
) -> None:
    rewards, cu_seqlens, discount, ctx.impl, ctx.max_seqlen = inputs  # type: ignore[attr-defined]
    ctx.dtype = rewards.dtype  # type: ignore[attr-defined]
    ctx.save_for_backward(cu_seqlens, discount)


def _backward(
    ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
) -> tuple[torch.Tensor, None, None, None, None]:
    # the transpose of a scan from the right is the scan from the left: mirror, scan, mirror
    cu_seqlens, discount = ctx.saved_tensors  # type: ignore[attr-defined]
    mirrored = (grad.shape[0] - cu_seqlens).flip(0)
    scanned = torch.ops.trajpack.discounted_returns(
        grad.flip(0).contiguous(),
        mirrored,
        discount.flip(0),
        ctx.impl,  # type: ignore[attr-defined]
        ctx.max_seqlen,  # type: ignore[attr-defined]
    )
    return scanned.flip(0).to(ctx.dtype), None, None, None, None  # type: ignore[attr-defined]


LIBRARY.define(
    "discounted_returns(Tensor rewards, Tensor cu_seqlens, Tensor discount, str impl, "
    "SymInt? max_seqlen=None) -> Tensor"
)
LIBRARY.impl("discounted_returns", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::discounted_returns", _fake, lib=LIBRARY)
torch.library.register_autograd(
    "trajpack::discounted_returns", _backward, setup_context=_setup_context, lib=LIBRARY
)
