"""The kernels alone, on a GPU, with their inputs on the device: beside torch's ways, and a copy."""

import numpy as np
import pytest
import torch

from benchmarks.device_contest import hold_on_device
from benchmarks.kernels import gae_job, groups_job, returns_job, weights_job
from benchmarks.kernels.build_job import build_contest
from benchmarks.kernels.gather_job import gather_contest
from benchmarks.kernels.logits_job import logits_contest
from benchmarks.kernels.pad_job import pad_contest, unpad_contest
from benchmarks.workloads import EVEN_SEQUENCES, MULTI_TURN, SEQUENCES, WORKLOADS, conversations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GAE_WORKLOADS = {name: make(1.0) for name, make in SEQUENCES.items()} | {
    "1,024: 2,048 sequences": np.full(2048, 1024),
    "131,072: 16 sequences": np.full(16, 131_072),
}
WRITES = 6
"""Bytes that `build` writes for each byte it reads: 38 of 44, as a copy that writes six times."""
WITH_FIELDS = (next(iter(SEQUENCES)), MULTI_TURN)


def returns_contest(workload, lengths, device="cuda"):
    contest, entrants = returns_job.contest(workload, lengths, device)
    return contest, entrants, 8 * contest.tokens, device


def gae_contest(workload, lengths, device="cuda", *, masked=False):
    contest, entrants = gae_job.contest(workload, lengths, device, masked=masked)
    num_bytes = (16 + masked) * contest.tokens + 4 * (len(lengths) + 1)
    return contest, entrants, num_bytes, device


def groups_contest(workload, shape, device="cuda"):
    contest, entrants = groups_job.groups_contest(workload, shape, device)
    return contest, entrants, 16 * contest.tokens, device


def segments_contest(workload, lengths, device="cuda"):
    contest, entrants = groups_job.segments_contest(workload, lengths, device)
    return contest, entrants, 4 * (contest.tokens + 2 * len(lengths) + 1), device


def whiten_contest(workload, lengths, device="cuda"):
    contest, entrants = groups_job.whiten_contest(workload, lengths, device)
    return contest, entrants, 9 * contest.tokens, device


def weights_contest(make, workload, lengths, device="cuda"):
    contest, entrants = make(workload, lengths, device)
    return contest, entrants, weights_job.BYTES[contest.job] * contest.tokens, device


def padding_contest(make, workload, lengths, device="cuda"):
    contest, entrants = make(workload, lengths, device)
    padded = len(lengths) * int(lengths.max())
    num_bytes = 4 * (contest.tokens + (padded if make is pad_contest else contest.tokens))
    return contest, entrants, num_bytes, device


@pytest.mark.parametrize("workload", WORKLOADS)
def bench_build_on_the_device(keep, workload):
    keep(hold_on_device(*build_contest(workload, conversations(workload)), writes=WRITES))


@pytest.mark.parametrize("workload", SEQUENCES)
def bench_discounted_returns_on_the_device(keep, workload):
    keep(hold_on_device(*returns_contest(workload, SEQUENCES[workload](1.0))))


@pytest.mark.parametrize("workload", GAE_WORKLOADS)
def bench_gae_on_the_device(keep, workload):
    keep(hold_on_device(*gae_contest(workload, GAE_WORKLOADS[workload])))


@pytest.mark.parametrize("workload", EVEN_SEQUENCES[:2])
def bench_gae_of_generated_tokens_on_the_device(keep, workload):
    keep(hold_on_device(*gae_contest(workload, GAE_WORKLOADS[workload], masked=True)))


@pytest.mark.parametrize("workload", groups_job.GROUP_SIZES)
def bench_group_advantages_on_the_device(keep, workload):
    keep(hold_on_device(*groups_contest(workload, groups_job.GROUP_SIZES[workload])))


@pytest.mark.parametrize("workload", EVEN_SEQUENCES)
@pytest.mark.parametrize("make", [segments_contest, whiten_contest])
def bench_reductions_on_the_device(keep, make, workload):
    keep(hold_on_device(*make(workload, GAE_WORKLOADS[workload])))


@pytest.mark.parametrize("workload", EVEN_SEQUENCES)
@pytest.mark.parametrize("make", [weights_job.importance_contest, weights_job.loss_contest])
def bench_weights_on_the_device(keep, make, workload):
    keep(hold_on_device(*weights_contest(make, workload, GAE_WORKLOADS[workload])))


@pytest.mark.parametrize("workload", SEQUENCES)
@pytest.mark.parametrize("make", [pad_contest, unpad_contest])
def bench_pad_on_the_device(keep, make, workload):
    keep(hold_on_device(*padding_contest(make, workload, SEQUENCES[workload](1.0))))


@pytest.mark.parametrize("workload", WITH_FIELDS)
def bench_gather_fields_on_the_device(keep, workload):
    keep(hold_on_device(*gather_contest(workload, conversations(workload))))


def bench_unpad_logits_on_the_device(keep):
    keep(hold_on_device(*logits_contest()))
