"""Block shapes of the kernels, by architecture: data, each with its reason.

To tune a kernel for an architecture is to give it a row here. None of these shapes has been
measured on hardware: the reasons are counts from compiled code (Triton 3.6 to 3.9) and
arithmetic. Registers are the most that a thread takes on sm_80 and sm_90, which
``tests/kernels/compiled/test_compiled.py`` asserts. An SM of sm_80 to sm_100 has 65,536 of them,
given out to warps by 8 for each thread; a SIMD of gfx942 has 512 for each lane.

KB asked for are the bytes of all loads that the threads of an SM make for one tile each. How many
of those loads are under way together is up to the compiler, and no test asserts it: a thread of a
float32 segment sum has 8 in a row, of which Triton 3.6 and 3.7 issue two before they wait for the
first, 3.9 seven. At 4.3 TB/s an H200 wants about 11.4 KB under way on each SM.

The shape of a scan settles the order of its sums, so it is fixed for an architecture; results
are the same bits in every run on one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from trajpack.kernels.runs import TILE

DEFAULT = "default"
"""Architectures without a row of their own."""


class BlockShape(NamedTuple):
    """How much one program of a kernel does, and with how many threads."""

    block: int
    """Elements of a program's tile; entries of a row's block for scans."""
    threads: int
    reason: str
    most_registers: int | None = None
    """Registers of a thread at most, where the compiler has to be told; CUDA only."""


@dataclass(frozen=True)
class Launch:
    """A shape as a launch takes it."""

    block: int
    options: dict[str, int | bool]
    """``num_warps`` and what else Triton is told by keyword."""


OF_ROWS = (
    "Half as much of a thread fits 1,024 threads or more on an SM, which ask for as much, in "
    "narrower stores or with twice the searches. Not measured on hardware."
)
SHAPES: dict[str, dict[str, BlockShape]] = {
    "build_kernel": {
        DEFAULT: BlockShape(
            TILE,
            256,
            "4 tokens of a thread: one 16-byte store of an int32 field, two of an int64 field. "
            "48 registers, so 1,280 threads on an SM, which ask for 32 bytes of gathered words "
            "each: 40 KB. 8 tokens of a thread (1,024 x 128, 2,048 x 256) take 96 registers and "
            "leave 640 threads; 512 x 128 is as good, for twice the searches. Not measured on "
            "hardware.",
        )
    },
    "gather_fields_kernel": {
        DEFAULT: BlockShape(
            TILE,
            256,
            "4 units of a thread. 32 registers, so an SM is full: 2,048 threads, which ask for 8 "
            "KB (bytes) to 64 KB (8-byte units). 1,024 x 128 takes 54 on sm_80. Not measured on "
            "hardware.",
        )
    },
    "gather_words_kernel": {
        DEFAULT: BlockShape(
            1024,
            128,
            "8 words of a thread. 56 registers, so 1,152 threads on an SM, which ask for 36 KB of "
            "int32. 256 threads take 30 and fill an SM, which is 32 KB; 2,048 x 128 takes 108. "
            "Not measured on hardware.",
        )
    },
    "select_tokens_kernel": {
        DEFAULT: BlockShape(
            TILE,
            256,
            "4 tokens of a thread, all fields one after another. 40 registers, so 1,536 threads on "
            "an SM. A micro-batch's own fields alone are 30 bytes of a token: 180 KB asked for, "
            "field after field. Not measured on hardware.",
        )
    },
    "group_advantages_kernel": {
        DEFAULT: BlockShape(
            64,
            256,
            "4 pairs of a group and a member of a thread in the tile of 16 groups, with up to four "
            "float64 sums each: 128 registers, so 512 threads on an SM. Tiles of 128 take 160 to "
            "184, which leaves 256. Left to itself, ptxas spills to fit in one more block. Not "
            "measured on hardware.",
            most_registers=128,
        )
    },
    "credit_scan": {
        DEFAULT: BlockShape(
            512,
            128,
            "4 entries of a thread, 36 bytes or more of loads. Left to itself, ptxas takes up to "
            "128 registers to walk, and spills one of some variants to fit in one more block. Held "
            "to 96, five blocks fit an SM, which ask for 23 KB; some walks of V-trace then spill, "
            "on Triton 3.9 that of its default observation too: "
            "tests/kernels/compiled/scan_spills.json has which, and how much. Blocks of 1,024 idle "
            "twice as many lanes: a quarter of them on sequences of 2,000 tokens. Not measured "
            "on hardware.",
            most_registers=96,
        )
    },
    "scores_kernel": {
        DEFAULT: BlockShape(
            128,
            128,
            "A trajectory of a thread: a few turns each. Not measured on hardware.",
        )
    },
    "spread_kernel": {
        DEFAULT: BlockShape(
            4096,
            256,
            "A chunk of whitening, whose moments it leaves: 16 tokens of a thread. 128 registers, "
            "so 512 threads on an SM. Left to itself, ptxas spills a register to fit in one more "
            "block, hence the limit. Not measured on hardware.",
            most_registers=128,
        )
    },
    "discounted_returns": {
        DEFAULT: BlockShape(
            32,
            128,
            "2 entries of a thread in the tile of 8 rows. 96 registers, so 640 threads on an SM. "
            "Left to itself, ptxas spills a register or two to fit in one more block, hence the "
            "limit. 64 threads take all 128; 256 take 40 to 62, for twice the warps that each "
            "scan waits for. Not measured on hardware.",
            most_registers=128,
        ),
        "gfx942": BlockShape(
            32,
            256,
            "Four waves, one entry of a thread: 64 registers; 128 threads take 40 to 77. Not "
            "measured on hardware.",
        ),
    },
    "segment_reduce": {
        DEFAULT: BlockShape(
            32,
            128,
            "A row of 32 lanes is a warp, and 8 loads of a thread follow each other. 40 registers, "
            "so 1,536 threads on an SM, which ask for 48 KB of float32. Not measured on hardware.",
        )
    },
    "whiten": {
        DEFAULT: BlockShape(
            4096,
            256,
            "16 entries of a thread: 80 bytes of float32 and its mask, and four stores of 16. 112 "
            "registers, so 512 threads on an SM, which ask for 40 KB. 128 threads take up to 234; "
            "512 take about 60, for as many entries on an SM and twice the warps in each sum. Not "
            "measured on hardware.",
        )
    },
} | {
    f"{kernel}, elements of {size}": {DEFAULT: BlockShape(block, 128, f"{reason} {OF_ROWS}")}
    for kernel in ("pad_kernel", "unpad_kernel")
    for size, (block, reason) in {
        1: (2048, "16 bytes of a thread, one store: 128 registers, so 8 KB asked for."),
        2: (1024, "16 bytes of a thread, one store: 64 registers, so 16 KB asked for."),
        4: (1024, "32 bytes of a thread, two stores: 64 registers, so 32 KB asked for."),
        8: (1024, "64 bytes of a thread, four stores: 64 registers, so 64 KB asked for."),
    }.items()
}
"""By kernel and architecture. The three kernels of discounted returns share theirs: their sums
must be made in the same order."""


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
    """Return the row of ``kernel`` for ``architecture``.

    Raises:
        KeyError: If there is no such kernel.

    Example:
        >>> block_shape("build_kernel", "sm_90").block
        1024
    """
    rows = SHAPES[kernel]
    return rows.get(architecture, rows[DEFAULT])


@cache
def launch_on(kernel: str, device: int) -> Launch:
    """Return how ``kernel`` is launched on a device: its ``torch.Tensor.get_device()``.

    Asked once for each device; from then on a lookup of about 0.1 µs.
    """
    architecture = architecture_of(device)
    shape = block_shape(kernel, architecture)
    is_amd = architecture.startswith("gfx")
    wave = 64 if architecture.startswith("gfx9") else 32
    options: dict[str, int | bool] = {"num_warps": shape.threads // wave, "enable_fp_fusion": False}
    if shape.most_registers is not None and not is_amd:
        options["maxnreg"] = shape.most_registers
    return Launch(shape.block, options)
