"""Whitening by the moments of all ranks: one all-reduce of what each rank sums up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from trajpack.kernels import whiten

RANK = """
import datetime
import sys

import torch
import torch.distributed as dist

from trajpack.kernels import moment_sums, whiten

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2,
    timeout=datetime.timedelta(seconds=60),
)
results = []
for x, mask, shift in torch.load(f"{folder}/inputs_{rank}.pt"):
    sums = moment_sums(x, mask, shift=shift)
    dist.all_reduce(sums)
    results.append(whiten(x, mask, sums=sums, shift=shift))
torch.save(results, f"{folder}/outputs_{rank}.pt")
dist.destroy_process_group()
"""


def shards() -> list[tuple[torch.Tensor, torch.Tensor, float, int]]:
    """Return entries, a mask, a shift and how many entries the first rank has."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(3 + rng.standard_normal(1000)).float()
    some, none = torch.from_numpy(rng.random(1000) < 0.7), torch.zeros(1000, dtype=torch.bool)
    low, lower = (50 + std * (x - 3).double() for std in (1e-2, 1e-4))
    alike = torch.full((1000,), 0.1)
    first_only = some & (torch.arange(1000) < 300)
    cases = [(x, some, 0.0), (x, some, 3.0), (x, none, 0.0), (x, first_only, 0.0)]
    cases += [(low, some, 0.0), (lower, some, 50.0), (alike, some, 0.0), (alike, some, 7.0)]
    return [(*case, cut) for case in cases for cut in (300, 1000)]


@pytest.mark.timeout(120)
def test_two_ranks_whiten_as_one_would(tmp_path: Path) -> None:
    """The shards are uneven, or the second rank has none."""
    cases = shards()
    for rank in (0, 1):
        part = [slice(0, cut) if rank == 0 else slice(cut, 1000) for *_, cut in cases]
        inputs = [(x[own], m[own], s) for (x, m, s, _), own in zip(cases, part, strict=True)]
        torch.save(inputs, tmp_path / f"inputs_{rank}.pt")
    commands = [[sys.executable, "-c", RANK, str(rank), str(tmp_path)] for rank in (0, 1)]
    ranks = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        errors = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    outputs = [torch.load(tmp_path / f"outputs_{rank}.pt") for rank in (0, 1)]
    for (x, mask, _, _), *parts in zip(cases, *outputs, strict=True):
        together = torch.cat(parts)
        torch.testing.assert_close(together, whiten(x, mask), rtol=1e-6, atol=1e-6)
        if len(x[mask].unique()) > 1:
            assert together[mask].double().std().item() == pytest.approx(1, rel=1e-6)
        else:
            assert not together.any()
