"""Discounted returns on the host, beside loops and torchrl's value functions."""

import pytest

from benchmarks.kernels.returns_job import contest
from benchmarks.workloads import EVEN_SEQUENCES, SEQUENCES


@pytest.mark.parametrize("workload", EVEN_SEQUENCES)  # torchrl needs 50 s for power-law lengths
def bench_discounted_returns(hold, workload):
    hold(*contest(workload, SEQUENCES[workload](1.0), rounds=3))
