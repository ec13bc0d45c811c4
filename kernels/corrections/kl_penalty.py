"""Estimates of the KL divergence from a reference policy, one for each sampled token."""

from __future__ import annotations

from numbers import Real
from typing import Literal, TypeAlias, get_args

import torch

from trajpack.kernels.validation import check_device, check_tensor

OP = "kl_penalty"
DTYPES = (torch.float32, torch.float64)

KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]
KL_ESTIMATORS: tuple[str, ...] = get_args(KLEstimator)
"""Names of the estimators."""

# infinite differences are brought this near, so that neither x² and e⁻ˣ nor their gradients
# become inf - inf or 0 · inf; as float32 all of them are infinite still
_NEAR = {"k2": (-1e150, 1e150), "k3": (-700.0, None)}


def kl_penalty(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    *,
    estimator: KLEstimator = "k1",
    clamp: float | None = 10.0,
) -> torch.Tensor:
    """Estimate ``KL(policy ‖ reference)`` from the tokens that the policy sampled.

    With ``x = logprobs - ref_logprobs``, in nats::

        k1 = x              unbiased; negative where the reference likes the token more
        k2 = x² / 2         biased; never negative
        k3 = e⁻ˣ - 1 + x    unbiased; never negative

    and the result kept within ``[-clamp, clamp]``, which biases all of them. AReaL clamps all
    three; verl clamps k3 alone, which for k1 and k2 is ``clamp=None``. Of all tokens, those that
    were not generated included: their log-probabilities mean nothing, so let a ``loss_mask``
    choose.

    Args:
        logprobs: ``[tokens]`` float32 or float64, of the policy that sampled.
        ref_logprobs: ``[tokens]`` float32 or float64, of the reference.
        estimator: One of `KL_ESTIMATORS`.
        clamp: Bound of the result on either side, above 0, or None.

    Returns:
        ``[tokens]`` float32, computed in float64. A token that only one of the two rules out
        (log-probability -inf) has an infinite estimate, which ``clamp`` bounds; one that both
        do, or with a NaN, has NaN. Differentiable with respect to both log-probabilities, with
        no gradient where ``clamp`` bounds the result.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, or an argument has no such value.

    Cost: five to nine elementwise launches. No copy, no host synchronisation.

    Example:
        >>> logprobs, ref_logprobs = torch.tensor([-1.0, -0.5]), torch.tensor([-2.0, -0.5])
        >>> kl_penalty(logprobs, ref_logprobs, estimator="k3")
        tensor([0.3679, 0.0000])

    Reference:
        Schulman, Approximating KL Divergence, 2020, http://joschu.net/blog/kl-approx.html.
        GRPO subtracts ``k3`` from the loss (DeepSeekMath, arXiv 2402.03300, equation 4).
    """
    check_tensor(OP, "logprobs", logprobs, ndim=1, dtypes=DTYPES)
    check_tensor(OP, "ref_logprobs", ref_logprobs, ndim=1, dtypes=DTYPES)
    check_device(OP, "ref_logprobs", ref_logprobs, logprobs.device)
    if ref_logprobs.shape != logprobs.shape:
        raise ValueError(
            f"{OP}: ref_logprobs must have one entry for each of {logprobs.shape[0]} token(s), "
            f"got shape {list(ref_logprobs.shape)}"
        )
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"{OP}: estimator must be 'k1', 'k2' or 'k3', got {estimator!r}")
    _check_clamp(clamp)
    return estimate(logprobs, ref_logprobs, estimator, clamp).float()


def estimate(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str, clamp: float | None
) -> torch.Tensor:
    """Return what `kl_penalty` does, in float64; arguments are checked."""
    x = logprobs.double() - ref_logprobs.double()
    if estimator == "k2":
        x = x.clamp(*_NEAR["k2"])
        x = x * x / 2
    elif estimator == "k3":
        x = x.clamp(*_NEAR["k3"])
        x = torch.expm1(-x) + x
    return x if clamp is None else x.clamp(-clamp, clamp)


def _check_clamp(clamp: float | None) -> None:
    if clamp is None:
        return
    if isinstance(clamp, bool) or not isinstance(clamp, Real):
        raise TypeError(f"{OP}: clamp must be a number or None, got {clamp!r}")
    if not clamp > 0:
        raise ValueError(f"{OP}: clamp must be above 0, got {clamp}")
