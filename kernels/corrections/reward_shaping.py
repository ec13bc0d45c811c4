"""Rewards shaped by how long a response is."""

from __future__ import annotations

import math
from numbers import Real

import torch

from trajpack.kernels.validation import check_tensor


def overlong_penalty(
    lengths: torch.Tensor,
    max_length: int,
    overlong_buffer: int,
    *,
    factor: float = 1.0,
) -> torch.Tensor:
    """Return what to add to the rewards of responses that come near their longest length.

    0 up to ``max_length - overlong_buffer`` tokens, from there in a straight line down to
    ``-factor`` at ``max_length``, and ``-factor`` beyond it. Beyond it AReaL goes on down the
    line; DAPO, which this follows, does not, so that one long response cannot rule a batch.

    Args:
        lengths: ``[responses]`` int32 or int64: generated tokens of each, of all its turns.
        max_length: Tokens at which the penalty is whole.
        overlong_buffer: Tokens over which it grows: at least 1, at most ``max_length``.
        factor: The whole penalty, not negative.

    Returns:
        ``[responses]`` float32 in ``[-factor, 0]``.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If ``lengths`` is not 1-D or a number is out of its range.

    Cost: seven elementwise launches. No copy, no host synchronisation.

    Example:
        >>> overlong_penalty(torch.tensor([60, 90, 100, 250]), 100, 20, factor=0.5)
        tensor([ 0.0000, -0.2500, -0.5000, -0.5000])

    Reference:
        DAPO, arXiv 2503.14476, equation 13, times ``factor``.
    """
    op = "overlong_penalty"
    check_tensor(op, "lengths", lengths, ndim=1, dtypes=(torch.int32, torch.int64))
    for name, value in (("max_length", max_length), ("overlong_buffer", overlong_buffer)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{op}: {name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{op}: {name} must be at least 1, got {value}")
    if overlong_buffer > max_length:
        raise ValueError(
            f"{op}: overlong_buffer must be at most max_length ({max_length}), "
            f"got {overlong_buffer}"
        )
    if isinstance(factor, bool) or not isinstance(factor, Real):
        raise TypeError(f"{op}: factor must be a number, got {factor!r}")
    if not 0 <= factor < math.inf:
        raise ValueError(f"{op}: factor must be finite and not negative, got {factor}")
    room = (max_length - overlong_buffer) - lengths.long()
    penalty = room.clamp(-overlong_buffer, 0).double() / overlong_buffer * factor
    return penalty.float()
