"""Generalized advantage estimation with one transition for each turn."""

from __future__ import annotations

import torch

from trajpack.kernels.dispatch import Impl
from trajpack.kernels.scan.credit_scan import scan_tokens
from trajpack.kernels.scan.scan_inputs import check_scan_inputs
from trajpack.kernels.validation import check_boundaries, check_tensor


def turn_gae(  # noqa: PLR0913 - a convention is an argument
    rewards: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    turn_ids: torch.Tensor,
    *,
    gamma: float | torch.Tensor = 1.0,
    lam: float | torch.Tensor = 0.95,
    bootstrap: torch.Tensor | None = None,
    impl: Impl = "auto",
    max_seqlen: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate the advantage of every turn, and copy it to all tokens of the turn.

    A turn is one action. Its reward is the sum of the rewards on its tokens and on the tokens up
    to the next turn; its value is the one before its first token. Over the turns of a sequence::

        δₖ = rₖ + γ·vₖ₊₁ - vₖ        Aₖ = δₖ + γλ·Aₖ₊₁        Rₖ = Aₖ + vₖ

    Args:
        rewards: ``[tokens]`` float32 or float64.
        values: ``[tokens]`` float32 or float64; only those of the turns' first tokens are used.
        cu_seqlens: ``[sequences + 1]`` int32 boundaries.
        turn_ids: ``[tokens]`` int32: the same number on all tokens of a turn, another one on
            the next turn's, and -1 on tokens that were not generated.
        gamma: Discount from one turn to the next: one, or ``[sequences]``.
        lam: λ of GAE: one, or ``[sequences]``.
        bootstrap: ``[sequences]``: value of the state behind the last turn.
        impl: See `trajpack.kernels.gae`.
        max_seqlen: See `trajpack.kernels.gae`.

    Returns:
        Advantages and returns, float32 ``[tokens]``, 0 where ``turn_ids`` is -1. Differentiable
        with respect to ``rewards``.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree; for boundaries as `trajpack.kernels.gae`.

    Cost: that of `trajpack.kernels.gae`, and about fifteen small launches that find the turns.
    No copy, no host synchronisation.

    Example:
        >>> rewards = torch.tensor([0.0, 3.0, 0.0, 0.0, 4.0])
        >>> values = torch.tensor([1.0, 5.0, 9.0, 2.0, 8.0])
        >>> turn_ids = torch.tensor([0, 0, -1, 1, 1], dtype=torch.int32)
        >>> cu_seqlens = torch.tensor([0, 5], dtype=torch.int32)
        >>> turn_gae(rewards, values, cu_seqlens, turn_ids, gamma=0.5, lam=0.25)[0]
        tensor([3.2500, 3.2500, 0.0000, 2.0000, 2.0000])

    Reference:
        AReaL's turn-level GAE (``areal/trainer/ppo/gae.py``); there a reward on a token between
        turns is lost.
    """
    check_scan_inputs(
        "turn_gae", rewards, cu_seqlens, loss_mask=None, observation="carry", values=values
    )
    check_tensor(
        "turn_gae",
        "turn_ids",
        turn_ids,
        dtypes=(torch.int32, torch.int64),
        device=rewards.device,
        entries=rewards.shape[0],
    )
    check_boundaries("turn_gae", cu_seqlens, rewards.shape[0])
    generated = turn_ids >= 0
    begins = torch.zeros(turn_ids.shape[0] + 1, dtype=torch.bool, device=turn_ids.device)
    begins[cu_seqlens.long()] = True
    opens = generated & (begins[:-1] | (turn_ids != turn_ids.roll(1)))
    advantages, returns = scan_tokens(
        "turn_gae",
        rewards,
        cu_seqlens,
        values=values,
        gamma=gamma,
        lam=lam,
        loss_mask=opens,
        observation="carry",
        bootstrap=bootstrap,
        impl=impl,
        max_seqlen=max_seqlen,
    )
    if not rewards.shape[0]:
        return advantages, returns
    # a turn's first token has what the turn is given
    index = torch.arange(rewards.shape[0], device=rewards.device)
    first = torch.where(opens, index, 0).cummax(0).values
    return (
        torch.where(generated, advantages[first], 0.0),
        torch.where(generated, returns[first], 0.0),
    )
