"""Checking and storing alone, from arrays: beside copies of the same arrays."""

import numpy as np
import pytest

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.timing import copy_of
from benchmarks.workloads import EVEN_SEQUENCES, MULTI_TURN, conversations
from trajpack import TrajectoryBuffer

JOB = "extend, from arrays"
CONCATENATION = "copy by numpy.concatenate"
COPY = "copy in one piece"


def pieces_of(trajectories):
    """Return ids and log-probabilities as handed over."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    ids = [part for turn in turns for part in (turn.prompt_ids, turn.completion_ids)]
    return ids, [turn.completion_logprobs for turn in turns]


def contest(workload, scale=1.0, **options):
    trajectories = conversations(workload, scale)
    ids, logprobs = pieces_of(trajectories)
    all_ids, all_logprobs = np.concatenate(ids), np.concatenate(logprobs)
    id_copy, logprob_copy = np.zeros_like(all_ids), np.zeros_like(all_logprobs)
    buffer = TrajectoryBuffer(device="cpu")

    def extend():
        buffer.clear()
        buffer.extend(trajectories)
        return buffer

    def concatenate():
        np.concatenate(ids, out=id_copy)
        np.concatenate(logprobs, out=logprob_copy)
        return id_copy, logprob_copy

    def check(copied):
        assert np.array_equal(copied[0], all_ids)
        assert np.array_equal(copied[1], all_logprobs)

    def check_ours(held):
        assert held.pack("turns").unpack() == trajectories

    num_bytes = 2 * (all_ids.nbytes + all_logprobs.nbytes)
    copy, check_copy = copy_of(num_bytes // 2, num_bytes // 2)
    more = {"rounds": 15}
    entrants = [
        Contender(OURS, extend, "the buffer", check_ours, **more),
        Contender(CONCATENATION, concatenate, "ids, log-probabilities", **more),
        Contender(COPY, copy, "as many bytes", check_copy, **more),
    ]
    return Contest(JOB, workload, len(all_ids), check, **options), entrants


@pytest.mark.parametrize("workload", [*EVEN_SEQUENCES, MULTI_TURN])
def bench_extend(hold, workload):
    hold(*contest(workload))
