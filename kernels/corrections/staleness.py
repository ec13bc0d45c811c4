"""Which tokens are young enough to train."""

from __future__ import annotations

import torch

from trajpack.kernels.validation import check_integer, check_tensor


def staleness_mask(
    policy_versions: torch.Tensor, current_version: int | torch.Tensor, max_age: int
) -> torch.Tensor:
    """Return which tokens are at most ``max_age`` versions old, for `PackedBatch.with_loss_mask`.

    Args:
        policy_versions: int32 ``[tokens]``: version that sampled each token, -1 where none did.
        current_version: Version in training. Replays of a captured graph read a 0-d int32 or int64
            tensor anew.
        max_age: Number of versions, 0 or more.

    Returns:
        bool ``[tokens]``: False also where no policy sampled the token.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If a shape or a device is wrong, or a number is negative.

    Example:
        >>> staleness_mask(torch.tensor([-1, 3, 4, 5], dtype=torch.int32), 5, max_age=1)
        tensor([False, False,  True,  True])

    Reference:
        AReaL, ``areal/trainer/ppo/staleness.py``.
    """
    op = "staleness_mask"
    check_tensor(op, "policy_versions", policy_versions, dtypes=(torch.int32,))
    check_integer(op, "max_age", max_age)
    if isinstance(current_version, torch.Tensor):
        integers, device = (torch.int32, torch.int64), policy_versions.device
        check_tensor(op, "current_version", current_version, ndim=0, dtypes=integers, device=device)
    else:
        check_integer(op, "current_version", current_version)
    return (policy_versions >= 0) & (policy_versions >= current_version - max_age)
