"""`EpisodeObserver`: the open and recently ended episodes of metrics and tracing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trajpack.agent.runner.observers import RolloutObserver

T = TypeVar("T")

_MAX_RECENT = 1 << 16


@dataclass(slots=True)
class OpenEpisode(Generic[T]):
    """A running attempt at an episode: a start time or a span for each of its parts."""

    own: T
    """Start or span of the attempt."""
    stages: dict[tuple[str, int], T] = field(default_factory=dict)
    """Turns in flight, by ``"generation"`` or ``"verification"`` and the number of the turn."""
    turns: dict[int, T] = field(default_factory=dict)
    """Open turns, by number."""
    num_turns: int = 0
    """Turns that the engine completed."""
    num_tokens: int = 0
    """Tokens that the engine generated."""


class EpisodeObserver(RolloutObserver, Generic[T]):
    """Base of observers that keep a value for each open part of an episode."""

    def __init__(self) -> None:
        self._open: dict[str, OpenEpisode[T]] = {}

    def _begin(self, qid: str, stage: str, turn: int, make: Callable[[OpenEpisode[T]], T]) -> None:
        """Open a stage of a turn, unless the episode has ended or the stage is open."""
        episode = self._open.get(qid)
        if episode is not None and (stage, turn) not in episode.stages:
            episode.stages[stage, turn] = make(episode)

    def _end(self, qid: str, stage: str, turn: int) -> tuple[OpenEpisode[T], T] | None:
        """Close a stage of a turn; return the episode and the value if it was open."""
        episode = self._open.get(qid)
        if episode is None or (stage, turn) not in episode.stages:
            return None
        return episode, episode.stages.pop((stage, turn))


def remember(values: dict[str, T], name: str, value: T) -> None:
    """Set the newest value of a bounded dictionary; evicts the oldest beyond 65,536."""
    values.pop(name, None)
    if len(values) >= _MAX_RECENT:
        del values[next(iter(values))]
    values[name] = value
