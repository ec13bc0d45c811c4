"""Launches of Triton's kernels, with the block shape of the device's architecture."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch

from trajpack.kernels import block_shapes


class Launch:
    """Launches a kernel on one device. Later launches of a variant go past Triton's search for it.

    Triton binds, specialises and compares all arguments and constants at each launch, which takes
    longer than the launch itself. Here a variant is found by a shorter key. The key tells apart all
    that Triton specialises on NVIDIA GPUs, where Triton 3.6 to 3.9 compile for dtypes, for
    addresses and numbers that are multiples of 16, for the number 1, and for numbers of 64 bits.
    """

    def __init__(self, shape: block_shapes.BlockShape, architecture: str, device: int) -> None:
        self.block = shape.block
        """Elements of a program's tile; entries of a block for scans."""
        is_amd = architecture.startswith("gfx")
        wave = 64 if architecture.startswith("gfx9") else 32
        self.options: dict[str, int | bool] = {
            "num_warps": max(shape.threads // wave, 1),
            "enable_fp_fusion": False,
        }
        """``num_warps`` and other keywords of a launch by Triton."""
        if shape.most_registers is not None and not is_amd:
            self.options["maxnreg"] = shape.most_registers
        self._device = device
        self._compiled: dict[Hashable, Any] | None = None if is_amd else {}

    def __call__(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        """Launch ``programs`` programs of a kernel on the current stream, or none.

        Args:
            kernel: A function with ``triton.jit``.
            programs: Number of programs.
            arguments: The first arguments of the kernel, in its order.
            constants: Its other arguments, constants mostly, by name.

        Cost: about 10 µs of the host, and the compilation of a variant at its first launch.
        """
        if not programs:
            return
        with torch.cuda.device(self._device):  # Triton launches on the current device
            if self._compiled is None or not hasattr(kernel, "constexprs"):  # of the interpreter
                kernel[(programs,)](*arguments, **constants, **self.options)
                return
            given = (*arguments, *[constants[n] for n in kernel.arg_names[len(arguments) :]])
            kinds: list[Hashable] = [_kind(one) for one in given]
            for place in kernel.constexprs:
                kinds[place] = given[place]
            key = id(kernel), *kinds  # Triton's own hash of a kernel is slow
            compiled = self._compiled.get(key)
            if compiled is not None:
                compiled[programs, 1, 1](*given)
                return
            compiled = kernel[(programs,)](*given, **self.options)
            if compiled is not None:
                self._compiled[key] = compiled


@cache
def launch_on(kernel: str, device: int) -> Launch:
    """Return the launch of ``kernel`` on a device, given by its ``torch.Tensor.get_device()``."""
    architecture = block_shapes.architecture_of(device)
    return Launch(block_shapes.block_shape(kernel, architecture), architecture, device)


def cdiv(entries: int, block: int) -> int:
    """Return the number of blocks for ``entries``. Triton's serves kernels too, and is slow."""
    return -(-entries // block)


def _kind(argument: Any) -> Any:
    """Return what a compiled variant depends on of an argument, or more."""
    kind = type(argument)
    if kind is float or argument is None:
        return kind
    if kind is int:
        if -(2**31) <= argument < 2**31:
            return "1" if argument == 1 else "16" if argument & 15 == 0 else kind
        return "long", argument < 2**63, argument & 15 == 0
    if kind is tuple:
        return tuple([_kind(one) for one in argument])
    if isinstance(argument, torch.Tensor):
        return (argument.dtype,) if argument.data_ptr() & 15 else argument.dtype
    return kind
