"""TD(λ) returns over packed sequences: targets for a value function."""

from __future__ import annotations

import torch

from trajpack.kernels.credit.gae import advantages_and_returns
from trajpack.kernels.dispatch import Impl
from trajpack.kernels.scan.observations import Observation


def td_lambda(  # noqa: PLR0913 - a convention is an argument
    rewards: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    gamma: float | torch.Tensor = 1.0,
    lam: float | torch.Tensor = 0.95,
    loss_mask: torch.Tensor | None = None,
    observation: Observation = "carry",
    bootstrap: torch.Tensor | None = None,
    impl: Impl = "auto",
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Return the λ-return of every generated token.

    Where every token was generated::

        Rₜ = rₜ + γ·((1 - λ)·vₜ₊₁ + λ·Rₜ₊₁)

    It is the second result of `trajpack.kernels.gae`, which has the meaning of every argument,
    errors and cost. λ = 1 is the discounted return, λ = 0 the one-step target.

    Returns:
        float32 ``[tokens]``, 0 where ``loss_mask`` is False.

    Example:
        >>> rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])
        >>> td_lambda(rewards, values, torch.tensor([0, 2], dtype=torch.int32), lam=0.5)
        tensor([0.7500, 1.0000])

    Reference:
        Sutton and Barto, Reinforcement Learning, 2nd edition, equation 12.18.
    """
    rates = gamma, lam
    rest = loss_mask, observation, bootstrap, impl, max_seqlen
    return advantages_and_returns("td_lambda", (rewards, values, cu_seqlens), rates, *rest)[1]
