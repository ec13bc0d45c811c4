"""Discounted returns of packed segments: the reverse scan ``y[t] = x[t] + discount * y[t + 1]``."""

from __future__ import annotations

import torch

from trajpack.kernels.dispatch import Impl
from trajpack.kernels.scan.credit_scan import scan_tokens
from trajpack.kernels.scan.observations import Observation


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
            never decreases. A segment may be empty.
        discount: One for all segments, or a ``[segments]`` float32 or float64 tensor. Where
            powers of it pass the reach of float64, returns are infinite or NaN.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.
        loss_mask: ``[entries]`` bool: False for tokens that were not generated. Without it all
            were, or the entries are turns.
        observation: Convention for tokens that were not generated, see
            `trajpack.kernels.scan.observations.Observation`; unused without ``loss_mask``.
        max_seqlen: Upper bound of a segment's length, if known. It decides how the work is cut.
            A wrong bound costs time; results of segments beyond 4,096 entries may then differ by
            rounding.

    Returns:
        ``[entries]`` float32, 0 where ``loss_mask`` is False; the sums are made in float64.
        Differentiable with respect to ``rewards``.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, ``observation`` is unknown, or ``max_seqlen`` is
            negative. For tensors on the host also if boundaries do not go from 0 to ``entries``.

    Cost: one launch where ``max_seqlen`` is at most 4,096 or there are at most 4,096 entries;
    else two, and 16 bytes of scratch for 1,024 entries. No copy, no host synchronisation.

    Example:
        >>> rewards = torch.tensor([-1.0, -1.0, 1.0, 5.0])
        >>> cu_seqlens = torch.tensor([0, 3, 4], dtype=torch.int32)
        >>> discounted_returns(rewards, cu_seqlens, 0.5)
        tensor([-1.2500, -0.5000,  1.0000,  5.0000])

    Reference:
        Sutton and Barto, Reinforcement Learning, 2nd edition, equation 3.9.
    """
    returns, _ = scan_tokens(
        "discounted_returns",
        rewards,
        cu_seqlens,
        kind="returns",
        gamma=discount,
        gamma_name="discount",
        loss_mask=loss_mask,
        observation=observation,
        impl=impl,
        max_seqlen=max_seqlen,
    )
    return returns
