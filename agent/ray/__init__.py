"""Rollouts over a Ray cluster: workers with an engine each, and the data that travels.

Guide: ``docs/ray.md``. Needs the extra ``[ray]``.
"""

from trajpack.agent.ray.cluster import local_cluster
from trajpack.agent.ray.workers import RolloutWorkers, Weights, WorkerLostError, WorkerOptions
from trajpack.packing.buffer.trajectory_arrays import TrajectoryArrays

__all__ = [
    "RolloutWorkers",
    "TrajectoryArrays",
    "Weights",
    "WorkerLostError",
    "WorkerOptions",
    "local_cluster",
]
