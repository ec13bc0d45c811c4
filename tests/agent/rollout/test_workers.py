"""What ``trajpack rollout --ray`` does, with the real engine on a real cluster."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

import numpy as np
import pytest

from trajpack.agent.errors import SetupError
from trajpack.agent.rollout.rollout import Rollout, prepare_rollout
from trajpack.agent.rollout.settings import RolloutSettings
from trajpack.agent.rollout.workers import gpu_share
from trajpack.agent.runner.runner import EpisodeResult, Progress

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")


@pytest.fixture(scope="module")
def prepared() -> Rollout:
    counts = {"num_prompts": 3, "num_turns": 2, "max_new_tokens": 6, "num_workers": 1}
    return prepare_rollout(RolloutSettings(group_size=2, concurrency=4, **counts))


@pytest.mark.usefixtures("cluster")
def test_a_rollout_over_workers_equals_one_in_this_process(prepared: Rollout):
    told: list[Progress] = []

    async def roll_out() -> list[EpisodeResult]:
        async with prepared.episodes(told.append) as stream:
            return [result async for result in stream]

    outcome = prepared.outcome(asyncio.run(roll_out()))
    assert not outcome.failures
    expected = [f"{prompt.id}@{k}" for prompt in prepared.prompts for k in (0, 1)]
    assert [result.qid for result in outcome.results] == expected
    assert [path.id for path in outcome.trajectories] == expected
    for result in outcome.results:
        (path,) = result.trajectories
        assert path.group == result.prompt.id
        assert len(path.turns) == 2
        assert list(path.turns[0].prompt_ids) == list(result.prompt.input_ids)
        assert all(1 <= len(turn.completion_ids) <= 6 for turn in path.turns)
        assert all(np.all(np.asarray(turn.completion_logprobs) < 0) for turn in path.turns)
    num_tokens = sum(len(turn.completion_ids) for p in outcome.trajectories for turn in p.turns)
    last = told[-1]
    assert (last.num_finished, last.num_turns, last.num_tokens) == (6, 12, num_tokens)


def test_workers_share_gpus_so_that_none_is_left_without():
    for num_gpus in range(1, 9):
        for num_workers in range(1, 40):
            share = gpu_share(num_gpus, num_workers)
            assert share <= 1
            assert num_gpus * int(1 / share + 1e-9) >= num_workers
    with pytest.raises(SetupError, match="the cluster has no GPU for the workers"):
        gpu_share(0, 1)
