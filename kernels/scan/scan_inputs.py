"""Checks of what scans over tokens are given. None of them reads a tensor's values."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from trajpack.kernels.scan.observations import check_observation
from trajpack.kernels.validation import check_cu_seqlens, check_device, check_tensor

FLOATS = (torch.float32, torch.float64)


def check_tokens(
    op: str, rewards: torch.Tensor, cu_seqlens: torch.Tensor, **others: torch.Tensor
) -> None:
    """Raise unless rewards, boundaries and ``others``, named tensors over tokens, agree."""
    check_tensor(op, "rewards", rewards, ndim=1, dtypes=FLOATS)
    check_cu_seqlens(op, cu_seqlens, device=rewards.device)
    if rewards.shape[0] and cu_seqlens.shape[0] == 1:
        raise ValueError(f"{op}: cu_seqlens must bound {rewards.shape[0]} entries, got no segment")
    for name, tensor in others.items():
        check_tensor(op, name, tensor, ndim=1, dtypes=FLOATS)
        check_device(op, name, tensor, rewards.device)
        _check_length(op, name, tensor, rewards.shape[0], "token")
        _check_constant(op, name, tensor)


def check_rates(
    op: str, rewards: torch.Tensor, cu_seqlens: torch.Tensor, **rates: float | torch.Tensor
) -> list[Any]:
    """Return each rate as a number and a float64 tensor or ``None``; the tensor comes first."""
    parted: list[Any] = []
    for name, rate in rates.items():
        if isinstance(rate, torch.Tensor):
            check_of_segments(op, name, rate, rewards, cu_seqlens)
            parted += [1.0, rate.double().contiguous()]
        elif isinstance(rate, Real):
            parted += [float(rate), None]
        else:
            raise TypeError(f"{op}: {name} must be a number or a tensor, got {rate!r}")
    return parted


def check_of_segments(
    op: str, name: str, tensor: torch.Tensor, rewards: torch.Tensor, cu_seqlens: torch.Tensor
) -> None:
    """Raise unless ``tensor`` has a float for each segment."""
    check_tensor(op, name, tensor, ndim=1, dtypes=FLOATS)
    check_device(op, name, tensor, rewards.device)
    _check_length(op, name, tensor, cu_seqlens.shape[0] - 1, "segment")
    _check_constant(op, name, tensor)


def check_rest(
    op: str,
    rewards: torch.Tensor,
    cu_seqlens: torch.Tensor,
    loss_mask: torch.Tensor | None,
    observation: str,
    bootstrap: torch.Tensor | None = None,
) -> None:
    """Raise unless what every scan over tokens may be given has its shape."""
    check_observation(op, observation)
    if loss_mask is not None:
        check_tensor(op, "loss_mask", loss_mask, ndim=1, dtypes=(torch.bool,))
        check_device(op, "loss_mask", loss_mask, rewards.device)
        _check_length(op, "loss_mask", loss_mask, rewards.shape[0], "token")
    if bootstrap is not None:
        check_of_segments(op, "bootstrap", bootstrap, rewards, cu_seqlens)


def check_max_seqlen(op: str, max_seqlen: int | None) -> None:
    """Raise unless ``max_seqlen`` is a length or ``None``."""
    if max_seqlen is None:
        return
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt)):
        raise TypeError(f"{op}: max_seqlen must be an int or None, got {max_seqlen!r}")
    if max_seqlen < 0:
        raise ValueError(f"{op}: max_seqlen must not be negative, got {max_seqlen}")


def check_positive(op: str, name: str, number: float) -> None:
    """Raise unless ``number`` is one above 0; infinity is."""
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{op}: {name} must be a number, got {number!r}")
    if not number > 0:
        raise ValueError(f"{op}: {name} must be above 0, got {number!r}")


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the tensor, contiguous."""
    return None if tensor is None else tensor.contiguous()


def _check_length(op: str, name: str, tensor: torch.Tensor, expected: int, thing: str) -> None:
    if tensor.shape[0] != expected:
        raise ValueError(
            f"{op}: {name} must have one entry for each of {expected} {thing}(s), "
            f"got shape {list(tensor.shape)}"
        )


def _check_constant(op: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: no gradient flows to {name}; pass {name}.detach()")
