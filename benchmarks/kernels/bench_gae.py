"""Generalized advantages on the host, beside loops, a convolution and a product in chunks."""

import pytest

from benchmarks.kernels.gae_job import contest
from benchmarks.workloads import GAE_LENGTHS, GAE_MASKED_LENGTHS


@pytest.mark.parametrize("workload", GAE_LENGTHS)
def bench_gae(hold, workload):
    hold(*contest(workload, GAE_LENGTHS[workload]))


@pytest.mark.parametrize("workload", GAE_MASKED_LENGTHS)
def bench_gae_of_generated_tokens(hold, workload):
    hold(*contest(workload, GAE_LENGTHS[workload], masked=True))
