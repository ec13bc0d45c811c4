"""Trainer ranks on a real cluster: equal to one rank, and lost as one."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from importlib.util import find_spec

import pytest
import torch

from tests.agent.ray_cases import (  # noqa: F401
    cluster,
    make_hanging_trainer,
    make_trainer,
    random_paths,
)
from trajpack.agent.ray import RankLostError, TrainerRanks, TrajectoryArrays
from trajpack.packing.types import Trajectory, Turn

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
BATCHES = [TrajectoryArrays.of(random_paths(seed)) for seed in range(2)]


@pytest.mark.usefixtures("cluster")
def test_ranks_equal_one_rank_and_a_death_in_a_step_ends_it_at_once():
    async def train() -> float:
        async with TrainerRanks(make_hanging_trainer, 2) as ranks:
            together = await ranks.step(BATCHES[0])
            weights = (await ranks.weights(version=1)).state_dict()
            alone = make_trainer()
            outcome = alone.step(BATCHES[0].trajectories(), 0, 1)
            assert [rank["loss"] for rank in together] == pytest.approx([outcome["loss"]] * 2)
            for name, value in alone.weights().items():
                torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)
            step = asyncio.ensure_future(ranks.step(BATCHES[1]))
            # The first rank waits in an all-reduce for the second, which never comes.
            done, _ = await asyncio.wait({step}, timeout=1)
            assert not done
            os.kill(ranks.pids[1], signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(RankLostError, match=r"trainer rank 1: \w*Actor\w*Error"):
                await step
            seconds = time.monotonic() - began
            assert ranks.lost.done()
            with pytest.raises(RankLostError, match="trainer rank 1"):
                await ranks.weights(version=2)
        return seconds

    assert asyncio.run(train()) < 10


def test_a_state_goes_on_as_the_trainer_that_it_was_taken_from():
    trainer, later = make_trainer(), make_trainer()
    trainer.step(BATCHES[0].trajectories(), 0, 1)
    later.load_state(trainer.state())
    outcomes = [each.step(BATCHES[1].trajectories(), 0, 1) for each in (trainer, later)]
    assert outcomes[0] == outcomes[1]
    assert all(torch.equal(v, later.weights()[name]) for name, v in trainer.weights().items())


def test_nothing_to_learn_from_is_refused_by_name():
    with pytest.raises(ValueError, match="no generated tokens to learn from"):
        make_trainer().step([Trajectory("a", [Turn([1], [], [])], group="g")], 0, 1)


def test_options_out_of_range_are_refused_by_name():
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        TrainerRanks(make_trainer, 0)
