"""The kernels alone, on a GPU, with their inputs on the device: beside torch's ways, and a copy."""

import functools

import numpy as np
import pytest
import torch

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.device_contest import hold_on_device
from benchmarks.kernels import returns_job
from benchmarks.kernels.pad_job import pad_contest, unpad_contest
from benchmarks.rivals import quietly
from benchmarks.workloads import EVEN_SEQUENCES, SEQUENCES
from trajpack.kernels.build import FIELD_DTYPES, build, build_reference
from trajpack.testing import assert_same_bits, random_build_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BUILD_BYTES = sum(torch.empty(0, dtype=dtype).itemsize for dtype in FIELD_DTYPES.values())


def build_contest(workload, lengths, device="cuda"):
    """Return what `hold_on_device` takes; rivals are the reference, as it is and compiled."""
    *tensors, tokens = random_build_inputs(np.random.default_rng(9), lengths.tolist())
    inputs = (*(tensor.to(device) for tensor in tensors), tokens)
    expected = build_reference(*tensors, tokens)
    generated = int(expected.loss_mask.sum())

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
    num_bytes = BUILD_BYTES * tokens + 4 * (tokens + generated) + tensors[1].nbytes
    return Contest("build", workload, tokens, check), entrants, num_bytes, device


def returns_contest(workload, lengths, device="cuda"):
    contest, entrants = returns_job.contest(workload, lengths, device)
    return contest, entrants, 8 * contest.tokens, device


def padding_contest(make, workload, lengths, device="cuda"):
    contest, entrants = make(workload, lengths, device)
    padded = len(lengths) * int(lengths.max())
    num_bytes = 4 * (contest.tokens + (padded if make is pad_contest else contest.tokens))
    return contest, entrants, num_bytes, device


@pytest.mark.parametrize("workload", SEQUENCES)
def bench_build_on_the_device(keep, workload):
    keep.append(hold_on_device(*build_contest(workload, SEQUENCES[workload](1.0))))


@pytest.mark.parametrize("workload", EVEN_SEQUENCES)
def bench_discounted_returns_on_the_device(keep, workload):
    keep.append(hold_on_device(*returns_contest(workload, SEQUENCES[workload](1.0))))


@pytest.mark.parametrize("workload", SEQUENCES)
@pytest.mark.parametrize("make", [pad_contest, unpad_contest])
def bench_pad_on_the_device(keep, make, workload):
    keep.append(hold_on_device(*padding_contest(make, workload, SEQUENCES[workload](1.0))))
