"""Groups on their way from rollouts to a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trajpack.agent.errors import EpisodeCancelledError, has_engine_ended
from trajpack.packing.types import Trajectory

if TYPE_CHECKING:
    from trajpack.agent.runner.results import GroupResult


@dataclass(frozen=True)
class LearnableGroup:
    """A group that was accepted."""

    prompt: str
    """Id of its prompt."""
    trajectories: Sequence[Trajectory]
    """Of its episodes."""


def accepted(result: GroupResult) -> list[Trajectory]:
    """Return what a group gives to learn from: nothing if it was rejected.

    Raises:
        EpisodeError: If no engine was left: such a group is not rejected, it never was.
    """
    for episode in result.results:
        if episode.error is not None and has_engine_ended(episode.error):
            raise episode.error
    return [] if result.rejected is not None else list(result.trajectories)


def was_stopped(result: GroupResult) -> bool:
    """Return whether a group was cut short by `RolloutRunner.stop`, and so says nothing."""
    errors = [episode.error for episode in result.results if episode.error is not None]
    if any(isinstance(error, EpisodeCancelledError) for error in errors):
        return True
    return result.rejected == "incomplete" and not errors
