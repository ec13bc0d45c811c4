"""Options and errors of a trajectory log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from trajpack.packing.conversion import as_integer, as_number

Damaged: TypeAlias = Literal["raise", "skip"]


class DamagedLogError(ValueError):
    """Bytes of a log's file changed or are missing."""


class LogInUseError(RuntimeError):
    """Another writer has the log open."""


@dataclass(frozen=True)
class LogOptions:
    """Limits of a `TrajectoryLog`'s transactions, and its treatment of damage.

    Pending episodes are written as one segment, a transaction of the log's file, as soon as one of
    three limits is reached: episodes, bytes or age.

    Attributes:
        segment_episodes: Maximum episodes of a transaction.
        segment_bytes: Maximum bytes of a transaction; a larger episode is written alone.
        flush_seconds: Maximum seconds until an episode is written, if no write fails. After a
            failure, seconds until the next attempt.
        max_pending_bytes: Maximum bytes that are pending; `TrajectoryLog.append` waits above it.
        max_error_chars: Characters kept of an episode's error.
        damaged: Treatment of a damaged episode: ``"raise"`` raises `DamagedLogError` when it is
            read, ``"skip"`` reads all episodes when the log is opened, warns of each damaged one,
            and goes on as if it had never been logged.

    Raises:
        TypeError: If a number is of the wrong kind.
        ValueError: If a limit is not positive, or ``damaged`` is unknown.

    Example:
        >>> LogOptions(segment_episodes=0)
        Traceback (most recent call last):
        ValueError: segment_episodes must be at least 1, got 0
    """

    segment_episodes: int = 1024
    segment_bytes: int = 16 << 20
    flush_seconds: float = 5.0
    max_pending_bytes: int = 128 << 20
    max_error_chars: int = 2000
    damaged: Damaged = "raise"

    def __post_init__(self) -> None:
        for name in ("segment_episodes", "segment_bytes", "max_pending_bytes", "max_error_chars"):
            if (value := as_integer(name, getattr(self, name))) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if as_number("flush_seconds", self.flush_seconds) <= 0:
            raise ValueError(f"flush_seconds must be more than 0, got {self.flush_seconds}")
        if self.damaged not in ("raise", "skip"):
            raise ValueError(f"damaged must be 'raise' or 'skip', got {self.damaged!r}")
