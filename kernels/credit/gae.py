"""Generalized advantage estimation and λ-returns over packed sequences, by token or by turn."""

from __future__ import annotations

import torch

from trajpack.kernels.dispatch import Impl
from trajpack.kernels.scan.credit_scan import scan_tokens
from trajpack.kernels.scan.observations import Observation
from trajpack.kernels.scan.scan_inputs import Scan, check_scan_inputs
from trajpack.kernels.validation import check_boundaries, check_tensor


def gae(  # noqa: PLR0913 - a convention is an argument
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate the advantage of every generated token, and the return its value should have had.

    Where every token was generated::

        δₜ = rₜ + γ·vₜ₊₁ - vₜ        Aₜ = δₜ + γλ·Aₜ₊₁        Rₜ = Aₜ + vₜ

    with ``A = 0`` and ``v = bootstrap`` (0 without) past the last token. ``observation`` says how
    tokens of prompts and observations are treated; systems in use differ. Nothing crosses a
    sequence boundary, and a sequence's results are bitwise the same whatever it is packed with.

    Args:
        rewards: ``[tokens]`` float32 or float64.
        values: ``[tokens]`` float32 or float64, of the state before each token: a causal critic's
            output one token earlier. bfloat16 is refused; convert with ``.float()``.
        cu_seqlens: ``[sequences + 1]`` int32 boundaries: starts at 0, ends at ``tokens``, never
            decreases.
        gamma: Discount from one token to the next: one, or ``[sequences]``.
        lam: λ of GAE: one, or ``[sequences]`` (length-adaptive, as in VAPO). Sequences are those of
            the layout: in ``"turns"`` each turn is one.
        loss_mask: ``[tokens]`` bool, True where generated; without it all were.
        observation: Convention for tokens that were not generated:

            - ``"carry"``: skipped; its reward goes to the last generated token before it, and is
              lost if there is none.
            - ``"carry_drop"``: skipped, and its reward is lost (verl, NeMo-RL, AReaL).
            - ``"compact"``: skipped; only a reward on a sequence's last token counts (miles).
            - ``"ignore"``: a step like a generated one (slime, SkyRL, ROLL, TRL's PPO).
            - ``"multiply"``: a step that discounts, with value and reward 0 (OpenRLHF).
            - ``"reset"``: it ends the credit of later tokens and passes on its reward less its
              value (open-instruct).
        bootstrap: ``[sequences]``: value of the state behind the last token for sequences that
            were cut off; 0 for those that ended.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others.
        max_seqlen: Upper bound of a sequence's length, if known. It decides how the work is cut.
            A wrong bound costs time; results of sequences beyond 4,096 tokens may then differ by
            rounding.

    Returns:
        Advantages and returns, float32 ``[tokens]``, 0 where ``loss_mask`` is False; the sums
        are made in float64. Differentiable with respect to ``rewards`` alone.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, ``observation`` is unknown, or another input than
            ``rewards`` requires a gradient while gradients are recorded. For tensors on the host
            also if boundaries do not go from 0 to ``tokens``.

    Example:
        >>> rewards = torch.tensor([0.0, 0.0, 0.0, 1.0])
        >>> values = torch.tensor([0.5, 9.0, 0.5, 0.5])
        >>> cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
        >>> mask = torch.tensor([True, False, True, True])
        >>> advantages, returns = gae(rewards, values, cu_seqlens, lam=0.5, loss_mask=mask)
        >>> advantages
        tensor([0.1250, 0.0000, 0.2500, 0.5000])
        >>> returns
        tensor([0.6250, 0.0000, 0.7500, 1.0000])

    Reference:
        Schulman et al., High-Dimensional Continuous Control Using Generalized Advantage
        Estimation, arXiv 1506.02438, equations 11 to 16. λ by length: VAPO, arXiv 2504.05118.
    """
    scan = Scan(cu_seqlens, rewards, values, loss_mask, gamma, lam, observation)
    return scan_tokens("gae", scan._replace(bootstrap=bootstrap, max_seqlen=max_seqlen), impl)


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
        impl: As of `trajpack.kernels.gae`.
        max_seqlen: As of `trajpack.kernels.gae`.

    Returns:
        Advantages and returns, float32 ``[tokens]``, 0 where ``turn_ids`` is -1. Differentiable
        with respect to ``rewards``.

    Errors are those of `trajpack.kernels.gae`.

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
    scan = Scan(cu_seqlens, rewards, values, None, gamma, lam)
    scan = scan._replace(bootstrap=bootstrap, max_seqlen=max_seqlen)
    check_scan_inputs("turn_gae", scan)
    integers, num_tokens = (torch.int32, torch.int64), rewards.shape[0]
    check_tensor(
        "turn_gae", "turn_ids", turn_ids, dtypes=integers, device=rewards.device, entries=num_tokens
    )
    check_boundaries("turn_gae", cu_seqlens, num_tokens)
    generated = turn_ids >= 0
    begins = torch.zeros(num_tokens + 1, dtype=torch.bool, device=turn_ids.device)
    begins[cu_seqlens.long()] = True
    opens = generated & (begins[:-1] | (turn_ids != turn_ids.roll(1)))
    results = scan_tokens("turn_gae", scan._replace(loss_mask=opens), impl)
    if not num_tokens:
        return results
    index = torch.arange(num_tokens, device=rewards.device)  # all tokens take the first one's
    first = torch.where(opens, index, 0).cummax(0).values
    advantages, returns = (torch.where(generated, rows[first], 0.0) for rows in results)
    return advantages, returns
