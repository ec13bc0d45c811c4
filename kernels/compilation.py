"""Compilation of kernels before a training run or a CUDA graph needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from trajpack.kernels.dispatch import HAS_TRITON, check_not_captured
from trajpack.kernels.launches import EVERY_WAY


def prewarm(step: Callable[[], object]) -> dict[str, int]:
    """Compile and load every variant of the kernels that a step of training launches.

    Triton compiles a variant of a kernel at the first launch with new dtypes, options or optional
    inputs. That takes about a second, and is refused while a CUDA graph is captured. `prewarm`
    calls ``step`` once, and meanwhile lets every operator launch the kernels of all sizes, in other
    threads too. So later calls compile nothing, whatever their sizes.

    Args:
        step: ``step()`` does what a training step does with the library, on the device of the
            training, with a small batch that has generated tokens: it packs, calls the estimator,
            the weights and ``backward``, and reads `PackedBatch.metrics` if the training does.
            Tensors have the dtypes of the training. One whose address is no multiple of 16 bytes,
            such as ``x[1:]``, needs a variant of its own, so ``step`` slices where the training
            does.

    Returns:
        Number of variants that were compiled, by name of the kernel; empty if all were known, and
        for implementations without Triton. Variants in Triton's cache on disk count too.

    Raises:
        RuntimeError: While a CUDA graph is captured.

    Cost: a call of ``step``, and about a second for each variant that is not on disk. Waits for the
    device.

    Example:
        >>> from trajpack.kernels import prewarm, segment_sum
        >>> def step():
        ...     segment_sum(torch.zeros(2), torch.tensor([0, 2], dtype=torch.int32))
        >>> prewarm(step)  # on the host torch runs
        {}
    """
    on_device = torch.cuda.is_available()
    if on_device:
        current = torch.device("cuda", torch.cuda.current_device())
        check_not_captured("prewarm", current, "call it before the capture")
    compiled: Counter[str] = Counter()
    with _every_variant(compiled) if HAS_TRITON else nullcontext():
        step()
    if on_device:
        torch.cuda.synchronize()
    return dict(compiled)


@contextmanager
def _every_variant(compiled: Counter[str]) -> Iterator[None]:
    """Launch kernels of all sizes; count in ``compiled`` what Triton compiles, by name."""
    from triton import knobs

    before = knobs.runtime.jit_post_compile_hook

    def count(*, fn: Any, **compilation: Any) -> bool | None:
        compiled[fn.name] += 1
        return None if before is None else before(fn=fn, **compilation)

    knobs.runtime.jit_post_compile_hook = count
    EVERY_WAY.set()
    try:
        yield
    finally:
        EVERY_WAY.clear()
        knobs.runtime.jit_post_compile_hook = before
