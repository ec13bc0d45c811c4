"""Compiles and launches the kernels without a GPU; prints its measurements as JSON.

It runs in a process of its own: Triton decides between its interpreter and its compiler when a
kernel is decorated, and a process has one Triton. The launchers of trajpack run unchanged on CPU
tensors. A driver that only records replaces the GPU's, so Triton specialises and compiles exactly
as it would there.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch
import triton
from compile_launches import (
    Launches,
    demanding_launches,
    launches_of_every_scan,
    launches_of_every_variant,
    launches_of_planted,
)
from compile_machine_code import measure
from compile_recorder import recording
from compile_sizes import variants_of_sizes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trajpack import Trajectory, TrajectoryBuffer, Turn
from trajpack.kernels.scan.credit_scan_triton import credit_scan_forward
from trajpack.kernels.scan.scan_inputs import Scan
from trajpack.packing.plan.plan import plan_micro_batches

TARGETS = (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64))


def measure_variants(device: int, target: GPUTarget, launches: Launches) -> list[dict[str, Any]]:
    """Measure variants for one target; ``device`` keeps it apart from other targets."""
    labels, kernels = [], []
    with recording(target, device) as recorder:
        for inputs, launch in launches:
            before = {id(variant) for variant in recorder.variants()}
            launch()
            new = [variant for variant in recorder.variants() if id(variant) not in before]
            assert new, f"{inputs}: compiled before"
            labels += [inputs] * len(new)
            kernels += new
            if target.backend == "hip" and inputs != "planted":
                labels += [f"{inputs}, past 2 GiB"] * len(new)
                kernels += map(far, new)
    measured = measure(kernels)
    return [{"inputs": label} | found for label, found in zip(labels, measured, strict=True)]


def far(kernel: Any) -> Any:
    """Compile as for tensors whose offsets need more than 32 bits."""
    attributes = {
        place: [pair for pair in pairs if pair[0] != "tt.pointer_range"]
        for place, pairs in kernel.src.attrs.items()
    }
    source = ASTSource(kernel.src.fn, kernel.src.signature, kernel.src.constants, attributes)
    options = {name: getattr(kernel.metadata, name) for name in ("num_warps", "enable_fp_fusion")}
    return triton.compile(source, target=kernel.metadata.target, options=options)


def ragged_trajectory(name: str, num_turns: int) -> Trajectory:
    """Turns of 2 to 40 new tokens, each prompt the conversation so far."""
    turns, seen = [], [1]
    for index in range(num_turns):
        new = (len(name) + index) * 7 % 20 + 1
        turns.append(Turn([*seen, 2], [3] * new, [-0.5] * new))
        seen = [*seen, 2, *[3] * new][-40:]  # forgets, so that chains break too
    return Trajectory(name, turns)


def measure_launches() -> Iterator[dict[str, Any]]:
    with recording(GPUTarget("cuda", 90, 32), len(TARGETS)) as recorder:
        cases = [(0, 0), (1, 5), (10, 5), (16, 1), (1000, 5)]
        cases += [(1, num_turns) for num_turns in (1, 15, 16, 17, 400)]
        for num_trajectories, num_turns in cases:
            buffer = TrajectoryBuffer(device="cpu")
            for index in range(num_trajectories):
                buffer.add(ragged_trajectory("t" * (index + 1), num_turns))
            for layout in ("merged", "turns"):
                recorder.launches.clear()
                batch = buffer.pack(layout=layout, impl="triton")
                yield {
                    "layout": layout,
                    "num_trajectories": num_trajectories,
                    "num_turns": num_turns * num_trajectories,
                    "num_tokens": batch.num_tokens,
                    "launches": [[done["kernel"], done["grid"]] for done in recorder.launches],
                    "field_bytes": [
                        done["arguments"]["memory"].nbytes
                        for done in recorder.launches
                        if "memory" in done["arguments"]
                    ],
                    "variants": len(recorder.variants()),
                }


def measure_returns() -> Iterator[dict[str, Any]]:
    """Return what is launched for entries in segments under a bound, and with which options."""
    with recording(GPUTarget("cuda", 90, 32), len(TARGETS) + 2) as recorder:
        cu_seqlens = torch.zeros(4, dtype=torch.int32)
        for entries, bound in ((4096, None), (8193, None), (8193, 4096), (8193, 4097), (0, None)):
            recorder.launches.clear()
            rewards = torch.zeros(entries)
            scan = Scan(cu_seqlens, rewards, kind="returns", max_seqlen=bound)
            credit_scan_forward(scan)
            launches = [(done["kernel"], done["grid"][0]) for done in recorder.launches]
            yield {"entries": entries, "max_seqlen": bound, "launches": launches}


def measure_micro_batches() -> Iterator[dict[str, Any]]:
    """Return what is launched for the micro-batches of a plan."""
    buffer = TrajectoryBuffer(device="cpu")
    for index in range(120):
        buffer.add(ragged_trajectory("t" * (index + 1), 5))
    batch = buffer.pack(layout="turns")
    with recording(GPUTarget("cuda", 90, 32), len(TARGETS) + 3) as recorder:
        for capacity in (100_000, 3000, -(-batch.num_tokens // 10)):
            recorder.launches.clear()
            plan = plan_micro_batches(batch.seqlens, capacity, algorithm="next_fit")
            micro_batches = batch.split(plan, impl="triton")
            yield {
                "tokens": [micro_batch.num_tokens for micro_batch in micro_batches],
                "launches": [[done["kernel"], done["grid"]] for done in recorder.launches],
                "variants": len(recorder.variants()),
            }


def measure_launches_on_meta(launches_of_variants: Callable[..., Launches]) -> dict[str, Any]:
    """Launch on tensors without values; a launcher that reads one raises."""
    with recording(GPUTarget("cuda", 90, 32), len(TARGETS) + 1) as recorder:
        launchers = [launch for _, launch in launches_of_variants("meta")]
        for launch in launchers:
            launch()
        kernels = Counter(done["kernel"] for done in recorder.launches)
        return {"launchers": len(launchers), "launches": kernels}


def refusal() -> str:
    """Ask for Triton where no driver serves CPU tensors."""
    buffer = TrajectoryBuffer(device="cpu")
    try:
        buffer.pack(impl="triton")
    except RuntimeError as error:
        return str(error)
    return ""


def some_scans() -> Launches:
    """Yield every 29th launch, of one kernel and of two in turn."""
    return islice(launches_of_every_scan(), 0, None, 29)


def main(variants: str, *targets: str) -> None:
    """Measure ``every`` variant or the ``demanding`` ones for some of the targets.

    What is launched, and how often, is measured beside sm_90, as are some scans if ``every``
    variant is. Or measure all ``scans`` for one target, and nothing else.
    """
    asked = [pair for pair in enumerate(TARGETS) if str(pair[1].arch) in targets]
    if variants == "scans":
        ((device, target),) = asked
        found = measure_variants(device, target, launches_of_every_scan())
        print(json.dumps({"variants": found}))  # noqa: T201
        return
    launches = {"every": launches_of_every_variant, "demanding": demanding_launches}[variants]
    measured: dict[str, Any] = {"triton": triton.__version__, "refusal": refusal(), "variants": []}
    for device, target in asked:
        planned = chain(launches(), launches_of_planted(target.backend))
        measured["variants"] += measure_variants(device, target, planned)
    if "90" in targets:
        measured |= {
            "launches": list(measure_launches()),
            "returns": list(measure_returns()),
            "micro_batches": list(measure_micro_batches()),
            "launches_on_meta": measure_launches_on_meta(launches),
            "sizes": variants_of_sizes(len(TARGETS) + 4),
        }
        if variants == "every":
            target = TARGETS[1]
            measured["scans"] = measure_variants(len(TARGETS) + 5, target, some_scans())
    print(json.dumps(measured, indent=1))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
