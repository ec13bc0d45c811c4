"""Rollouts and training over a Ray cluster: workers, trainer ranks, and what feeds them.

Guide: ``docs/ray.md``. Needs the extra ``[ray]``.
"""

from trajpack.agent.ray_checkpoint import Checkpoints, TrainingState
from trajpack.agent.ray_cluster import local_cluster
from trajpack.agent.ray_life import WorkerLostError
from trajpack.agent.ray_options import WorkerOptions
from trajpack.agent.ray_payload import TrajectoryArrays
from trajpack.agent.ray_rank import RankOptions
from trajpack.agent.ray_rank_trainer import (
    PackedRankTrainer,
    RankTrainer,
    StepRules,
    clipped_policy_loss,
)
from trajpack.agent.ray_trainers import RankLostError, TrainerRanks
from trajpack.agent.ray_training import RayTraining, TrainingSettings, TrainingStep
from trajpack.agent.ray_weights import Weights
from trajpack.agent.ray_workers import RolloutWorkers

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
