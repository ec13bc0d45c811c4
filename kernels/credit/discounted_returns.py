"""Discounted returns of packed segments: the reverse scan ``y[t] = x[t] + discount * y[t + 1]``."""

from __future__ import annotations

import torch

from trajpack.kernels.dispatch import Impl
from trajpack.kernels.scan.credit_scan import scan_tokens
from trajpack.kernels.scan.observations import Observation
from trajpack.kernels.scan.scan_inputs import Scan


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

    Args:
        rewards: ``[entries]``, float32 or float64, one per turn (or per token).
        cu_seqlens: ``[segments + 1]`` int32 boundaries: starts at 0, ends at ``entries``,
            never decreases. A segment may be empty.
        discount: One for all segments, or a ``[segments]`` float32 or float64 tensor. Where
            powers of it pass the reach of float64, returns are infinite or NaN.
        impl: As of `trajpack.kernels.gae`.
        loss_mask: ``[entries]`` bool: False for tokens that were not generated. Without it all
            were, or the entries are turns.
        observation: As of `trajpack.kernels.gae`.
        max_seqlen: As of `trajpack.kernels.gae`.

    Returns:
        ``[entries]`` float32, 0 where ``loss_mask`` is False; the sums are made in float64.
        Differentiable with respect to ``rewards``.

    Errors, cost and the independence of segments are those of `trajpack.kernels.gae`.

    Example:
        >>> rewards = torch.tensor([-1.0, -1.0, 1.0, 5.0])
        >>> cu_seqlens = torch.tensor([0, 3, 4], dtype=torch.int32)
        >>> discounted_returns(rewards, cu_seqlens, 0.5)
        tensor([-1.2500, -0.5000,  1.0000,  5.0000])

    Reference:
        Sutton and Barto, Reinforcement Learning, 2nd edition, equation 3.9.
    """
    scan = Scan(cu_seqlens, rewards, None, loss_mask, discount, observation=observation)
    scan = scan._replace(kind="returns", max_seqlen=max_seqlen)
    return scan_tokens("discounted_returns", scan, impl, gamma_name="discount")[0]
