"""Which implementation of an op runs: the whole choice in one place."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from trajpack.kernels.installed import is_there

Impl: TypeAlias = Literal["auto", "torch", "triton"]

LIBRARY = torch.library.Library("trajpack", "DEF")
"""Every op of this package is registered here, as ``torch.ops.trajpack.<name>``."""

_HAS_TRITON = is_there("triton")


def resolve_impl(op: str, impl: Impl, tensor: torch.Tensor) -> Literal["torch", "triton"]:
    """Return the implementation that ``impl`` names for inputs that live where ``tensor`` does.

    ``"auto"`` is Triton for CUDA tensors, where it is installed, and torch for all others. A
    named implementation that cannot run raises; it never falls back to the other.

    Raises:
        ValueError: If ``impl`` is none of ``"auto"``, ``"torch"``, ``"triton"``.
        RuntimeError: If ``"triton"`` is asked for where Triton cannot run.
    """
    if impl == "auto":
        return "triton" if tensor.is_cuda and _HAS_TRITON else "torch"
    if impl == "torch":
        return "torch"
    if impl != "triton":
        raise ValueError(f"{op}: impl must be 'auto', 'torch' or 'triton', got {impl!r}")
    if not _HAS_TRITON:
        raise RuntimeError(f"{op}: impl='triton' needs the triton package: trajpack[triton]")
    if not tensor.is_cuda and tensor.device.type != "meta":
        _check_triton_serves(op, tensor.device)
    return "triton"


def check_not_captured(op: str, device: torch.device, remedy: str) -> None:
    """Raise while a CUDA graph captures the current stream of ``device``.

    For what a replay would not do again, or would do with memory that is gone by then.

    Raises:
        RuntimeError: That names ``op`` and the ``remedy``.
    """
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{op}: cannot be captured in a CUDA graph; {remedy}")


def _check_triton_serves(op: str, device: torch.device) -> None:
    """Raise unless Triton's interpreter or its active driver takes tensors of ``device``."""
    import triton
    from triton.runtime import driver

    if triton.knobs.runtime.interpret:
        return
    try:
        served = driver.active.get_active_torch_device().type
    except RuntimeError:  # triton found no GPU at all
        served = "cuda"
    if served != device.type:
        raise RuntimeError(
            f"{op}: impl='triton' needs {served} tensors, got tensors on {device}; "
            "use impl='torch', or set TRITON_INTERPRET=1 to run the kernel on the host"
        )
