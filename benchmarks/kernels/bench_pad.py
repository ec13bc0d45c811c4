"""Pad and unpad on the host, beside torch's and fbgemm's ways."""

import pytest

from benchmarks.kernels.pad_job import pad_contest, unpad_contest
from benchmarks.workloads import SEQUENCES


@pytest.mark.parametrize("workload", SEQUENCES)
@pytest.mark.parametrize("contest", [pad_contest, unpad_contest])
def bench_pad(hold, contest, workload):
    hold(*contest(workload, SEQUENCES[workload](1.0)))
