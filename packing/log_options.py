"""How a log of trajectories is written and read, and what can be wrong with one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from trajpack.packing.conversion import as_integer, as_number

Damaged: TypeAlias = Literal["raise", "skip"]


class DamagedLogError(ValueError):
    """What a log holds is not what was written: a segment or a line of the manifest changed."""


class LogInUseError(RuntimeError):
    """Another writer has the log open."""


@dataclass(frozen=True)
class LogOptions:
    """When a `TrajectoryLog` writes what was appended, and what it does about damage.

    A segment is written as soon as one of three limits is reached: episodes, bytes or age.

    Raises:
        TypeError: If a number is of the wrong kind.
        ValueError: If a limit is not positive, or ``damaged`` is unknown.

    Example:
        >>> LogOptions(segment_episodes=0)
        Traceback (most recent call last):
        ValueError: segment_episodes must be at least 1, got 0
    """

    segment_episodes: int = 1024
    """Episodes of a segment, at most."""
    segment_bytes: int = 16 << 20
    """Bytes of a segment before compression, at most; a larger episode has one of its own.
    Reading needs the memory of one segment."""
    flush_seconds: float = 5.0
    """Seconds that an episode waits at most until its segment is written, if nothing fails.
    After a failure, seconds until the next attempt."""
    max_pending_bytes: int = 128 << 20
    """Bytes that may wait to be written; `TrajectoryLog.append` waits where they are passed."""
    compression_level: int = 3
    """Level of zstd, 1 to 22."""
    max_error_chars: int = 2000
    """Characters that are kept of an episode's error."""
    damaged: Damaged = "raise"
    """What becomes of a segment that is missing or is not as it was written: ``"raise"`` raises
    `DamagedLogError`, ``"skip"`` warns and goes on as if its episodes had never been logged."""

    def __post_init__(self) -> None:
        for name in ("segment_episodes", "segment_bytes", "max_pending_bytes", "max_error_chars"):
            if (value := as_integer(name, getattr(self, name))) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 1 <= as_integer("compression_level", self.compression_level) <= 22:
            raise ValueError(f"compression_level must be in [1, 22], got {self.compression_level}")
        if as_number("flush_seconds", self.flush_seconds) <= 0:
            raise ValueError(f"flush_seconds must be more than 0, got {self.flush_seconds}")
        if self.damaged not in ("raise", "skip"):
            raise ValueError(f"damaged must be 'raise' or 'skip', got {self.damaged!r}")
