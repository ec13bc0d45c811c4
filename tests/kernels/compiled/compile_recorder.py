"""A driver that replaces a GPU's: it serves CPU tensors and launches nothing. Planted kernels.

The planted kernels have a fault each, which the assertions on compiled code must notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from trajpack.kernels import launches
from trajpack.kernels.corrections.importance_weights_triton import merge_kernel, weigh_kernel
from trajpack.kernels.corrections.loss_weights_triton import share_kernel, slot_shares_kernel
from trajpack.kernels.corrections.slots_triton import sum_slots_kernel
from trajpack.kernels.credit.turns_triton import scores_kernel, spread_kernel
from trajpack.kernels.fields.build_triton import build_kernel
from trajpack.kernels.fields.gather_fields_triton import gather_fields_kernel
from trajpack.kernels.groups.group_advantages_triton import (
    group_advantages_kernel,
)
from trajpack.kernels.logprobs.logit_statistics_triton import fold_kernel, slope_kernel
from trajpack.kernels.rearrange.pad_triton import pad_kernel, unpad_kernel
from trajpack.kernels.rearrange.select_tokens_triton import select_tokens_kernel
from trajpack.kernels.reduce.whiten_triton import moments_kernel, whiten_kernel
from trajpack.kernels.scan.credit_scan_triton import effects_kernel, scan_kernel

KERNELS = (
    build_kernel,
    effects_kernel,
    scan_kernel,
    gather_fields_kernel,
    group_advantages_kernel,
    pad_kernel,
    unpad_kernel,
    scores_kernel,
    select_tokens_kernel,
    spread_kernel,
    moments_kernel,
    whiten_kernel,
    sum_slots_kernel,
    weigh_kernel,
    merge_kernel,
    share_kernel,
    slot_shares_kernel,
    fold_kernel,
    slope_kernel,
)


@triton.jit(do_not_specialize=["num_tokens"])
def masked_kernel(source, out, num_tokens, BLOCK: tl.constexpr):
    """Planted: stores behind a mask of unknown alignment."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    tl.store(out + token, tl.load(source + token, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["begin"])
def hinted_kernel(source, out, begin, BLOCK: tl.constexpr):
    """Planted: promises an alignment that only some runs have."""
    token = tl.arange(0, BLOCK)
    tl.store(out + token, tl.load(tl.multiple_of(source + begin + token, 16)))


@triton.jit(do_not_specialize=["begin"])
def shuffled_kernel(source, out, begin, BLOCK: tl.constexpr):
    """Planted: a copy that hands its tokens from lane to lane, and waits for all of them."""
    token = tl.arange(0, BLOCK)
    tl.store(out + token, tl.cumsum(tl.load(source + begin + token), 0))


@triton.jit(do_not_specialize=["begin"])
def crowded_kernel(source, out, begin, BLOCK: tl.constexpr):
    """Planted: more values alive at once than the launch allows registers."""
    token = tl.arange(0, BLOCK)
    word = tl.load(source + begin + token)
    for _ in range(begin):
        word = tl.load(source + word)
    tl.store(out + token, word)


PLANTED = (masked_kernel, hinted_kernel, shuffled_kernel, crowded_kernel)


class Recorder:
    """A driver that serves CPU tensors, for ``target``, and launches nothing."""

    def __init__(self, target: GPUTarget, device: int) -> None:
        self.target, self.device, self.launches = target, device, []
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device  # Triton keeps compiled kernels apart by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 64 * 1024}

    def load_binary(self, *_: Any) -> tuple[object, int, int, int, int]:
        return object(), 0, 0, 0, 1024

    def unload_module(self, _: object) -> None:
        pass

    def launcher_cls(self, source: ASTSource, _: Any) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            named = dict(zip(source.fn.arg_names, arguments[9:], strict=True))
            grid = list(arguments[:3])
            self.launches.append({"kernel": source.fn.__name__, "grid": grid, "arguments": named})

        return launch

    def variants(self) -> list[Any]:
        caches = [kernel.device_caches[self.device][0] for kernel in (*KERNELS, *PLANTED)]
        return [compiled for cache in caches for compiled in cache.values()]


def architecture(target: GPUTarget) -> str:
    """Return a target's name as the table of block shapes has it."""
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


@contextmanager
def recording(target: GPUTarget, device: int) -> Iterator[Recorder]:
    """Launch on ``target``, with the block shapes that it has; keep apart what is compiled."""
    recorder = Recorder(target, device)
    driver.set_active(recorder)
    real = launches.architecture_of
    launches.architecture_of = lambda _: architecture(target)
    launches.launch_on.cache_clear()
    try:
        yield recorder
    finally:
        launches.architecture_of = real
        launches.launch_on.cache_clear()
