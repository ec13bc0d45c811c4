"""Checks of shape, dtype and device, in one voice. None of them reads a tensor's values."""

from __future__ import annotations

import torch


def check_tensor(
    op: str, name: str, tensor: torch.Tensor, *, ndim: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise unless ``tensor`` has ``ndim`` dimensions and one of ``dtypes``."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} must be {expected}, got {got}")
    if tensor.ndim != ndim:
        raise ValueError(f"{op}: {name} must have {ndim} dimension(s), got shape {_shape(tensor)}")


def check_cu_seqlens(op: str, cu_seqlens: torch.Tensor, *, device: torch.device) -> None:
    """Raise unless ``cu_seqlens`` can hold segment boundaries: int32, 1-D, not empty."""
    check_tensor(op, "cu_seqlens", cu_seqlens, ndim=1, dtypes=(torch.int32,))
    if cu_seqlens.shape[0] == 0:
        raise ValueError(f"{op}: cu_seqlens must have segments + 1 entries, got none")
    check_device(op, "cu_seqlens", cu_seqlens, device)


def check_device(op: str, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise unless ``tensor`` lives on ``device``."""
    if tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device} but the other inputs are on {device}")


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)
