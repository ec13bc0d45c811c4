"""What trainer ranks do: the same steps from the same state, and no vain repetition."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.agent.ray.ray_cases import make_trainer, random_paths
from trajpack.agent.ray import RankLostError, TrainerRanks, TrajectoryArrays
from trajpack.agent.ray.training.recovery import RecoveredTrainers
from trajpack.packing.types import Trajectory, Turn

BATCHES = [TrajectoryArrays.of(random_paths(seed)) for seed in range(2)]


def test_a_state_goes_on_as_the_trainer_that_it_was_taken_from():
    trainer, later = make_trainer(), make_trainer()
    trainer.step(BATCHES[0].trajectories(), 0, 1)
    later.load_state(trainer.state())
    outcomes = [each.step(BATCHES[1].trajectories(), 0, 1) for each in (trainer, later)]
    assert outcomes[0] == outcomes[1]
    assert all(torch.equal(v, later.weights()[name]) for name, v in trainer.weights().items())


def test_gradients_of_a_step_that_failed_are_no_part_of_the_next() -> None:
    norms = []
    for has_gradients in (False, True):
        trainer = make_trainer()
        for value in trainer.model.parameters():
            value.grad = torch.full_like(value, 3.0) if has_gradients else None
        norms.append(trainer.step(random_paths(8), 0, 1)["gradient_norm"])
    assert norms[0] == norms[1]


def test_nothing_to_learn_from_is_refused_by_name():
    with pytest.raises(ValueError, match="no generated tokens to learn from"):
        make_trainer().step([Trajectory("a", [Turn([1], [], [])], group="g")], 0, 1)


def test_options_out_of_range_are_refused_by_name():
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        TrainerRanks(make_trainer, 0)


def test_ranks_are_not_rebuilt_for_what_their_trainer_refuses():
    asked: list[int] = []

    async def step() -> None:
        asked.append(1)
        raise RankLostError(0, "a sequence is too long") from ValueError("a sequence is too long")

    trainers = RecoveredTrainers(TrainerRanks(make_trainer, 2), max_rebuilds=3)
    with pytest.raises(RankLostError, match="trainer rank 0: a sequence is too long"):
        asyncio.run(trainers.ask(step))
    assert (len(asked), trainers.num_rebuilds) == (1, 0)
