"""V-trace over packed sequences: targets and advantages for actions of an older policy."""

from __future__ import annotations

import torch

from trajpack.kernels.dispatch import Impl
from trajpack.kernels.scan.credit_scan import scan_tokens
from trajpack.kernels.scan.observations import Observation
from trajpack.kernels.scan.scan_inputs import Limits, Scan
from trajpack.kernels.validation import check_number


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
    advantages are those of GAE for λ = 1 only, since they look one target ahead for any λ.
    Tokens that were not generated have weight 1; ``observation`` says how else they are treated.

    Args:
        rewards: ``[tokens]`` float32 or float64.
        values: As of `trajpack.kernels.gae`.
        cu_seqlens: ``[sequences + 1]`` int32 boundaries.
        logprobs: ``[tokens]`` log-probabilities of the trained policy.
        rollout_logprobs: ``[tokens]`` log-probabilities of the sampling policy.
        gamma: Discount from one token to the next: one, or ``[sequences]``.
        lam: Factor of the traces: one, or ``[sequences]``.
        rho_clip: Largest weight of a temporal difference (ρ̄); its policy's value is learned.
        c_clip: Largest weight of a trace (c̄); decides how far credit reaches.
        advantage_rho_clip: Largest weight of an advantage.
        loss_mask: As of `trajpack.kernels.gae`.
        observation: As of `trajpack.kernels.gae`.
        bootstrap: As of `trajpack.kernels.gae`.
        impl: As of `trajpack.kernels.gae`.
        max_seqlen: As of `trajpack.kernels.gae`.

    Returns:
        Advantages and targets, float32 ``[tokens]``, 0 where ``loss_mask`` is False. Not
        differentiable.

    Raises:
        TypeError: As `trajpack.kernels.gae`.
        ValueError: As `trajpack.kernels.gae`, if a clip is not positive, or if any input requires a
            gradient where gradients are recorded.

    Example:
        >>> rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])
        >>> sampled, now = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0]) - 0.6931472
        >>> cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
        >>> vtrace(rewards, values, cu_seqlens, now, sampled)
        (tensor([0.1250, 0.2500]), tensor([0.6250, 0.7500]))

    Reference:
        Espeholt et al., IMPALA, arXiv 1802.01561, section 4.1.
    """
    clips = {"rho_clip": rho_clip, "c_clip": c_clip, "advantage_rho_clip": advantage_rho_clip}
    for name, clip in clips.items():
        check_number("vtrace", name, clip, above=0)
    scan = Scan(cu_seqlens, rewards, values, loss_mask, gamma, lam, observation)
    scan = scan._replace(
        bootstrap=bootstrap,
        logprobs=logprobs,
        rollout_logprobs=rollout_logprobs,
        limits=Limits(**clips),
        kind="vtrace",
        max_seqlen=max_seqlen,
    )
    return scan_tokens("vtrace", scan, impl)
