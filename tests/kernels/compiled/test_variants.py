"""A call compiles what it needs once: no size of its inputs asks for another variant of a kernel.

So a step that ran once compiles nothing when sequences have other lengths, nor in the capture of a
CUDA graph. Triton makes a variant for an integer of 1, one for multiples of 16, one for all
others and one for int64, of every integer that a kernel does not exclude.
"""

from __future__ import annotations

import inspect
from typing import Any

from tests.kernels.compiled.test_compiled import KERNELS
from tests.kernels.conftest import builds
from trajpack import kernels

PARTS = {"gae, gradient": 2, "discounted_returns, gradient": 2, "split and merge": 2}
PARTS |= {"whiten": 2, "whiten, large": 2, "GiGPO, group_advantages_kernel": 2}
PARTS |= {
    f"{operator}, segment_reduce_kernel": 2
    for operator in (
        "segment_sum", "segment_mean, masked", "segment_max, bounded", "segment_sum, large"
    )
}  # fmt: skip
"""Operators that launch a kernel for two things: a scan and its gradient, a micro-batch and
the batch that is merged, whitening by moments of one chunk and of several, groups of trajectories
and of turns, whole segments and parts of chunks. All others launch it for one."""
LONGEST = 4096
"""Most entries of a scan by one launch; above it the kernel is another variant."""
SHARED = {"moments_kernel"}
"""Kernels of which two parts may launch the same variant, or one part none."""


@builds("90")
def test_no_size_asks_for_a_variant_of_its_own(compiled: Any) -> None:
    for operator, of_kernels in compiled["sizes"].items():
        assert of_kernels, operator
        for kernel, variants in of_kernels.items():
            if operator != "planted":
                regimes = {min(sizes) > LONGEST for sizes in variants}
                for sizes in variants if kernel == "scan_kernel" and len(regimes) > 1 else ():
                    assert max(sizes) <= LONGEST or min(sizes) > LONGEST, (operator, variants)
                scans = len(regimes) if kernel == "scan_kernel" else 1
                parts_of = PARTS.get(f"{operator}, {kernel}", PARTS.get(operator, 1))
                most = parts_of * scans
                parts = {1, most} if kernel in SHARED else {most}
                assert len(variants) in parts, (operator, kernel, variants)


@builds("90")
def test_variants_by_size_would_be_noticed(compiled: Any) -> None:
    (variants,) = compiled["sizes"]["planted"].values()
    assert [sizes[0] for sizes in variants] == [1, 2, 16]


@builds("90")
def test_every_kernel_and_every_operator_is_called(compiled: Any) -> None:
    sizes = compiled["sizes"]
    called = {kernel for of_kernels in sizes.values() for kernel in of_kernels}
    assert called - {"sized_kernel"} == KERNELS.keys()
    operators = {operator.partition(",")[0] for operator in sizes}
    for name in kernels.__all__:
        operator = getattr(kernels, name)
        if callable(operator) and "impl" in inspect.signature(operator).parameters:
            assert name in operators
