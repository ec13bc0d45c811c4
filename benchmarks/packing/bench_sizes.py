"""Cost against size: from 1 k to 16 M tokens, doubling, beside a copy of as many bytes."""

import functools

import numpy as np
import pytest

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.packing.bench_pack import end_to_end, pack_only, rivals_of
from benchmarks.packing.whole_job import WROTE, assert_same_fields, by_numpy
from benchmarks.timing import copy_of
from benchmarks.workloads import filled, single_turns

JOB = "cost against size"
COPY = "copy of as many bytes"
WRITTEN = 38
"""Bytes of a token in all fields of a batch."""
SIZES = [2**power for power in range(10, 25)]
MEAN = 512
UP_TO = {
    "Python lists": 2**17,
    "numpy.concatenate per field": 2**24,
    "torch.cat per field": 2**21,
}
"""Who takes part, up to how many tokens."""


def sized(tokens):
    """Return trajectories of 1 to 1,023 tokens, ``tokens`` in all."""
    generator = np.random.default_rng(8)
    lengths = generator.integers(1, 2 * MEAN, 2 * tokens // MEAN + 8)
    ends = np.cumsum(lengths)
    lengths = lengths[: np.searchsorted(ends, tokens) + 1]
    lengths[-1] -= lengths.sum() - tokens
    return single_turns(lengths)


def sent_bytes(trajectories, layout="turns"):
    """Return the bytes of stream and tables that a pack reads, and sends to a device."""
    buffer = filled(trajectories)
    tables = buffer._tables_of(layout).arrays.values()
    return buffer.num_bytes + sum(table.nbytes for table in tables)


def moved_bytes(trajectories, tokens):
    """Return the bytes that a pack reads and writes."""
    return sent_bytes(trajectories) + WRITTEN * tokens


def contest(tokens, **options):
    trajectories = sized(tokens)
    rivals = rivals_of(trajectories, [name for name, most in UP_TO.items() if tokens <= most])
    half = moved_bytes(trajectories, tokens) // 2
    copy, check_copy = copy_of(half, half)
    check = functools.partial(assert_same_fields, expected=by_numpy(trajectories))
    return Contest(JOB, f"{tokens:,}", tokens, check, **options), [
        Contender(OURS, end_to_end(trajectories), WROTE),
        pack_only(trajectories),
        *rivals,
        Contender(COPY, copy, "bytes", check_copy, rounds=25),
    ]


@pytest.mark.parametrize("tokens", SIZES)
def bench_size(hold, tokens):
    hold(*contest(tokens, seconds=0.5))
