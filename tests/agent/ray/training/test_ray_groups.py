"""Which groups a training learns from, which it settles, and which it leaves for another time."""

from __future__ import annotations

import pytest

from trajpack.agent.errors import EngineEndedError, EpisodeCancelledError, EpisodeTimeoutError
from trajpack.agent.protocols import Prompt
from trajpack.agent.ray.training.groups import accepted, was_stopped
from trajpack.agent.runner.results import EpisodeResult, GroupResult
from trajpack.packing.types import Trajectory, Turn

PROMPT = Prompt("q", [1])
GOOD = EpisodeResult(PROMPT, (Trajectory("q@0", [Turn([1], [2], [-0.5])]),))
SLOW = EpisodeResult(PROMPT, (), EpisodeTimeoutError("q@1", "too slow"), sample=1)
STOPPED = EpisodeResult(PROMPT, (), EpisodeCancelledError("q@1", "stopped"), sample=1)


@pytest.mark.parametrize(
    ("group", "num_learned", "stopped"),
    [
        (GroupResult(PROMPT, (GOOD, SLOW)), 1, False),
        (GroupResult(PROMPT, (GOOD, SLOW), rejected="incomplete"), 0, False),
        (GroupResult(PROMPT, (SLOW,), rejected="failed"), 0, False),
        (GroupResult(PROMPT, (GOOD, GOOD), rejected="all_equal"), 0, False),
        (GroupResult(PROMPT, (GOOD, STOPPED), rejected="incomplete"), 0, True),
        (GroupResult(PROMPT, (GOOD,), rejected="incomplete"), 0, True),
    ],
)
def test_a_group_is_learned_from_or_settled_or_left(group, num_learned, stopped):
    assert len(accepted(group)) == num_learned
    if not num_learned:
        assert was_stopped(group) == stopped


def test_the_end_of_all_workers_is_no_verdict_on_a_group():
    ended = EpisodeResult(PROMPT, (), EngineEndedError("q@1", "no rollout worker is left"))
    with pytest.raises(EngineEndedError, match="no rollout worker is left"):
        accepted(GroupResult(PROMPT, (GOOD, ended), rejected="incomplete"))
