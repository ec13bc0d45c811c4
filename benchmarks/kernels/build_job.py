"""`build` from the stream and the tables of a buffer that was filled with a workload."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.rivals import quietly
from benchmarks.workloads import filled
from trajpack.kernels.credit.discounted_returns import discounted_returns
from trajpack.kernels.fields.build import FIELD_DTYPES, build, build_reference
from trajpack.testing import assert_same_bits


class Inputs(NamedTuple):
    """What `build` takes."""

    words: torch.Tensor
    runs: torch.Tensor
    turn_returns: torch.Tensor
    num_tokens: int

    def to(self, device):
        """Return the same on a device."""
        return Inputs(*(one.to(device) for one in self[:3]), self.num_tokens)


def build_inputs(trajectories):
    """Return what `pack` hands to `build`, in the turns layout."""
    buffer = filled(trajectories)
    known = buffer._tables_of("turns")
    region = buffer._staging.send(buffer.num_bytes // 4, known.arrays)
    names = ("turn_rewards", "cu_turns", "turn_discounts", "runs")
    rewards, cu_turns, discounts, runs = (region.tables[name] for name in names)
    returns = discounted_returns(rewards, cu_turns, discounts)
    return Inputs(region.stream, runs, returns, known.num_tokens)


def build_contest(workload, trajectories, device="cuda"):
    """Return the contest and who takes part; rivals are the reference, as it is and compiled."""
    on_host = build_inputs(trajectories)
    inputs = on_host.to(device)
    expected = build_reference(*on_host)

    def check(fields):
        for name, want in expected._asdict().items():
            assert_same_bits(getattr(fields, name), want, name)

    wrote = f"{len(FIELD_DTYPES)} fields"
    entrants = [
        Contender(OURS, functools.partial(build, *inputs), wrote),
        Contender("torch, op by op", functools.partial(build_reference, *inputs), wrote),
    ]
    if device != "cpu":  # compiling for the host takes longer than the benchmark
        compiled = functools.partial(torch.compile(build_reference), *inputs)
        entrants.append(Contender("torch.compile of it", quietly(compiled), wrote))
    return Contest("build", workload, inputs.num_tokens, check), entrants
