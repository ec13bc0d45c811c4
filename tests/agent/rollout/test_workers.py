"""What ``trajpack rollout --ray`` does, with the real engine on a real cluster."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

import numpy as np
import pytest

from trajpack.agent.rollout.rollout import Rollout, prepare_rollout
from trajpack.agent.rollout.settings import RolloutSettings
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

    results = prepared.in_order(asyncio.run(roll_out()))
    assert not any(result.error for result in results)
    expected = [f"{prompt.id}@{k}" for prompt in prepared.prompts for k in (0, 1)]
    assert [result.qid for result in results] == expected
    assert [path.id for result in results for path in result.trajectories] == expected
    num_tokens = 0
    for result in results:
        (path,) = result.trajectories
        assert path.group == result.prompt.id
        assert len(path.turns) == 2
        assert list(path.turns[0].prompt_ids) == list(result.prompt.input_ids)
        num_tokens += sum(len(turn.completion_ids) for turn in path.turns)
        assert all(1 <= len(turn.completion_ids) <= 6 for turn in path.turns)
        assert all(np.all(np.asarray(turn.completion_logprobs) < 0) for turn in path.turns)
    last = told[-1]
    assert (last.num_finished, last.num_turns, last.num_tokens) == (6, 12, num_tokens)
