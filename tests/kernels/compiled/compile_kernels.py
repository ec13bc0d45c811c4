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
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

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
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trajpack import TrajectoryBuffer

TARGETS = (
    GPUTarget("cuda", 80, 32),
    GPUTarget("cuda", 90, 32),
    GPUTarget("hip", "gfx942", 64),
    GPUTarget("cuda", 100, 32),
)


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
            "launches_on_meta": measure_launches_on_meta(launches),
        }
        if variants == "every":
            target = TARGETS[1]
            measured["scans"] = measure_variants(len(TARGETS) + 5, target, some_scans())
    print(json.dumps(measured, indent=1))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
