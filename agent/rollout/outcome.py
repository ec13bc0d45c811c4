"""What came of a rollout, in the order of its prompts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from trajpack.agent.errors import has_engine_ended
from trajpack.agent.runner.runner import EpisodeResult
from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.types import Trajectory


@dataclass(frozen=True)
class RolloutOutcome:
    """What came of the episodes that finished, by prompt and sample."""

    results: tuple[EpisodeResult, ...]
    """One for each episode that finished."""
    trajectories: tuple[Trajectory, ...] = field(init=False)
    """Of all episodes that did not fail."""

    def __post_init__(self) -> None:
        trajectories = (item for result in self.results for item in result.trajectories)
        object.__setattr__(self, "trajectories", tuple(trajectories))

    @property
    def failures(self) -> Counter[str]:
        """How many episodes failed, by reason."""
        return Counter(result.error.reason for result in self.results if result.error is not None)

    @property
    def engine_failure(self) -> str | None:
        """Why the engine ended before the episodes did, ``None`` if it did not."""
        errors = (result.error for result in self.results)
        return next((error.reason for error in errors if error and has_engine_ended(error)), None)

    def fill_buffer(self, device: torch.device | str) -> TrajectoryBuffer:
        """Return a buffer for ``device`` that holds the trajectories."""
        buffer = TrajectoryBuffer(device=device)
        for trajectory in self.trajectories:
            buffer.add(trajectory)
        return buffer
