"""Executes compiled group statistics; prints instructions of a warp for each number of members.

It runs in a process of its own, in which Triton compiles.
"""

from __future__ import annotations

import json

import torch

from tests.ptx.executor import on_executor
from trajpack.kernels import group_advantages

MEMBERS = (512, 1024, 2048)


def instructions(members: int) -> int:
    """Compare groups of 16 whose members are scattered, and check the values."""
    ids = torch.arange(members) % (members // 16)
    scores = torch.linspace(0, 1, members).square()
    options = {"num_groups": members // 16}
    expected = group_advantages(scores, ids, **options, impl="torch")
    with on_executor(90, counts=True) as executor:
        found = group_advantages(scores, ids, **options, impl="triton")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    return executor.reports["group_advantages_kernel"].warp_instructions


if __name__ == "__main__":
    print(json.dumps([instructions(members) for members in MEMBERS]))  # noqa: T201
