"""Counts of every kernel on small workloads A, B and C, by executing its compiled PTX.

``PYTHONPATH=src python -m tests.ptx.counts`` counts anew, and writes ``counts.json`` beside this
file and the page ``docs/benchmarks/traffic.md``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

from benchmarks.workloads import lengths_a, lengths_b, lengths_c, single_turns
from tests.ptx.executor import Report, on_executor
from trajpack import GRPO, TrajectoryBuffer
from trajpack.kernels import (
    Correction,
    discounted_returns,
    gae,
    importance_weights,
    loss_weights,
    pad,
    segment_sum,
    select_tokens,
    unpad,
    whiten,
)

ROOT = Path(__file__).parents[2]
COUNTS = Path(__file__).with_name("counts.json")
PAGE = ROOT / "docs" / "benchmarks" / "traffic.md"
ARCH = 90
WORKLOADS = {"A": lengths_a(1 / 256), "B": lengths_b(1 / 32), "C": lengths_c(1 / 256)}
COLUMNS = {
    "programs": "programs",
    "instructions": "instructions a token",
    "read": "bytes read a token",
    "written": "bytes written a token",
    "load_sectors": "sectors a load",
    "load_ideal": "at best",
    "store_sectors": "sectors a store",
    "store_ideal": "at best",
}
INTRODUCTION = """# Memory traffic of the kernels

The numbers are counted by executing the PTX that Triton {version} compiles for sm_{arch} on CPU
tensors (`tests/ptx/`). No GPU took part. `make test` fails when a number becomes worse by more than
a tenth. `PYTHONPATH=src python -m tests.ptx.counts` writes this page.

The workloads are small copies of those of the benchmarks: A has {A} sequences of 50 to 4,000
tokens, B {B} of 32,768, C {C} of 1 to 64. Instructions are PTX instructions of a warp times 32.
Bytes read and written are the distinct sectors of 32 bytes that a launch touches: the least that
memory must move. Sectors a load or a store are those of one instruction of a warp, without a cache;
"at best" is the fewest that hold the bytes asked for.
"""

Job = Callable[[], Any]


def jobs(lengths: np.ndarray) -> Iterator[tuple[str, Job]]:
    """Yield the calls that are counted."""
    draw = torch.Generator().manual_seed(1)
    tokens, longest = int(lengths.sum()), int(lengths.max())
    bounds = np.r_[0, lengths.cumsum()]
    cu_seqlens = torch.from_numpy(bounds).int()
    rewards, values, third = (torch.randn(tokens, generator=draw) for _ in range(3))
    mask = torch.rand(tokens, generator=draw) < 0.7
    ids = torch.randint(0, 32000, (tokens,), generator=draw)
    owners = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).int()
    rates = {"gamma": 0.99, "lam": 0.95}
    yield "discounted_returns", lambda: discounted_returns(rewards, cu_seqlens, 0.99, impl="triton")
    yield "gae", lambda: gae(rewards, values, cu_seqlens, **rates, impl="triton")
    masked = {"loss_mask": mask, "max_seqlen": longest}
    yield (
        "gae, masked, longest known",
        lambda: gae(rewards, values, cu_seqlens, **rates, **masked, impl="triton"),
    )
    yield "pad", lambda: pad(ids, cu_seqlens, longest, value=-1, side="left", impl="triton")
    padded = pad(ids, cu_seqlens, longest, value=-1, side="left", impl="torch")
    yield "unpad", lambda: unpad(padded, cu_seqlens, tokens, side="left", impl="triton")
    table = np.zeros((3, len(lengths) + 1), np.int32)
    table[0] = np.r_[0, lengths[::-1].cumsum()]
    table[1, :-1], table[2, :-1] = bounds[:-1][::-1], lengths[::-1]
    taken, fills = torch.from_numpy(table), [0, 0.0, False]
    yield (
        "select_tokens",
        lambda: select_tokens([ids, rewards, mask], taken, tokens, fills, impl="triton"),
    )
    yield "segment_sum", lambda: segment_sum(rewards, cu_seqlens, impl="triton")
    yield "whiten", lambda: whiten(rewards, mask, impl="triton")
    logprobs, old = -rewards.abs(), -third.abs()
    yield (
        "importance_weights",
        lambda: importance_weights(logprobs, old, mask, Correction.tis(), impl="triton"),
    )
    by_segment = {"segments": cu_seqlens, "segment_ids": owners}
    yield (
        "importance_weights, by segment",
        lambda: importance_weights(
            logprobs, old, mask, Correction.mis(), **by_segment, impl="triton"
        ),
    )
    by_sequence = {"sequence_ids": owners, "num_sequences": len(lengths)}
    yield (
        "loss_weights",
        lambda: loss_weights("sequence_mean_token_mean", mask, **by_sequence, impl="triton"),
    )
    buffer = TrajectoryBuffer(device="cpu")
    trajectories = single_turns(lengths)
    buffer.extend(replace(one, group=str(i // 2)) for i, one in enumerate(trajectories))
    yield "pack", lambda: buffer.pack(layout="turns", impl="triton")
    batch = buffer.pack(layout="turns", impl="torch")
    yield "GRPO", lambda: batch.with_advantages(GRPO(), impl="triton")


def count() -> dict[str, dict[str, float]]:
    """Return the counts of each kernel by workload, call and kernel."""
    found = {}
    for workload, lengths in WORKLOADS.items():
        tokens = int(lengths.sum())
        for name, job in jobs(lengths):
            with on_executor(ARCH, checks=False, counts=True) as executor:
                job()
            for kernel, report in sorted(executor.reports.items()):
                found[f"{workload}: {name}: {kernel}"] = counted(report, tokens)
    return found


def counted(report: Report, tokens: int) -> dict[str, float]:
    """Return the counts of a kernel's launches, by the names of `COLUMNS`."""
    loads, stores = report.traffic["global", "load"], report.traffic["global", "store"]
    numbers = {
        "programs": report.programs,
        "instructions": report.warp_instructions * 32 / tokens,
        "read": report.touched["load"] / tokens,
        "written": report.touched["store"] / tokens,
        "load_sectors": loads.sectors / max(loads.requests, 1),
        "load_ideal": loads.ideal / max(loads.requests, 1),
        "store_sectors": stores.sectors / max(stores.requests, 1),
        "store_ideal": stores.ideal / max(stores.requests, 1),
    }
    return {name: round(number, 2) for name, number in numbers.items()}


def page(counts: dict[str, dict[str, float]], version: str) -> str:
    """Return the text of the page."""
    sizes = {name: f"{len(lengths):,}" for name, lengths in WORKLOADS.items()}
    lines = [INTRODUCTION.format(version=version, arch=ARCH, **sizes)]
    for workload in WORKLOADS:
        head = ["call", "kernel", *COLUMNS.values()]
        lines += [f"## Workload {workload}\n", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for key, numbers in counts.items():
            name, call, kernel = key.split(": ")
            if name == workload:
                cells = [call, f"`{kernel}`", *(f"{numbers[column]:,g}" for column in COLUMNS)]
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    counts = count()
    COUNTS.write_text(json.dumps(counts, indent=1) + "\n")
    PAGE.write_text(page(counts, triton.__version__))


if __name__ == "__main__":
    main()
