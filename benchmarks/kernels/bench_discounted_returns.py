"""Discounted returns on the host, beside loops and torchrl's value functions."""

import pytest

from benchmarks.kernels.returns_job import contest
from benchmarks.workloads import SEQUENCES


@pytest.mark.parametrize("workload", SEQUENCES)
def bench_discounted_returns(hold, workload):
    hold(*contest(workload, SEQUENCES[workload](1.0)))
