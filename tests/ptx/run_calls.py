"""Execute every kernel that one version of Triton compiles for one architecture.

It runs in a process of its own, since a process has one Triton: ``python -m tests.ptx.run_calls
sm_80``. It prints the version and the kernels as JSON.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import triton

from tests.gpu.checks import compared
from tests.ptx.calls import Drawn, every_call
from tests.ptx.executor import on_executor

LENGTHS = np.array([5, 1, 700, 64, 33, 4200])
"""Segments of one program, of several, and of several launches."""


def main() -> None:
    arch = int(sys.argv[1].removeprefix("sm_"))
    with on_executor(arch) as executor:
        pairs = zip(every_call(Drawn(LENGTHS)), every_call(Drawn(LENGTHS)), strict=True)
        for (name, on_host), (_, on_device) in pairs:
            try:
                compared(on_host, on_device)
            except Exception as error:
                error.add_note(f"call: {name}")
                raise
    found = {"version": triton.__version__, "kernels": sorted(set(executor.launched))}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
