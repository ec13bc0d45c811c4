"""Log-probabilities of tokens on the host, beside all logits at once and TRL's chunks."""

import pytest

from benchmarks.kernels.logprobs_job import ROWS, contest


@pytest.mark.parametrize("rows", ROWS)
def bench_logprobs(hold, rows):
    hold(*contest(rows))
