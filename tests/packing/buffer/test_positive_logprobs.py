"""Log-probabilities above 0 are warned of, with the remedy."""

import warnings

import pytest

from trajpack import Trajectory, TrajectoryBuffer, Turn, pack


def trajectory(*logprobs):
    return Trajectory("a", [Turn([1], [2] * len(logprobs), list(logprobs))])


@pytest.mark.parametrize("add", [lambda one: pack([one]), lambda one: TrajectoryBuffer().add(one)])
def test_positive_log_probabilities_are_warned_of_at_the_callers_line(add):
    with pytest.warns(UserWarning, match="positive numbers.*give the natural logarithm") as caught:
        add(trajectory(-0.5, 0.5))
    (warning,) = caught
    assert warning.filename == __file__


def test_a_loop_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            pack([trajectory(0.5)])
    assert len(caught) == 1


@pytest.mark.parametrize("logprobs", [(), (0.0,), (-0.5, 1e-3)])
def test_no_warning_of_zero_and_of_rounding(logprobs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pack([trajectory(*logprobs)])
