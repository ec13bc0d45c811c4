"""Block shapes of the kernels, by architecture: data, each with its reason.

To tune a kernel for an architecture, give it a row here. No shape has been measured on hardware:
the reasons are counts from compiled code (Triton 3.6 to 3.9) and arithmetic. Registers are the
maximum of a thread on sm_80 and sm_90, which ``tests/kernels/compiled/test_compiled.py`` asserts.
An SM of sm_80 to sm_100 has 65,536 registers, allocated to warps by 8 per thread; a SIMD of gfx942
has 512 per lane. "Requests" are the bytes of all loads that the threads of an SM make for one tile
each; at 4.3 TB/s an H200 needs about 11.4 KB in flight on each SM.

The block of a scan fixes the order of its sums, so it is the same on every architecture.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from trajpack.kernels.runs import TILE

DEFAULT = "default"
"""Architectures without a row of their own."""


class BlockShape(NamedTuple):
    """Elements and threads of one program of a kernel."""

    block: int
    """Elements of a program's tile; entries of a block for scans."""
    threads: int
    reason: str
    most_registers: int | None = None
    """Limit of a thread's registers for the compiler; CUDA only."""


class Launch(NamedTuple):
    """Shape of a launch."""

    block: int
    options: dict[str, int | bool]
    """``num_warps`` and other keywords of a Triton launch."""


SHAPES: dict[str, dict[str, BlockShape]] = {
    "build_kernel": {
        DEFAULT: BlockShape(
            TILE,
            256,
            "4 tokens a thread: one 16-byte store of an int32 field, two of an int64 field. 48 "
            "registers: 1,280 threads on an SM request 40 KB. Without the limit some versions take "
            "56; with it none spills. 8 tokens a thread take 96 registers; 512 x 128 is as good, "
            "for twice the searches.",
            most_registers=48,
        )
    },
    "gather_fields_kernel": {
        DEFAULT: BlockShape(
            TILE,
            256,
            "4 units a thread. 32 registers: 2,048 threads fill an SM and request 8 KB (bytes) to "
            "64 KB (8-byte units). 1,024 x 128 takes 54 on sm_80.",
        )
    },
    "gather_words_kernel": {
        DEFAULT: BlockShape(
            1024,
            128,
            "8 words a thread. 56 registers: 1,152 threads on an SM request 36 KB of int32. 256 "
            "threads take 30 and request 32 KB; 2,048 x 128 takes 108.",
        )
    },
    "select_tokens_kernel": {
        DEFAULT: BlockShape(
            TILE,
            256,
            "4 tokens a thread, field after field. 40 registers: 1,536 threads on an SM. The "
            "fields of a micro-batch alone, 30 bytes a token, request 180 KB.",
        )
    },
    "group_advantages_kernel": {
        DEFAULT: BlockShape(
            128,
            32,
            "A warp a group, 4 members a thread: sums need no barrier, and a group of up to 128 "
            "is one round of each pass.",
        )
    },
    "group_advantages_kernel, long": {
        DEFAULT: BlockShape(2048, 256, "8 members a thread: an SM has one such group or two.")
    },
    "credit_scan": {
        DEFAULT: BlockShape(
            256,
            32,
            "A warp with 8 entries a thread: 2 KB of loads for GAE, scans are shuffles, and four "
            "sequences of 64 tokens lie side by side.",
        )
    },
    "wide_scan": {
        DEFAULT: BlockShape(
            256,
            32,
            "As credit_scan, for V-trace and along turns. Without the limit ptxas aims at 168 "
            "registers, and spills.",
            most_registers=255,
        )
    },
    "scores_kernel": {
        DEFAULT: BlockShape(128, 128, "One trajectory a thread, of a few turns each."),
    },
    "sum_slots_kernel": {DEFAULT: BlockShape(256, 32, "A warp, so sums are shuffles.")},
    "weigh_kernel": {
        DEFAULT: BlockShape(
            1024,
            256,
            "4 tokens a thread: 36 bytes of loads, one 16-byte store. 122 registers: 512 threads "
            "of an SM request 18 KB.",
        )
    },
    "loss_weights": {
        DEFAULT: BlockShape(
            1024,
            256,
            "4 tokens a thread: one 16-byte store. 40 registers: 1,536 threads on an SM request "
            "30 KB of ids and masks.",
        )
    },
    "spread_kernel": {
        DEFAULT: BlockShape(512, 32, "A warp with 16 tokens a thread: less search for each.")
    },
    "logit_statistics": {
        DEFAULT: BlockShape(
            1024,
            128,
            "8 logits a thread: one load of 16 bytes where they have two bytes each. A row of "
            "16,384 is 16 rounds.",
        )
    },
    "segment_reduce": {
        DEFAULT: BlockShape(
            32,
            128,
            "A row of 32 lanes is a warp with 8 successive loads a thread. 48 registers: 1,280 "
            "threads on an SM request 40 KB of float32.",
        )
    },
    "whiten": {
        DEFAULT: BlockShape(
            4096,
            256,
            "16 entries a thread: 80 bytes of float32 and mask, four stores of 16; one block "
            "requests 20 KB. 128 threads take up to 234 registers.",
        )
    },
} | {
    f"{kernel}, elements of {size}": {
        DEFAULT: BlockShape(
            block,
            128,
            f"{stores} a thread; 64 to 128 registers. Half as much a thread fits twice the threads "
            "on an SM, for narrower stores or twice the searches.",
        )
    }
    for kernel in ("pad_kernel", "unpad_kernel")
    for size, (block, stores) in {
        1: (2048, "16 bytes in one store"),
        2: (1024, "16 bytes in one store"),
        4: (1024, "32 bytes in two stores"),
        8: (1024, "64 bytes in four stores"),
    }.items()
}
"""Shapes by kernel and architecture."""


def architecture_of(device: int) -> str:
    """Return the name of a device's architecture, ``"sm_90"`` or ``"gfx942"``; -1 is the host."""
    if device < 0:
        return DEFAULT
    if torch.version.hip:
        name = str(torch.cuda.get_device_properties(device).gcnArchName)
        return name.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def block_shape(kernel: str, architecture: str) -> BlockShape:
    """Return the row of ``kernel`` for ``architecture``, else the default row."""
    rows = SHAPES[kernel]
    return rows.get(architecture, rows[DEFAULT])


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
    return Launch(shape.block, options)
