"""A batch on a GPU cut into micro-batches by a plan: one launch each, or the usual loops.

``make bench-gpu`` runs it on a machine with a CUDA device. Every result is compared with the
host's.
"""

import functools

import pytest

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.device_contest import hold_on_device
from benchmarks.packing.bench_micro_batches import (
    CAPACITY,
    CASES,
    COPIED,
    MULTIPLES,
    RIVALS,
    WROTE,
    by_numpy,
    by_slices,
    check,
    inputs,
    ours,
)
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.plan.plan import plan_micro_batches

pytestmark = pytest.mark.gpu


def contest(job, workload, scale, device):
    """Return what `hold_on_device` takes."""
    multiple = MULTIPLES[job]
    batch, alignment = inputs(workload, scale, device), Alignment(sequence_multiple=multiple)
    plan = plan_micro_batches(batch.seqlens, CAPACITY, align=multiple)
    given = batch, plan, alignment
    expected = by_slices(inputs(workload, scale), plan, alignment)
    checked = functools.partial(check, expected=expected)
    entrants = [Contender(OURS, lambda: ours(*given), WROTE, on_host=True)]
    entrants += [
        Contender(name, functools.partial(way, *given), WROTE, on_host=True)
        for name, way in RIVALS.items()
        if way is not by_numpy
    ]
    read = sum(getattr(batch, name).nbytes for name in COPIED)
    written = sum(tensor.nbytes for one in expected for tensor in one.values())
    return Contest(job, workload, batch.num_tokens, checked), entrants, (read, written), device


@pytest.mark.parametrize(("workload", "job"), CASES)
def bench_micro_batches_on_the_device(keep, size, workload, job):
    keep(hold_on_device(*contest(job, workload, size.scale, size.device)))
