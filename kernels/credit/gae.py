"""Generalized advantage estimation over packed sequences, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from trajpack.kernels.dispatch import LIBRARY, Impl, resolve_impl
from trajpack.kernels.scan.credit_scan import Scan, run
from trajpack.kernels.scan.observations import Observation
from trajpack.kernels.scan.scan_inputs import (
    check_max_seqlen,
    check_rates,
    check_rest,
    check_tokens,
    contiguous,
)
from trajpack.kernels.validation import check_boundaries

Rates: TypeAlias = tuple[float, torch.Tensor | None, float, torch.Tensor | None]


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

    with ``A = 0`` and ``v = bootstrap`` (0 without) past the last token. What the tokens of
    prompts and observations are to this is ``observation``; the systems in use disagree. In all
    of them nothing crosses a sequence boundary, and a sequence's results are bitwise the same
    whatever it is packed with.

    Args:
        rewards: ``[tokens]`` float32 or float64.
        values: ``[tokens]`` float32 or float64, of the state before each token: a causal critic's
            output one token earlier. (bfloat16 is refused; say ``.float()``.)
        cu_seqlens: ``[sequences + 1]`` int32 boundaries: starts at 0, ends at ``tokens``, never
            decreases.
        gamma: Discount from one token to the next: one, or ``[sequences]``.
        lam: λ of GAE: one, or ``[sequences]`` (length-adaptive, as in VAPO). A sequence is one
            as packed: in layout ``"turns"`` each turn by itself.
        loss_mask: ``[tokens]`` bool, True where generated; all are without it.
        observation: What a token that was not generated means:

            - ``"carry"``: nothing; its reward is the last generated token's before it.
            - ``"carry_drop"``: nothing, and its reward is lost (verl, NeMo-RL, AReaL).
            - ``"compact"``: nothing; its reward counts on a sequence's last token alone (miles).
            - ``"ignore"``: what a generated one does (slime, SkyRL, ROLL, TRL's PPO).
            - ``"multiply"``: a step that discounts, with value and reward 0 (OpenRLHF).
            - ``"reset"``: it ends what comes behind it and hands on its reward less its value
              (open-instruct).
        bootstrap: ``[sequences]``: value of the state behind the last token, for sequences
            that were cut off; 0 for those that ended.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others.
        max_seqlen: No sequence is longer, as far as the caller knows. It decides how the work
            is cut, never a result.

    Returns:
        Advantages and returns, float32 ``[tokens]``, 0 where ``loss_mask`` is False; the sums
        are made in float64. Differentiable with respect to ``rewards`` alone.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, ``observation`` is unknown, or anything but
            ``rewards`` requires a gradient where gradients are recorded. On the host, where
            boundaries can be read for nothing, also if they do not go from 0 to ``tokens``.

    Cost: one launch where ``max_seqlen`` is at most 4,096 or there are at most 8,192 tokens;
    else two, and 16 bytes of scratch for 512 tokens. No copy, no host synchronisation.

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
    rates = gamma, lam
    rest = loss_mask, observation, bootstrap, impl, max_seqlen
    return advantages_and_returns("gae", (rewards, values, cu_seqlens), rates, *rest)


def advantages_and_returns(
    op: str,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rates: tuple[float | torch.Tensor, float | torch.Tensor],
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `gae` does in the name of ``op``; arguments are those of `gae`."""
    rewards, values, cu_seqlens = tensors
    loss_mask, observation, bootstrap, impl, max_seqlen = rest
    check_tokens(op, rewards, cu_seqlens, values=values)
    parted = check_rates(op, rewards, cu_seqlens, gamma=rates[0], lam=rates[1])
    check_rest(op, rewards, cu_seqlens, loss_mask, observation, bootstrap)
    check_max_seqlen(op, max_seqlen)
    chosen = resolve_impl(op, impl, rewards)
    advantages, returns = torch.ops.trajpack.gae(
        rewards.contiguous(), values.contiguous(), contiguous(loss_mask), cu_seqlens.contiguous(),
        *parted, contiguous(bootstrap), observation, chosen, max_seqlen,
    )  # fmt: skip
    return advantages, returns


