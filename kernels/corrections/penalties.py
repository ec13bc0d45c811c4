"""Penalties in rewards: the KL divergence from a reference policy, and overlong responses."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch

from trajpack.kernels.validation import check_choice, check_integer, check_number, check_tensor

FLOATS = (torch.float32, torch.float64)
KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]
KL_ESTIMATORS: tuple[str, ...] = get_args(KLEstimator)
"""Names of the estimators."""

# Bounds of infinite differences, so that neither x² and e⁻ˣ nor their gradients become inf - inf
# or 0 · inf. Results beyond them are infinite in float32.
_BOUNDS = {"k2": (-1e150, 1e150), "k3": (-700.0, None)}


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

    and the result clamped to ``[-clamp, clamp]``, which biases all of them. AReaL clamps all
    three; verl clamps k3 alone, which for k1 and k2 is ``clamp=None``. Tokens that were not
    generated are included: apply a ``loss_mask`` to the result.

    Args:
        logprobs: ``[tokens]`` float32 or float64, of the policy that sampled.
        ref_logprobs: ``[tokens]`` float32 or float64, of the reference.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``.
        clamp: Bound of the result on either side, above 0, or None.

    Returns:
        ``[tokens]`` float32, computed in float64. A token with one log-probability of -inf has an
        infinite estimate, which ``clamp`` bounds; with two, or with a NaN, it has NaN.
        Differentiable with respect to both log-probabilities, with no gradient where ``clamp``
        bounds the result.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, or a value is none of the above.

    Example:
        >>> logprobs, ref_logprobs = torch.tensor([-1.0, -0.5]), torch.tensor([-2.0, -0.5])
        >>> kl_penalty(logprobs, ref_logprobs, estimator="k3")
        tensor([0.3679, 0.0000])

    Reference:
        Schulman, Approximating KL Divergence, 2020, http://joschu.net/blog/kl-approx.html.
        GRPO subtracts ``k3`` from the loss (DeepSeekMath, arXiv 2402.03300, equation 4).
    """
    op = "kl_penalty"
    check_tensor(op, "logprobs", logprobs, dtypes=FLOATS)
    device, entries = logprobs.device, logprobs.shape[0]
    check_tensor(op, "ref_logprobs", ref_logprobs, dtypes=FLOATS, device=device, entries=entries)
    check_choice(op, "estimator", estimator, KL_ESTIMATORS)
    if clamp is not None:
        check_number(op, "clamp", clamp, above=0)
    return estimate(logprobs, ref_logprobs, estimator, clamp).float()


def estimate(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str, clamp: float | None
) -> torch.Tensor:
    """Return the result of `kl_penalty` in float64; arguments are checked."""
    x = logprobs.double() - ref_logprobs.double()
    if estimator == "k2":
        x = x.clamp(*_BOUNDS["k2"])
        x = x * x / 2
    elif estimator == "k3":
        x = x.clamp(*_BOUNDS["k3"])
        x = torch.expm1(-x) + x
    return x if clamp is None else x.clamp(-clamp, clamp)


def overlong_penalty(
    lengths: torch.Tensor,
    max_length: int,
    overlong_buffer: int,
    *,
    factor: float = 1.0,
) -> torch.Tensor:
    """Return a penalty to add to the rewards of responses near their maximum length.

    0 up to ``max_length - overlong_buffer`` tokens, then linear down to ``-factor`` at
    ``max_length``, and ``-factor`` beyond it, as in DAPO. AReaL continues the line.

    Args:
        lengths: ``[responses]`` int32 or int64: generated tokens of each, of all its turns.
        max_length: Tokens from which on the penalty is ``-factor``.
        overlong_buffer: Tokens over which it grows: at least 1, at most ``max_length``.
        factor: Largest penalty, not negative.

    Returns:
        ``[responses]`` float32 in ``[-factor, 0]``.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If ``lengths`` is not 1-D or a number is out of its range.

    Example:
        >>> overlong_penalty(torch.tensor([60, 90, 100, 250]), 100, 20, factor=0.5)
        tensor([ 0.0000, -0.2500, -0.5000, -0.5000])

    Reference:
        DAPO, arXiv 2503.14476, equation 13, times ``factor``.
    """
    op = "overlong_penalty"
    check_tensor(op, "lengths", lengths, dtypes=(torch.int32, torch.int64))
    for name, number in (("max_length", max_length), ("overlong_buffer", overlong_buffer)):
        check_integer(op, name, number, least=1)
    if overlong_buffer > max_length:
        raise ValueError(
            f"{op}: overlong_buffer must be at most max_length ({max_length}), "
            f"got {overlong_buffer}"
        )
    check_number(op, "factor", factor, least=0, finite=True)
    excess = (max_length - overlong_buffer) - lengths.long()
    penalty = excess.clamp(-overlong_buffer, 0).double() / overlong_buffer * factor
    return penalty.float()
