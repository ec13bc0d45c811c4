"""The contests of credit assignment: every way agrees, and what is wrong is found."""

import numpy as np
import pytest

from benchmarks.contest import race
from benchmarks.kernels import gae_job, groups_job, logprobs_job
from benchmarks.kernels.gae_one_lane import one_lane
from benchmarks.kernels.gae_ways import GAMMA, LAM
from tests.benchmarks.contest_cases import LENGTHS


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, 20 * LENGTHS, np.full(3, 256), np.array([1])])
def test_every_way_of_gae_agrees(lengths, masked):
    for entry in race(*gae_job.contest("small", lengths, masked=masked, rounds=1)):
        assert entry.best or "not installed" in entry.note, entry


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_a_wrong_advantage_or_return_is_found(part, masked):
    lengths = 60 * LENGTHS
    contest, (ours, rival, *_) = gae_job.contest("small", lengths, masked=masked)
    for contender, check in ((ours, ours.check), (rival, contest.check)):
        result = [each.clone() for each in contender.work()]
        check(result)
        result[part][-1] += 0.01
        generated = gae_job.inputs(lengths, masked=masked).generated
        assert generated is None or generated[-1]
        with pytest.raises(AssertionError):
            check(result)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (groups_job.groups_contest, (3, 4)),
        (groups_job.segments_contest, LENGTHS),
        (groups_job.whiten_contest, LENGTHS),
    ],
)
def test_every_way_of_statistics_agrees(make, shape):
    assert all(entry.best for entry in race(*make("small", shape, rounds=1)))


@pytest.mark.parametrize("rows", logprobs_job.ROWS)
def test_every_way_of_log_probabilities_agrees(rows):
    contest, entrants = logprobs_job.contest(rows, (30, 8, 300))
    assert all(entry.best or "not installed" in entry.note for entry in race(contest, entrants))
    found = [one.clone() for one in entrants[0].work()]
    found[1][0] += 0.1
    with pytest.raises(AssertionError):
        contest.check(found)


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("lengths", [[3, 1, 8, 5], [1] * 40, [2, 0, 3]])
def test_a_lane_for_each_sequence_makes_the_same_advantages(lengths):
    lengths = np.array(lengths)
    given = gae_job.inputs(lengths)
    expected = gae_job.reference(given, lengths)
    gae_job.check_of(expected, None)(one_lane(*given[:3], GAMMA, LAM))
