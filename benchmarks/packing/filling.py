"""Trajectories into a buffer: the one place that says how."""

from __future__ import annotations

from collections.abc import Sequence

from trajpack import Trajectory, TrajectoryBuffer


def fill(buffer: TrajectoryBuffer, trajectories: Sequence[Trajectory]) -> None:
    """Put all trajectories into the buffer, the fastest way it has."""
    buffer.extend(trajectories)


def filled(trajectories: Sequence[Trajectory], device: str = "cpu") -> TrajectoryBuffer:
    """Return a new buffer that holds all trajectories."""
    buffer = TrajectoryBuffer(device=device)
    fill(buffer, trajectories)
    return buffer
