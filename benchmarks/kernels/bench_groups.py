"""Statistics of groups, segments and batches on the host, beside loops and torch's ways."""

import pytest

from benchmarks.kernels.groups_job import (
    GROUP_SIZES,
    groups_contest,
    segments_contest,
    whiten_contest,
)
from benchmarks.workloads import EVEN_SEQUENCES, SEQUENCES


@pytest.mark.parametrize("workload", GROUP_SIZES)
def bench_group_advantages(hold, workload):
    hold(*groups_contest(workload, GROUP_SIZES[workload]))


@pytest.mark.parametrize("workload", EVEN_SEQUENCES)
@pytest.mark.parametrize("contest", [segments_contest, whiten_contest])
def bench_reductions(hold, contest, workload):
    hold(*contest(workload, SEQUENCES[workload](1.0)))
