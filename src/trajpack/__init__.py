"""Turns of LLM agents, packed into training batches on the device."""

from trajpack.packing.batch import PackedBatch
from trajpack.packing.buffer import TrajectoryBuffer, pack
from trajpack.packing.types import Trajectory, Turn, VersionSpan

__all__ = ["PackedBatch", "Trajectory", "TrajectoryBuffer", "Turn", "VersionSpan", "pack"]