def returns_of_tokens(
    rewards: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    discount: tuple[float, torch.Tensor | None],
    observation: str,
    *how: Any,
) -> torch.Tensor:
    """Return what `discounted_returns` does with a ``loss_mask``; arguments are checked."""
    returns: torch.Tensor = torch.ops.trajpack.gae(
        rewards.contiguous(), None, loss_mask.contiguous(), cu_seqlens.contiguous(),
        *discount, 1.0, None, None, observation, *how,
    )[0]  # fmt: skip
    return returns


def _scan(tensors: Sequence[torch.Tensor | None], rates: Rates, *rest: Any) -> Scan:
    rewards, values, loss_mask, cu_seqlens = tensors
    assert rewards is not None
    assert cu_seqlens is not None
    gamma, gammas, lam, lams = rates
    bootstrap, observation, max_seqlen = rest
    num = rewards.shape[0]
    scan = Scan(cu_seqlens, num, num, rewards, values, loss_mask, gamma, lam, observation)
    return scan._replace(gammas=gammas, lams=lams, bootstrap=bootstrap, max_seqlen=max_seqlen)


def _run(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rewards, cu_seqlens = inputs[0], inputs[3]
    check_boundaries("gae", cu_seqlens, rewards.shape[0])
    *rest, impl, max_seqlen = inputs[8:]
    return run(_scan(inputs[:4], inputs[4:8], *rest, max_seqlen), impl)


def _fake(rewards: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = torch.empty_like(rewards, dtype=torch.float32)
    return advantages, torch.empty_like(advantages)


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    rewards, _values, loss_mask, cu_seqlens, gamma, gammas, lam, lams, _, *rest = inputs
    ctx.dtype, ctx.rest, ctx.rates = rewards.dtype, rest, (gamma, lam)
    ctx.save_for_backward(loss_mask, cu_seqlens, gammas, lams)


def _backward(ctx: Any, of_advantages: torch.Tensor, of_returns: torch.Tensor) -> tuple[Any, ...]:
    # the transpose of a scan from the right is the scan from the left: mirror, scan, mirror
    loss_mask, cu_seqlens, gammas, lams = ctx.saved_tensors
    gamma, lam = ctx.rates
    given = (of_advantages.double() + of_returns.double()).flip(0)
    mask, gammas, lams = (None if t is None else t.flip(0) for t in (loss_mask, gammas, lams))
    mirrored = (given.shape[0] - cu_seqlens).flip(0)
    gradient = torch.ops.trajpack.gae_gradient(
        given, mask, mirrored, gamma, gammas, lam, lams, *ctx.rest
    )
    return gradient.flip(0).to(ctx.dtype), *[None] * 11


def _gradient(
    given: torch.Tensor, loss_mask: torch.Tensor | None, cu_seqlens: torch.Tensor, *inputs: Any
) -> torch.Tensor:
    observation, impl, max_seqlen = inputs[4:]
    tensors = given, None, loss_mask, cu_seqlens
    scan = _scan(tensors, inputs[:4], None, observation, max_seqlen)
    return run(scan._replace(kind="adjoint"), impl)[0]


LIBRARY.define(
    "gae(Tensor rewards, Tensor? values, Tensor? loss_mask, Tensor cu_seqlens, float gamma, "
    "Tensor? gammas, float lam, Tensor? lams, Tensor? bootstrap, str observation, str impl, "
    "SymInt? max_seqlen) -> (Tensor, Tensor)"
)
LIBRARY.impl("gae", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::gae", _fake, lib=LIBRARY)
torch.library.register_autograd(
    "trajpack::gae", _backward, setup_context=_setup_context, lib=LIBRARY
)
LIBRARY.define(
    "gae_gradient(Tensor given, Tensor? loss_mask, Tensor cu_seqlens, float gamma, "
    "Tensor? gammas, float lam, Tensor? lams, str observation, str impl, "
    "SymInt? max_seqlen) -> Tensor"
)
LIBRARY.impl("gae_gradient", _gradient, "CompositeExplicitAutograd")
torch.library.register_fake(
    "trajpack::gae_gradient", lambda *inputs: _fake(*inputs)[0], lib=LIBRARY
)
