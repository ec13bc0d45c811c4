"""Bookkeeping of open and recently ended episodes, shared by metrics and spans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_RECENT = 1 << 16


@dataclass(slots=True)
class OpenEpisode(Generic[T]):
    """A running attempt at an episode: a start time or a span for each of its parts."""

    own: T
    """Start or span of the attempt."""
    turns: dict[int, T] = field(default_factory=dict)
    """Open turns, by number."""
    generations: dict[int, T] = field(default_factory=dict)
    """Turns that wait for a completion."""
    verifications: dict[int, T] = field(default_factory=dict)
    """Turns that wait for the environment."""
    num_turns: int = 0
    """Turns that the engine completed."""
    num_tokens: int = 0
    """Tokens that the engine generated."""


def remember(values: dict[str, T], name: str, value: T) -> None:
    """Set the newest value of a bounded dictionary; evicts the oldest beyond `MAX_RECENT`."""
    values.pop(name, None)
    if len(values) >= MAX_RECENT:
        del values[next(iter(values))]
    values[name] = value
