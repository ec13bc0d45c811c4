"""The kernels alone, on a GPU, with their inputs on the device: beside torch's ways, and a copy."""

import pytest
import torch

from benchmarks.device_contest import hold_on_device
from benchmarks.kernels import returns_job
from benchmarks.kernels.build_job import build_contest
from benchmarks.kernels.gather_job import gather_contest
from benchmarks.kernels.logits_job import logits_contest
from benchmarks.kernels.pad_job import pad_contest, unpad_contest
from benchmarks.workloads import MULTI_TURN, SEQUENCES, WORKLOADS, conversations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WITH_FIELDS = (next(iter(SEQUENCES)), MULTI_TURN)


def returns_contest(workload, lengths, device="cuda"):
    contest, entrants = returns_job.contest(workload, lengths, device)
    return contest, entrants, 8 * contest.tokens, device


def padding_contest(make, workload, lengths, device="cuda"):
    contest, entrants = make(workload, lengths, device)
    padded = len(lengths) * int(lengths.max())
    num_bytes = 4 * (contest.tokens + (padded if make is pad_contest else contest.tokens))
    return contest, entrants, num_bytes, device


@pytest.mark.parametrize("workload", WORKLOADS)
def bench_build_on_the_device(keep, workload):
    keep(hold_on_device(*build_contest(workload, conversations(workload))))


@pytest.mark.parametrize("workload", SEQUENCES)
def bench_discounted_returns_on_the_device(keep, workload):
    keep(hold_on_device(*returns_contest(workload, SEQUENCES[workload](1.0))))


@pytest.mark.parametrize("workload", SEQUENCES)
@pytest.mark.parametrize("make", [pad_contest, unpad_contest])
def bench_pad_on_the_device(keep, make, workload):
    keep(hold_on_device(*padding_contest(make, workload, SEQUENCES[workload](1.0))))


@pytest.mark.parametrize("workload", WITH_FIELDS)
def bench_gather_fields_on_the_device(keep, workload):
    keep(hold_on_device(*gather_contest(workload, conversations(workload))))


def bench_unpad_logits_on_the_device(keep):
    keep(hold_on_device(*logits_contest()))
