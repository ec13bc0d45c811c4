"""Checks of shape, dtype and device, in one voice; and which tensors' values a check may read."""

from __future__ import annotations

import os

import numpy as np
import torch

READS_DEVICE = os.environ.get("TRAJPACK_CHECK", "0") not in ("", "0")
"""Whether boundaries that live on a device are checked too: set ``TRAJPACK_CHECK=1`` before
``trajpack`` is imported. Each call then waits for the device."""
HOSTS = ("cpu",)
"""Devices whose tensors are read for nothing."""


def values_to_check(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return ``tensor`` on the host, or ``None`` where its values are not to be read.

    They are not where there are none: in a trace of the compiler, on the meta device.

    Cost: nothing on the host. On a device nothing but with ``TRAJPACK_CHECK=1``: then a copy,
    which waits; not while a CUDA graph is captured.
    """
    is_traced = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if is_traced or torch.compiler.is_compiling():
        return None
    if tensor.device.type in HOSTS:
        return tensor
    if not READS_DEVICE or tensor.device.type == "meta":
        return None
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return tensor.cpu()


def check_boundaries(
    op: str, cu_seqlens: torch.Tensor, num_tokens: int, max_seqlen: int | None = None
) -> None:
    """Raise if boundaries can be read and do not bound ``num_tokens``, as the kernels trust.

    Called by the implementations of operators, whose tensors have values.
    """
    readable = values_to_check(cu_seqlens)
    if readable is None:
        return
    ends = readable.numpy().astype(np.int64)
    lengths = np.diff(ends)
    if ends[0] != 0 or ends[-1] != num_tokens or (lengths < 0).any():
        raise ValueError(
            f"{op}: cu_seqlens must go from 0 to num_tokens {num_tokens} and never back, it goes "
            f"from {ends[0]} to {ends[-1]}, in steps of {lengths.min(initial=num_tokens)} or more"
        )
    if max_seqlen is not None and lengths.max(initial=0) > max_seqlen:
        raise ValueError(
            f"{op}: no sequence may be longer than max_seqlen {max_seqlen}, sequence "
            f"{lengths.argmax()} has {lengths.max()} tokens"
        )


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


def check_cu_seqlens(
    op: str, cu_seqlens: torch.Tensor, *, device: torch.device | None = None
) -> None:
    """Raise unless ``cu_seqlens`` can hold segment boundaries: int32, 1-D, not empty."""
    check_tensor(op, "cu_seqlens", cu_seqlens, ndim=1, dtypes=(torch.int32,))
    if cu_seqlens.shape[0] == 0:
        raise ValueError(f"{op}: cu_seqlens must have segments + 1 entries, got none")
    if device is not None:
        check_device(op, "cu_seqlens", cu_seqlens, device)


def check_device(op: str, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise unless ``tensor`` lives on ``device``."""
    if tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device} but the other inputs are on {device}")


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)
