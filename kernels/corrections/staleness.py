"""Age of the policy that sampled each token, and masks and weights by age."""

from __future__ import annotations

import torch

from trajpack.kernels.validation import check_integer, check_number, check_tensor


def policy_age(policy_versions: torch.Tensor, current_version: int | torch.Tensor) -> torch.Tensor:
    """Return for each token how many versions ago it was sampled.

    Args:
        policy_versions: ``[tokens]`` int32: version of the weights that sampled the token, or
            -1 where none did (`PackedBatch.policy_versions`).
        current_version: Version of the weights in training: an int, or a 0-d int32 or int64
            tensor on the same device, which each replay of a captured graph reads.

    Returns:
        ``[tokens]`` int32: ``current_version - policy_versions``, and 0 where no policy sampled
        the token. A version above ``current_version`` has a negative age.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If a shape or a device is wrong, or an int ``current_version`` is negative.

    Cost: three elementwise launches. No copy, no host synchronisation.

    Example:
        >>> policy_age(torch.tensor([-1, 3, 5], dtype=torch.int32), 5)
        tensor([0, 2, 0], dtype=torch.int32)

    Reference:
        AReaL, arXiv 2505.24298, section 5.1: staleness is a number of versions.
    """
    return _ages("policy_age", policy_versions, current_version)


def staleness_mask(
    policy_versions: torch.Tensor, current_version: int | torch.Tensor, max_age: int
) -> torch.Tensor:
    """Return which tokens were sampled at most ``max_age`` versions ago.

    It replaces ``loss_mask`` in a loss that leaves old tokens out. Arguments and errors are those
    of `policy_age`; ``max_age`` must not be negative.

    Returns:
        ``[tokens]`` bool: True where a policy sampled the token and its age is at most
        ``max_age``.

    Cost: six elementwise launches. No copy, no host synchronisation.

    Example:
        >>> staleness_mask(torch.tensor([-1, 3, 4, 5], dtype=torch.int32), 5, max_age=1)
        tensor([False, False,  True,  True])

    Reference:
        AReaL ``areal/trainer/ppo/staleness.py``: drops ages above ``max_staleness``.
    """
    op = "staleness_mask"
    check_integer(op, "max_age", max_age)
    age = _ages(op, policy_versions, current_version)
    return (age <= max_age) & (policy_versions >= 0)


def staleness_weights(
    policy_versions: torch.Tensor, current_version: int | torch.Tensor, *, decay: float
) -> torch.Tensor:
    """Return a weight for each token that shrinks with its age: ``decay ** age``.

    Arguments and errors are those of `policy_age`; ``decay`` must be in ``[0, 1]``.

    Returns:
        ``[tokens]`` float32 in ``[0, 1]``: 1 at age 0 and below, 0 where no policy sampled the
        token.

    Cost: nine elementwise launches. No copy, no host synchronisation.

    Example:
        >>> staleness_weights(torch.tensor([-1, 3, 4, 5], dtype=torch.int32), 5, decay=0.5)
        tensor([0.0000, 0.2500, 0.5000, 1.0000])

    Reference:
        Geometric down-weighting by age; `staleness_mask` is the hard form that systems use.
    """
    op = "staleness_weights"
    check_number(op, "decay", decay, least=0, most=1)
    age = _ages(op, policy_versions, current_version).clamp(min=0).double()
    return torch.where(policy_versions >= 0, torch.pow(float(decay), age), 0.0).float()


def _ages(
    op: str, policy_versions: torch.Tensor, current_version: int | torch.Tensor
) -> torch.Tensor:
    check_tensor(op, "policy_versions", policy_versions, dtypes=(torch.int32,))
    if isinstance(current_version, torch.Tensor):
        integers, device = (torch.int32, torch.int64), policy_versions.device
        check_tensor(op, "current_version", current_version, ndim=0, dtypes=integers, device=device)
    else:
        check_integer(op, "current_version", current_version, most=2**31 - 1)
    age = current_version - policy_versions
    return torch.where(policy_versions >= 0, age, 0).int()
