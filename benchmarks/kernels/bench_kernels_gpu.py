"""The kernels alone, on a GPU, with their inputs on the device: beside torch's ways, and a copy."""

import functools

import numpy as np
import pytest

from benchmarks.contest import OURS, Contender
from benchmarks.device_contest import hold_on_device
from benchmarks.kernels import (
    gae_job,
    groups_job,
    logits_job,
    logprobs_job,
    returns_job,
    weights_job,
)
from benchmarks.kernels.build_job import build_contest
from benchmarks.kernels.gather_job import gather_contest
from benchmarks.kernels.pad_job import pad_contest, unpad_contest
from benchmarks.workloads import EVEN_SEQUENCES, MULTI_TURN, SEQUENCES, WORKLOADS, conversations

pytestmark = pytest.mark.gpu
WHOLE = {name: make(1.0) for name, make in SEQUENCES.items()} | {
    "1,024: 2,048 sequences": np.full(2048, 1024),
    "131,072: 16 sequences": np.full(16, 131_072),
}
WITH_FIELDS = (next(iter(SEQUENCES)), MULTI_TURN)
UNKNOWN = f"{OURS}, longest not known"


def both_regimes(contest, entrants):
    """Return the entrants of a scan, ours also without the longest sequence."""
    ours, *rivals = entrants
    unknown = Contender(UNKNOWN, functools.partial(ours.work, None), ours.wrote, ours.check)
    return contest, [ours, unknown, *rivals]


def returns_contest(workload, lengths, device="cuda"):
    contest, entrants = both_regimes(*returns_job.contest(workload, lengths, device))
    return contest, entrants, (4 * contest.tokens, 4 * contest.tokens), device


def gae_contest(workload, lengths, device="cuda", *, masked=False):
    contest, entrants = both_regimes(*gae_job.contest(workload, lengths, device, masked=masked))
    read = (8 + masked) * contest.tokens + 4 * (len(lengths) + 1)
    return contest, entrants, (read, 8 * contest.tokens), device


def groups_contest(workload, shape, device="cuda"):
    contest, entrants = groups_job.groups_contest(workload, shape, device)
    return contest, entrants, (12 * contest.tokens, 4 * contest.tokens), device


def segments_contest(workload, lengths, device="cuda"):
    contest, entrants = groups_job.segments_contest(workload, lengths, device)
    return contest, entrants, (4 * (contest.tokens + len(lengths) + 1), 4 * len(lengths)), device


def whiten_contest(workload, lengths, device="cuda"):
    contest, entrants = groups_job.whiten_contest(workload, lengths, device)
    return contest, entrants, (5 * contest.tokens, 4 * contest.tokens), device


def weights_contest(make, workload, lengths, device="cuda"):
    contest, entrants = make(workload, lengths, device)
    read = weights_job.READ[contest.job]
    return contest, entrants, (read * contest.tokens, 4 * contest.tokens), device


def padding_contest(make, workload, lengths, device="cuda"):
    contest, entrants = make(workload, lengths, device)
    written = len(lengths) * int(lengths.max()) if make is pad_contest else contest.tokens
    return contest, entrants, (4 * contest.tokens, 4 * written), device


def logprobs_contest(which, shape, device="cuda"):
    contest, entrants = logprobs_job.contest(which, shape, device)
    num_bytes = 2 * (shape[0] + shape[2]) * shape[1]  # of hidden states and head, in 16 bits
    return contest, entrants, (num_bytes, num_bytes), device  # their gradients are written


@pytest.mark.parametrize("rows", logprobs_job.ROWS)
def bench_logprobs_on_the_device(keep, size, rows):
    shape = tuple(size.scaled(number) for number in logprobs_job.PUBLISHED)
    keep(hold_on_device(*logprobs_contest(rows, shape, size.device)))


@pytest.mark.parametrize("workload", WORKLOADS)
def bench_build_on_the_device(keep, size, workload):
    given = conversations(workload, size.scale)
    keep(hold_on_device(*build_contest(workload, given, size.device)))


@pytest.mark.parametrize("workload", SEQUENCES)
def bench_discounted_returns_on_the_device(keep, size, workload):
    keep(hold_on_device(*returns_contest(workload, size.cut(WHOLE[workload]), size.device)))


@pytest.mark.parametrize("workload", WHOLE)
def bench_gae_on_the_device(keep, size, workload):
    keep(hold_on_device(*gae_contest(workload, size.cut(WHOLE[workload]), size.device)))


@pytest.mark.parametrize("workload", EVEN_SEQUENCES[:2])
def bench_gae_of_generated_tokens_on_the_device(keep, size, workload):
    given = workload, size.cut(WHOLE[workload]), size.device
    keep(hold_on_device(*gae_contest(*given, masked=True)))


@pytest.mark.parametrize("workload", groups_job.GROUP_SIZES)
def bench_group_advantages_on_the_device(keep, size, workload):
    count, members = groups_job.GROUP_SIZES[workload]
    keep(hold_on_device(*groups_contest(workload, (size.scaled(count), members), size.device)))


@pytest.mark.parametrize("name", groups_job.ESTIMATORS)
def bench_estimators_on_the_device(keep, size, name):
    lengths = size.cut(WHOLE[groups_job.BATCH])
    contest, entrants = groups_job.batch_contest(name, lengths, size.device)
    read, written = (9, 8) if groups_job.ESTIMATORS[name][1] else (1, 8)
    moved = read * contest.tokens, written * contest.tokens
    keep(hold_on_device(contest, entrants, moved, size.device))


@pytest.mark.parametrize("workload", EVEN_SEQUENCES)
@pytest.mark.parametrize("make", [segments_contest, whiten_contest])
def bench_reductions_on_the_device(keep, size, make, workload):
    keep(hold_on_device(*make(workload, size.cut(WHOLE[workload]), size.device)))


@pytest.mark.parametrize("workload", EVEN_SEQUENCES)
@pytest.mark.parametrize("make", [weights_job.importance_contest, weights_job.loss_contest])
def bench_weights_on_the_device(keep, size, make, workload):
    given = workload, size.cut(WHOLE[workload]), size.device
    keep(hold_on_device(*weights_contest(make, *given)))


@pytest.mark.parametrize("workload", SEQUENCES)
@pytest.mark.parametrize("make", [pad_contest, unpad_contest])
def bench_pad_on_the_device(keep, size, make, workload):
    given = workload, size.cut(WHOLE[workload]), size.device
    keep(hold_on_device(*padding_contest(make, *given)))


@pytest.mark.parametrize("workload", WITH_FIELDS)
def bench_gather_fields_on_the_device(keep, size, workload):
    given = conversations(workload, size.scale)
    keep(hold_on_device(*gather_contest(workload, given, size.device)))


def bench_unpad_logits_on_the_device(keep, size):
    vocabulary = size.scaled(logits_job.VOCABULARY)
    keep(hold_on_device(*logits_job.logits_contest(logits_job.LENGTHS, vocabulary, size.device)))
