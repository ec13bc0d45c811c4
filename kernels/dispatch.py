"""Registration of ops with torch, and the choice of the implementation that runs."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

import torch

Impl: TypeAlias = Literal["auto", "torch", "triton"]

LIBRARY = torch.library.Library("trajpack", "DEF")
"""The torch library that holds all ops of this package: ``torch.ops.trajpack.<name>``."""


try:
    HAS_TRITON = find_spec("triton") is not None
except ModuleNotFoundError:  # raised by a finder that hides it
    HAS_TRITON = False


def register_op(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """Register an op with torch under the name that begins its schema.

    ``run`` is its implementation on every device, and gets the arguments by position. ``fake``
    returns tensors of the outputs' shapes and dtypes without values, for tracing. For the others
    see ``torch.library.register_autograd``; an op without ``backward`` is constant.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"trajpack::{name}", fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"trajpack::{name}", backward, setup_context=setup_context, lib=LIBRARY
        )


def resolve_impl(op: str, impl: Impl, device: torch.device) -> Literal["torch", "triton"]:
    """Return the implementation that ``impl`` names for inputs on ``device``.

    ``"auto"`` is Triton for CUDA tensors, where it is installed, and torch for all others. A
    named implementation that cannot run raises; the other never takes its place.

    Raises:
        ValueError: If ``impl`` is none of ``"auto"``, ``"torch"``, ``"triton"``.
        RuntimeError: If ``"triton"`` is asked for where Triton cannot run.
    """
    if impl == "auto":
        return "triton" if device.type == "cuda" and HAS_TRITON else "torch"
    if impl == "torch":
        return "torch"
    if impl != "triton":
        raise ValueError(f"{op}: impl must be 'auto', 'torch' or 'triton', got {impl!r}")
    if not HAS_TRITON:
        raise RuntimeError(f"{op}: impl='triton' needs the triton package: trajpack[triton]")
    if device.type not in ("cuda", "meta"):
        _check_triton_serves(op, device)
    return "triton"


def check_not_captured(op: str, device: torch.device, remedy: str) -> None:
    """Raise while a CUDA graph captures the current stream of ``device``.

    Ops that copy from temporary host memory call it: a replay would read freed memory.
    """
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{op}: cannot be captured in a CUDA graph; {remedy}")


def _check_triton_serves(op: str, device: torch.device) -> None:
    """Raise unless Triton's interpreter or its active driver accepts tensors of ``device``."""
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
