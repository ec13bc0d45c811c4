"""`build` from the stream and the tables of a buffer that was filled with a workload."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.packing.bench_sizes import WRITTEN
from benchmarks.rivals import quietly
from trajpack import TrajectoryBuffer
from trajpack.kernels.credit.discounted_returns import discounted_returns
from trajpack.kernels.fields.build import FIELD_DTYPES, build, build_reference
from trajpack.kernels.runs import Run
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


def held(trajectories, fields=()):
    """Fill a buffer; return what a pack reads in the turns layout, and its tables."""
    buffer = TrajectoryBuffer(device="cpu", fields=fields)
    buffer.extend(trajectories)
    tables = buffer._tables_of("turns")
    return buffer._staging.send(buffer._state.num_words, tables.arrays), tables


def build_inputs(trajectories):
    """Return what `pack` hands to `build`."""
    region, known = held(trajectories)
    names = ("turn_rewards", "cu_turns", "turn_discounts", "runs")
    rewards, cu_turns, discounts, runs = (region.tables[name] for name in names)
    returns = discounted_returns(rewards, cu_turns, discounts)
    return Inputs(region.stream, runs, returns, known.num_tokens)


def stretches_read(runs):
    """Return where each stretch of words that a table of runs refers to begins and ends."""
    table = runs.numpy().astype(np.int64)
    lengths = np.diff(table[:, Run.START])
    table = table[:-1]
    given = table[:, Run.SOURCE] >= 0
    generated = np.maximum(lengths - table[:, Run.GENERATED], 0)
    begins = np.concatenate((table[given, Run.SOURCE], table[:, Run.LOGPROB]))
    return begins, begins + np.concatenate((lengths[given], generated))


def distinct_words(runs, num_words):
    """Return how many words of the stream are read: one that is read often counts once."""
    begins, ends = stretches_read(runs)
    change = np.zeros(num_words + 1, np.int64)
    np.add.at(change, begins, 1)
    np.add.at(change, ends, -1)
    return int((change.cumsum() > 0).sum())


def moved_bytes(inputs):
    """Return the bytes that must be read, each once, and those that must be written."""
    read = 4 * distinct_words(inputs.runs, len(inputs.words))
    tables = inputs.runs.nbytes + inputs.turn_returns.nbytes
    return read + tables, WRITTEN * inputs.num_tokens


def build_contest(workload, trajectories, device="cuda"):
    """Return what `hold_on_device` takes; rivals are the reference, as it is and compiled."""
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
    contest = Contest("build", workload, inputs.num_tokens, check)
    return contest, entrants, moved_bytes(on_host), device
