"""Launches of Triton's kernels, with the block shape of the device's architecture."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from trajpack.kernels.block_shapes import architecture_of, block_shape


class Launch(NamedTuple):
    """How a kernel is launched on one device."""

    block: int
    """Elements of a program's tile; entries of a block for scans."""
    options: dict[str, int | bool]
    """``num_warps`` and other keywords of a launch by Triton."""
    device: int

    def __call__(self, kernel: Any, programs: int, *arguments: Any, **named: Any) -> None:
        """Launch ``programs`` programs of a kernel on the device's current stream, or none."""
        if programs:
            with torch.cuda.device(self.device):  # Triton launches on the current device
                kernel[(programs,)](*arguments, **named, **self.options)


@cache
def launch_on(kernel: str, device: int) -> Launch:
    """Return the launch of ``kernel`` on a device, given by its ``torch.Tensor.get_device()``."""
    architecture = architecture_of(device)
    shape = block_shape(kernel, architecture)
    is_amd = architecture.startswith("gfx")
    wave = 64 if architecture.startswith("gfx9") else 32
    options: dict[str, int | bool] = {
        "num_warps": max(shape.threads // wave, 1),
        "enable_fp_fusion": False,
    }
    if shape.most_registers is not None and not is_amd:
        options["maxnreg"] = shape.most_registers
    return Launch(shape.block, options, device)


def cdiv(entries: int, block: int) -> int:
    """Return the number of blocks for ``entries``. Triton's serves kernels too, and is slow."""
    return -(-entries // block)
