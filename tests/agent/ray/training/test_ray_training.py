"""A training on a real cluster: its numbers are the same whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time
from contextlib import aclosing
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.agent.ray.ray_cases import MakeScripted, make_hanging_trainer, make_trainer, prompts
from trajpack.agent.ray import (
    Checkpoints,
    PackedRankTrainer,
    RankOptions,
    RayTraining,
    RolloutWorkers,
    TrainerRanks,
    TrainingSettings,
    TrainingStep,
    WorkerOptions,
)
from trajpack.agent.runner.policy import RolloutPolicy, StalenessPolicy

pytestmark = [
    pytest.mark.skipif(
        find_spec("ray") is None or find_spec("pyarrow") is None, reason="needs ray and pyarrow"
    ),
    pytest.mark.usefixtures("cluster"),
]
GROUP_SIZE = 3
SETTINGS = TrainingSettings(groups_per_step=4, checkpoint_every=3)
POLICY = RolloutPolicy(staleness=StalenessPolicy(max_staleness=2, batch_size=4))


class Place:
    """The folder of a training, and what runs in it."""

    def __init__(self, folder: Path) -> None:
        (folder / "notes").touch()
        self.folder = folder
        self.make_worker = MakeScripted(folder / "notes")
        options = WorkerOptions(concurrency=4, num_cpus=0.1, heartbeat_s=0.2)
        self.workers = RolloutWorkers(self.make_worker, 1, options=options)
        self.runner = self.workers.runner(group_size=GROUP_SIZE, policy=POLICY)
        make = partial(make_hanging_trainer, folder / "hung")
        self.trainers = TrainerRanks(make, 2, options=RankOptions(num_cpus=0.1))

    async def train(self, num_steps: int) -> list[TrainingStep]:
        """Take some steps and stop without a farewell."""
        from trajpack.packing.trajectory_log.log import TrajectoryLog

        steps: list[TrainingStep] = []
        with TrajectoryLog.open(self.folder / "log") as log:
            training = RayTraining(
                self.workers, self.trainers, self.runner, self.folder / "saved", SETTINGS, log
            )
            async with aclosing(training.run(prompts(10 * SETTINGS.groups_per_step))) as stream:
                async for step in stream:
                    steps.append(step)
                    if len(steps) == num_steps:
                        break
        return steps

    async def train_and_kill(self, num_steps: int) -> tuple[list[TrainingStep], float]:
        """Kill the rank that the other waits for in an all-reduce; return when that was, too."""
        steps = asyncio.create_task(self.train(num_steps))
        while not ((hung := self.folder / "hung").exists() and hung.read_text()):
            done, _ = await asyncio.wait({steps}, timeout=0.05)
            assert not done, steps.result()
        await asyncio.wait({steps}, timeout=0.5)  # until the other one waits
        os.kill(int(hung.read_text()), signal.SIGKILL)
        killed = time.time()
        return await steps, killed


def learn_again(folder: Path, num_steps: int) -> tuple[list[float], PackedRankTrainer]:
    """Take the steps once more, in this process and with one rank, from the log alone."""
    from trajpack.packing.trajectory_log.log import TrajectoryLog

    with TrajectoryLog.open(folder / "log", mode="read") as log:
        groups = [list(episode.trajectories) for episode in log.replay()]
    size, alone = SETTINGS.groups_per_step, make_trainer()
    losses = [
        alone.step([path for group in groups[k * size :][:size] for path in group], 0, 1)["loss"]
        for k in range(num_steps)
    ]
    return losses, alone


def test_the_numbers_are_those_without_a_fault_when_a_rank_and_then_all_die(tmp_path: Path, caplog):
    from trajpack.packing.trajectory_log.log import TrajectoryLog

    first, killed = asyncio.run(Place(tmp_path).train_and_kill(5))
    (told,) = [record for record in caplog.records if record.name.endswith("training.recovery")]
    assert "rebuilt: trainer rank 1: ActorDiedError" in told.getMessage()
    assert told.created - killed < 5, "the other rank has waited for the dead one"
    assert [step.step for step in first] == [1, 2, 3, 4, 5]
    assert [step.num_rebuilds for step in first] == [0, 0, 0, 0, 1]
    assert all(step.num_trajectories == 4 * GROUP_SIZE for step in first)
    state, _ = Checkpoints(tmp_path / "saved").load()
    assert (state.num_steps, state.num_groups) == (3, 12)
    num_begun = len(MakeScripted(tmp_path / "notes").started())

    again = Place(tmp_path)
    second = asyncio.run(again.train(7))
    # Steps 4 and 5 are taken once more, with the groups that the log has kept.
    assert [step.step for step in second] == [4, 5, 6, 7, 8, 9, 10]
    assert [step.prompts for step in second[:2]] == [step.prompts for step in first[3:]]
    assert [step.ranks for step in second[:2]] == [step.ranks for step in first[3:]]
    trained = [prompt for step in [*first[:3], *second] for prompt in step.prompts]
    assert sorted(trained) == sorted(prompt.id for prompt in prompts(40))
    logged = {prompt for step in first for prompt in step.prompts}
    begun = again.make_worker.started()[num_begun:]
    assert not logged & {qid.split("@")[0] for qid, _ in begun}
    with TrajectoryLog.open(tmp_path / "log", mode="read") as log:
        new = [episode for episode in log.replay() if episode.episode not in logged]
    # What is rolled out after the restart is rolled out with the checkpoint's weights, or newer.
    assert min(turn.version_start for e in new for p in e.trajectories for turn in p.turns) >= 3
    # What the log gave back counts for the age of what is rolled out after it.
    assert again.runner.staleness.num_accepted == 40
    losses = [step.ranks[0]["loss"] for step in [*first, *second[2:]]]
    expected, _ = learn_again(tmp_path, 10)
    assert losses == pytest.approx(expected, abs=1e-6)
    state, saved = Checkpoints(tmp_path / "saved").load()
    _, alone = learn_again(tmp_path, state.num_steps)
    weights = torch.load(io.BytesIO(saved.tobytes()), weights_only=True)["model"]
    for name, value in alone.weights().items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)
    assert second[0].ranks[0]["loss"] == first[3].ranks[0]["loss"]
