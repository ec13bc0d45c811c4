"""Rollouts and training over a Ray cluster: workers, trainer ranks, and what feeds them.

Guide: ``docs/ray.md``. Needs the extra ``[ray]``.
"""

from trajpack.agent.ray.cluster import local_cluster
from trajpack.agent.ray.payload import TrajectoryArrays
from trajpack.agent.ray.rollouts.life import WorkerLostError
from trajpack.agent.ray.rollouts.options import WorkerOptions
from trajpack.agent.ray.rollouts.workers import RolloutWorkers
from trajpack.agent.ray.training.checkpoint import Checkpoints, TrainingState
from trajpack.agent.ray.training.rank import RankOptions
from trajpack.agent.ray.training.rank_trainer import (
    PackedRankTrainer,
    RankTrainer,
    StepRules,
    clipped_policy_loss,
)
from trajpack.agent.ray.training.trainers import RankLostError, TrainerRanks
from trajpack.agent.ray.training.training import RayTraining, TrainingSettings, TrainingStep
from trajpack.agent.ray.weights import Weights

__all__ = [
    "Checkpoints",
    "PackedRankTrainer",
    "RankLostError",
    "RankOptions",
    "RankTrainer",
    "RayTraining",
    "RolloutWorkers",
    "StepRules",
    "TrainerRanks",
    "TrainingSettings",
    "TrainingState",
    "TrainingStep",
    "TrajectoryArrays",
    "Weights",
    "WorkerLostError",
    "WorkerOptions",
    "clipped_policy_loss",
    "local_cluster",
]
