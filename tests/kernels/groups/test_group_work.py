"""Group statistics cost the device work that grows with the members alone."""

from __future__ import annotations

import torch

from tests.ptx.executor import on_executor
from trajpack.kernels import group_advantages


def instructions(members: int) -> int:
    """Return the instructions of a warp for groups of 16 whose members are scattered."""
    ids = torch.arange(members) % (members // 16)
    scores = torch.linspace(0, 1, members).square()
    options = {"num_groups": members // 16}
    expected = group_advantages(scores, ids, **options, impl="torch")
    with on_executor(counts=True) as executor:
        found = group_advantages(scores, ids, **options, impl="triton")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    return executor.reports["group_advantages_kernel"].warp_instructions


def test_twice_the_members_are_twice_the_instructions() -> None:
    few, more, most = (
        instructions(members) for members in (1024, 2048, 4096)
    )  # may be one group: two launches
    assert 1.9 < more / few < 2.1
    assert 1.9 < most / more < 2.1
