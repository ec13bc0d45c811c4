"""V-trace over packed sequences: targets and advantages for actions of an older policy."""

from __future__ import annotations

from typing import Any

import torch

from trajpack.kernels.dispatch import LIBRARY, Impl, resolve_impl
from trajpack.kernels.scan.credit_scan import Limits, Scan, run
from trajpack.kernels.scan.observations import Observation
from trajpack.kernels.scan.scan_inputs import (
    check_max_seqlen,
    check_positive,
    check_rates,
    check_rest,
    check_tokens,
    contiguous,
)
from trajpack.kernels.validation import check_boundaries


def vtrace(  # noqa: PLR0913 - a convention is an argument
    rewards: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens: torch.Tensor,
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    *,
    gamma: float | torch.Tensor = 1.0,
    lam: float | torch.Tensor = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    advantage_rho_clip: float = 1.0,
    loss_mask: torch.Tensor | None = None,
    observation: Observation = "carry",
    bootstrap: torch.Tensor | None = None,
    impl: Impl = "auto",
    max_seqlen: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate advantages and value targets of tokens that another policy sampled.

    With ``w = exp(logprobs - rollout_logprobs)``, where every token was generated::

        Sₜ = min(w, rho_clip)·(rₜ + γ·vₜ₊₁ - vₜ) + γ·λ·min(w, c_clip)·Sₜ₊₁
        targetₜ    = vₜ + Sₜ
        advantageₜ = min(w, advantage_rho_clip)·(rₜ + γ·targetₜ₊₁ - vₜ)

    with ``S = 0`` and ``v = bootstrap`` (0 without) past the last token. Where both policies
    are the same and no clip is below 1, the targets are the returns of GAE with the same λ; the
    advantages are those of GAE for λ = 1 alone, since they look one target ahead whatever λ is.
    A token that was not generated weighs 1, whatever the clips; what else it is, says
    ``observation``.

    Args:
        rewards: ``[tokens]`` float32 or float64.
        values: ``[tokens]`` float32 or float64, of the state before each token: a causal critic's
            output one token earlier.
        cu_seqlens: ``[sequences + 1]`` int32 boundaries.
        logprobs: ``[tokens]``, of the policy that is trained.
        rollout_logprobs: ``[tokens]``, of the policy that sampled.
        gamma: Discount from one token to the next: one, or ``[sequences]``.
        lam: Factor of the traces: one, or ``[sequences]``.
        rho_clip: Largest weight of a temporal difference (ρ̄): which policy's value is learned.
        c_clip: Largest weight of a trace (c̄): how far credit travels.
        advantage_rho_clip: Largest weight of an advantage.
        loss_mask: ``[tokens]`` bool, True where generated; all are without it.
        observation: What a token that was not generated means, see `trajpack.kernels.gae`.
        bootstrap: ``[sequences]``: value of the state behind the last token.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others.
        max_seqlen: See `trajpack.kernels.gae`.

    Returns:
        Advantages and targets, float32 ``[tokens]``, 0 where ``loss_mask`` is False. Not
        differentiable.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, a clip is not positive, or an input requires
            a gradient where gradients are recorded; for boundaries as `trajpack.kernels.gae`.

    Cost: two launches where `trajpack.kernels.gae` takes one, four where that takes two, and 8
    bytes of scratch a token. No copy, no host synchronisation.

    Example:
        >>> rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])
        >>> sampled, now = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0]) - 0.6931472
        >>> cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
        >>> vtrace(rewards, values, cu_seqlens, now, sampled)
        (tensor([0.1250, 0.2500]), tensor([0.6250, 0.7500]))

    Reference:
        Espeholt et al., IMPALA, arXiv 1802.01561, section 4.1.
    """
    check_tokens(
        "vtrace", rewards, cu_seqlens,
        values=values, logprobs=logprobs, rollout_logprobs=rollout_logprobs,
    )  # fmt: skip
    if rewards.requires_grad and torch.is_grad_enabled():
        raise ValueError("vtrace: no gradient flows to rewards; pass rewards.detach()")
    rates = check_rates("vtrace", rewards, cu_seqlens, gamma=gamma, lam=lam)
    check_rest("vtrace", rewards, cu_seqlens, loss_mask, observation, bootstrap)
    check_max_seqlen("vtrace", max_seqlen)
    named = {"rho_clip": rho_clip, "c_clip": c_clip, "advantage_rho_clip": advantage_rho_clip}
    for name, clip in named.items():
        check_positive("vtrace", name, clip)
    chosen = resolve_impl("vtrace", impl, rewards)
    advantages, targets = torch.ops.trajpack.vtrace(
        rewards.contiguous(), values.contiguous(), contiguous(loss_mask), cu_seqlens.contiguous(),
        logprobs.contiguous(), rollout_logprobs.contiguous(), *rates, contiguous(bootstrap),
        [float(clip) for clip in named.values()], observation, chosen, max_seqlen,
    )  # fmt: skip
    return advantages, targets


def _run(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rewards, values, loss_mask, cu_seqlens, logprobs, rollout_logprobs = inputs[:6]
    gamma, gammas, lam, lams, bootstrap, clips, observation, impl, max_seqlen = inputs[6:]
    rho, c, advantage_rho = clips
    num = rewards.shape[0]
    check_boundaries("vtrace", cu_seqlens, num)
    scan = Scan(cu_seqlens, num, num, rewards, values, loss_mask, gamma, lam, observation)
    scan = scan._replace(
        kind="vtrace", gammas=gammas, lams=lams, bootstrap=bootstrap, max_seqlen=max_seqlen,
        limits=Limits(rho_clip=rho, c_clip=c, advantage_rho_clip=advantage_rho),
        weights=(logprobs, rollout_logprobs),
    )  # fmt: skip
    return run(scan, impl)


def _fake(rewards: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = torch.empty_like(rewards, dtype=torch.float32)
    return advantages, torch.empty_like(advantages)


LIBRARY.define(
    "vtrace(Tensor rewards, Tensor values, Tensor? loss_mask, Tensor cu_seqlens, Tensor logprobs, "
    "Tensor rollout_logprobs, float gamma, Tensor? gammas, float lam, Tensor? lams, "
    "Tensor? bootstrap, float[] clips, str observation, str impl, SymInt? max_seqlen) "
    "-> (Tensor, Tensor)"
)
LIBRARY.impl("vtrace", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::vtrace", _fake, lib=LIBRARY)
