"""Compilation of kernels before a training run or a CUDA graph needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from trajpack.kernels.dispatch import HAS_TRITON, check_not_captured

SIZES = (1, 9_001)
"""Tokens of one sequence: one launch of a scan or a segment sum takes the first, the second is too
long for it. No other size needs another variant (``tests/kernels/compiled/test_variants.py``)."""


def prewarm(step: Callable[[int], object], *, sizes: Sequence[int] = SIZES) -> dict[str, int]:
    """Compile and load every variant of the kernels that a step of training launches.

    Triton compiles a variant of a kernel at the first launch with new dtypes, options or optional
    inputs. That takes about a second, and is refused while a CUDA graph is captured. `prewarm`
    calls ``step`` with each size, so later calls compile nothing, whatever their sizes.

    Args:
        step: ``step(num_tokens)`` does what a training step does with the library, on the device of
            the training: it packs one sequence of ``num_tokens`` generated tokens, calls the
            estimator, the weights and ``backward``. Tensors have the dtypes of the training. One
            whose address is no multiple of 16 bytes, such as ``x[1:]``, needs a variant of its own,
            so ``step`` slices where the training does.
        sizes: Numbers of tokens. The default has one for each way in which kernels cut their work.

    Returns:
        Number of variants that were compiled, by name of the kernel; empty if all were known, and
        for implementations without Triton. Variants in Triton's cache on disk count too.

    Raises:
        RuntimeError: While a CUDA graph is captured.

    Cost: two calls of ``step``, and about a second for each variant that is not on disk. Waits for
    the device.

    Example:
        >>> from trajpack.kernels import prewarm, segment_sum
        >>> def step(num_tokens):
        ...     segments = torch.tensor([0, num_tokens], dtype=torch.int32)
        ...     segment_sum(torch.zeros(num_tokens), segments)
        >>> prewarm(step)  # on the host torch runs
        {}
    """
    on_device = torch.cuda.is_available()
    if on_device:
        current = torch.device("cuda", torch.cuda.current_device())
        check_not_captured("prewarm", current, "call it before the capture")
    compiled: Counter[str] = Counter()
    with _compilations_in(compiled) if HAS_TRITON else nullcontext():
        for size in sizes:
            step(size)
    if on_device:
        torch.cuda.synchronize()
    return dict(compiled)


@contextmanager
def _compilations_in(compiled: Counter[str]) -> Iterator[None]:
    """Count in ``compiled`` what Triton compiles, by name of the kernel."""
    from triton import knobs

    before = knobs.runtime.jit_post_compile_hook

    def count(*, fn: Any, **compilation: Any) -> bool | None:
        compiled[fn.name] += 1
        return None if before is None else before(fn=fn, **compilation)

    knobs.runtime.jit_post_compile_hook = count
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = before
