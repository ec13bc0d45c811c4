"""Launches of Triton's kernels, with the block shape of the device's architecture."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from threading import Event
from typing import Any

import torch

from trajpack.kernels.block_shapes import BlockShape, architecture_of, block_shape
from trajpack.kernels.dispatch import HAS_TRITON

KNOWN_VERSIONS = ([3, 6], [3, 9])
"""First and last version of Triton whose specialisation of arguments `_kind` follows."""


class Launch:
    """Launches a kernel on one device. Later launches of a variant go past Triton's search for it.

    Triton binds, specialises and compares all arguments and constants at each launch, which takes
    longer than the launch itself. Here a variant is found by a shorter key. Triton compiles for
    dtypes, for addresses and numbers that are multiples of 16, for the number 1, and for numbers of
    64 bits; the key tells those apart. AMD GPUs, Triton's interpreter, versions of Triton
    outside `KNOWN_VERSIONS` and kernels with hooks are left to Triton. What Triton reads from its
    knobs, such as ``TRITON_DEBUG``, counts at the first launch of a variant.
    """

    def __init__(self, shape: BlockShape, architecture: str, device: int) -> None:
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
        is_known = is_known_triton() and not is_amd
        self._compiled: dict[Hashable, Any] | None = {} if is_known else None

    def __call__(self, kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        """Launch ``programs`` programs of a kernel on the current stream, or none.

        Args:
            kernel: A function with ``triton.jit``.
            programs: Number of programs.
            arguments: The first arguments of the kernel, in its order.
            constants: Its other arguments, constants mostly, by name.

        Raises:
            TypeError: If there are more or fewer arguments than the kernel has, or one is of a
                type that no kernel takes.
            KeyError: If an argument is missing by its name.

        Cost: about 10 µs of the host, and the compilation of a variant at its first launch.
        """
        if not programs:
            return
        with torch.cuda.device(self._device):  # Triton launches on the current device
            constexprs = getattr(kernel, "constexprs", None)  # kernels of the interpreter have none
            if self._compiled is None or constexprs is None or kernel.pre_run_hooks:
                kernel[(programs,)](*arguments, **constants, **self.options)
                return
            if len(arguments) + len(constants) != len(kernel.arg_names):
                raise TypeError(
                    f"{kernel.fn.__name__} takes {len(kernel.arg_names)} arguments, got "
                    f"{len(arguments)} and {[*constants]}"
                )
            given = (*arguments, *[constants[n] for n in kernel.arg_names[len(arguments) :]])
            kinds = [one if i in constexprs else _kind(one) for i, one in enumerate(given)]
            key = id(kernel), *kinds  # Triton's own hash of a kernel is slow
            compiled = self._compiled.get(key)
            if compiled is not None:
                compiled[programs, 1, 1](*given)
                return
            compiled = kernel[(programs,)](*given, **self.options)
            if hasattr(compiled, "asm"):  # it is compiled, not to be compiled in the background
                self._compiled[key] = compiled


@cache
def launch_on(kernel: str, device: int) -> Launch:
    """Return the launch of ``kernel`` on a device, given by its ``torch.Tensor.get_device()``."""
    architecture = architecture_of(device)
    return Launch(block_shape(kernel, architecture), architecture, device)


EVERY_WAY = Event()
"""While it is set, launchers of all threads take every way in which they may cut their work, not
that of their sizes alone. Autograd runs ``backward`` in threads of its own on a device."""


def ways(chosen: bool) -> tuple[bool, ...]:
    """Return the way that a launcher chose by its sizes; with `EVERY_WAY`, the other one before it.

    So a call with entries compiles the variants for all sizes, and its results do not change.
    """
    return (not chosen, chosen) if EVERY_WAY.is_set() else (chosen,)


def cdiv(entries: int, block: int) -> int:
    """Return the number of blocks for ``entries``. Triton's serves kernels too, and is slow."""
    return -(-entries // block)


@cache
def is_known_triton() -> bool:
    """Return whether this version of Triton is one of `KNOWN_VERSIONS`."""
    if not HAS_TRITON:
        return False
    import triton

    first, last = KNOWN_VERSIONS
    return first <= [int(part) for part in triton.__version__.split(".")[:2]] <= last


def _kind(argument: Any) -> Any:
    """Return a key for what a compiled variant depends on of an argument.

    Arguments that share a variant may have different keys.
    """
    kind = type(argument)
    if kind is float or kind is bool or argument is None:
        return kind
    if kind is int:
        if -(2**31) <= argument < 2**31:
            return "1" if argument == 1 else "16" if argument & 15 == 0 else kind
        return "long", argument < 2**63, argument & 15 == 0
    if isinstance(argument, torch.Tensor):
        return ("unaligned", argument.dtype) if argument.data_ptr() & 15 else argument.dtype
    if isinstance(argument, tuple):
        return kind, *[_kind(one) for one in argument]
    raise TypeError(f"a kernel takes numbers, tensors, tuples of them and None, got {argument!r}")
