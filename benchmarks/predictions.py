"""What is expected of a kernel on a device, to stand beside what is measured there.

Counted: bytes in distinct sectors that the executed kernels move for each token of a small copy of
the workload (``tests/ptx/counts.json``), at the rate of the copy that was measured in the contest.
Modelled: milliseconds on one H200 by a model of its multiprocessors (``modelled.json``).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from benchmarks import machine
from benchmarks.contest import Contest

CALLS = {
    "build": ("pack", "build_kernel"),
    "discounted_returns of token rewards": ("discounted_returns", ""),
    "gae of tokens": ("gae", ""),
    "gae of tokens, a third not generated": ("gae, masked, longest known", ""),
    "segment_sum of tokens": ("segment_sum", ""),
    "whiten tokens": ("whiten", ""),
    "importance weights of tokens": ("importance_weights", ""),
    "loss weights of sequences": ("loss_weights", ""),
}
"""The counted call of a job, and the kernel where not all of its kernels are the job's."""
COUNTED, MODELLED = "counted bytes at the rate of the copy", "modelled"


@cache
def _read(path: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(Path(machine.ROOT, path).read_text())
    return found


def predicted(contest: Contest, moved: tuple[int, int], copy_ms: float | None) -> dict[str, float]:
    """Return the expected milliseconds of ours by the kind of the expectation; often none."""
    name, found = contest.workload.partition(":")[0], {}
    call, kernel = CALLS.get(contest.job, ("", ""))
    counts = [
        numbers["read"] + numbers["written"]
        for key, numbers in _read("tests/ptx/counts.json").items()
        if key.startswith(f"{name}: {call}: {kernel}")
    ]
    if call and counts and copy_ms is not None:
        found[COUNTED] = copy_ms * sum(counts) * contest.tokens / sum(moved)
    modelled = _read("benchmarks/modelled.json").get(contest.job, {}).get(name)
    return found | ({} if modelled is None else {MODELLED: modelled})
