"""Cost against size: from 1 k to 16 M tokens, doubling, beside a copy of as many bytes."""

import functools

import numpy as np
import pytest

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.packing.bench_pack import end_to_end, pack_alone
from benchmarks.packing.whole_job import RIVALS, WROTE, assert_same_fields, by_numpy
from benchmarks.timing import copy_of
from benchmarks.workloads import single_turns

JOB = "cost against size"
COPY = "copy of as many bytes"
BYTES_PER_TOKEN = 38 + 4 + 2
"""Written: all fields. Read: a token id, and log-probabilities, on about half of the tokens."""
SIZES = [2**power for power in range(10, 25)]
MEAN = 512
UP_TO = {
    "Python lists": 2**20,
    "numpy.concatenate per field": 2**24,
    "torch.cat per field": 2**24,
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


def contest(tokens, **options):
    trajectories = sized(tokens)
    rivals = [
        Contender(name, functools.partial(way, trajectories), WROTE)
        for name, way in RIVALS.items()
        if tokens <= UP_TO.get(name, 0)
    ]
    copy, check_copy = copy_of(BYTES_PER_TOKEN * tokens)
    check = functools.partial(assert_same_fields, expected=by_numpy(trajectories))
    return Contest(JOB, f"{tokens:,}", tokens, check, **options), [
        Contender(OURS, end_to_end(trajectories), WROTE),
        pack_alone(trajectories),
        *rivals,
        Contender(COPY, copy, "bytes", check_copy),
    ]


@pytest.mark.parametrize("tokens", SIZES)
def bench_size(hold, tokens):
    hold(*contest(tokens, seconds=0.2))
