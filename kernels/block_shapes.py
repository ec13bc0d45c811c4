"""Block shapes of the kernels: data, each with its reason.

The reasons are counts from compiled code (Triton 3.6 to 3.9), arithmetic, and times on an H200.
Registers are the maximum of a thread on sm_80 to sm_100, which
``tests/kernels/compiled/test_compiled.py`` asserts (on sm_80 by `make variants`). An SM of sm_80 to
sm_100 has 65,536 registers, allocated to warps by 8 per thread. At 4.3 TB/s an H200 needs about
11.4 KB of loads in flight on each SM.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from trajpack.kernels.runs import TILE

DEFAULT = "default"
"""Architecture of the host."""


class BlockShape(NamedTuple):
    """Elements and threads of one program of a kernel."""

    block: int
    """Elements of a program's tile; entries of a block for scans."""
    threads: int
    most_registers: int | None = None
    """Limit of a thread's registers for the compiler; CUDA only."""


SHAPES = {
    # 4 tokens a thread: one store of 16 bytes for an int32 field. 48 registers: 1,280 threads of an
    # SM request 40 KB. Without the limit some versions take 56; with it none spills.
    "build_kernel": BlockShape(TILE, 256, most_registers=48),
    # 8 units a thread share its search: two thirds of the instructions of 4 units, with which extra
    # fields ran at 32 to 43 % of a copy on an H200. 64 registers: 1,024 threads of an SM request
    # 32 KB. Without the limit ptxas aims at fewer, and spills.
    "gather_fields_kernel": BlockShape(TILE, 128, most_registers=64),
    # 4 tokens a thread, field after field. 40 registers: 1,536 threads of an SM request 180 KB.
    "select_tokens_kernel": BlockShape(TILE, 256),
    # A thread a group of up to 16 members, which stay in its registers.
    "group_advantages_kernel, small": BlockShape(2048, 128),
    # A warp a group: sums need no barrier, and a group of up to 128 is one round of each pass.
    "group_advantages_kernel": BlockShape(128, 32),
    "group_advantages_kernel, long": BlockShape(2048, 256),
    # A warp with 8 entries a thread: scans are shuffles, and four sequences of 64 tokens lie side
    # by side. The block fixes the order of the sums, so it is the same on every architecture. With
    # the limit an SM holds 16 warps, not 12: a scan takes up to 28 % less time on an H200. With 96
    # it spills.
    "credit_scan": BlockShape(256, 32, most_registers=128),
    # V-trace, KL penalties, rates by segment, some observations. Without the limit ptxas
    # aims at 168 registers, and spills.
    "wide_scan": BlockShape(256, 32, most_registers=255),
    "scores_kernel": BlockShape(128, 128),  # one trajectory a thread, of a few turns
    # A warp, so sums are shuffles; of several tiles where there are many. With the limit 20 warps
    # of an SM request 46 KB; none spills. On an H200 17.3 µs on A and 14.5 on C; 1,024 tokens and
    # 64 threads take 17.5 and 40.6.
    "sum_slots_kernel": BlockShape(256, 32, most_registers=96),
    # Entries of many tokens, each often a slot of its own, which a warp takes one after another.
    "sum_slots_kernel, ends": BlockShape(32, 32),
    # 4 tokens a thread: 36 bytes of loads. 122 registers: 512 threads of an SM request 18 KB.
    "weigh_kernel": BlockShape(1024, 256),
    # 4 tokens a thread: one store of 16 bytes. 40 registers: 1,536 threads of an SM request 30 KB.
    "loss_weights": BlockShape(1024, 256),
    # 16 tokens a thread: less search for each. On an H200 13.4 µs on A and 14.0 on C; 1,024 tokens
    # and 128 threads take 19.7 and 16.9, 2,048 and 256 take 23.5 and 17.9.
    "spread_kernel": BlockShape(512, 32),
    # 8 logits a thread: one load of 16 bytes where they have two bytes each.
    "logit_statistics": BlockShape(1024, 128),
    # 16 entries a thread: a program requests 20 KB. 128 threads take up to 234 registers. The
    # block fixes the order of the sums.
    "whiten": BlockShape(4096, 256),
} | {
    # 16 to 64 bytes a thread, in stores of 16; 64 to 128 registers.
    f"{kernel}, elements of {size}": BlockShape(2048 if size == 1 else 1024, 128)
    for kernel in ("pad_kernel", "unpad_kernel")
    for size in (1, 2, 4, 8)
}
"""Shapes by kernel; ``"kernel on sm_100"`` is the shape for an architecture with one of its own.

A launch takes the shape of now after ``launch_on.cache_clear()``. Blocks of scans, of whitening and
of weights are constants of their modules.
"""


def architecture_of(device: int) -> str:
    """Return the name of a device's architecture, ``"sm_90"`` or ``"gfx942"``; -1 is the host."""
    if device < 0:
        return DEFAULT
    if torch.version.hip:
        name = str(torch.cuda.get_device_properties(device).gcnArchName)
        return name.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def block_shape(kernel: str, architecture: str = DEFAULT) -> BlockShape:
    """Return the shape of ``kernel`` for ``architecture``."""
    return SHAPES.get(f"{kernel} on {architecture}", SHAPES[kernel])
