"""``TRITON_INTERPRET=1`` runs the kernels on CPU tensors."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
from trajpack.kernels import discounted_returns
rewards, ends = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 3], dtype=torch.int32)
print(discounted_returns(rewards, ends, 0.5, impl="triton").tolist())
"""


def test_a_kernel_runs_on_the_host_without_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[0] == "[2.0, 2.0, 4.0]"
