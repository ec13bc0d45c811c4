"""Limits, outcomes and results of sandboxed programs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class SandboxError(RuntimeError):
    """The sandbox failed to run a program, for a reason outside the program."""


class Outcome(Enum):
    """How a program ended."""

    EXITED = "exited"
    """Exit status 0."""
    CRASHED = "crashed"
    """Exception, other exit status, or signal."""
    CPU_LIMIT = "cpu_limit"
    """`SandboxLimits.cpu_s` was exceeded."""
    WALL_LIMIT = "wall_limit"
    """`SandboxLimits.wall_s` was exceeded."""
    MEMORY_LIMIT = "memory_limit"
    """An uncaught MemoryError."""
    OUTPUT_LIMIT = "output_limit"
    """`SandboxLimits.output_bytes` was exceeded."""


@dataclass(frozen=True)
class SandboxLimits:
    """Resource limits of one program.

    Raises:
        ValueError: If a limit is not positive or below its minimum.
        TypeError: If a number that must be an integer is not.
    """

    cpu_s: int = 5
    """Processor time in whole seconds, the unit of ``RLIMIT_CPU``."""
    wall_s: float = 15.0
    """Seconds from the first line of the program to its end."""
    memory_bytes: int = 512 << 20
    """Bytes of address space, interpreter included; at least 64 MiB."""
    output_bytes: int = 64 << 10
    """Bytes of standard output; a program that writes more is killed."""
    num_files: int = 64
    """Open descriptors; at least 16."""
    num_threads: int = 32
    """Running threads, main thread included. Where the kernel cannot count them, a program has the
    main thread only and `Sandbox.protections` has ``"no_threads"``."""

    def __post_init__(self) -> None:
        least = {"cpu_s": 1, "memory_bytes": 64 << 20, "output_bytes": 1}
        least |= {"num_files": 16, "num_threads": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < minimum:
                raise ValueError(f"{name} must be at least {minimum}, got {value}")
        if not 0 < self.wall_s < float("inf"):
            raise ValueError(f"wall_s must be positive and finite, got {self.wall_s}")


@dataclass(frozen=True)
class SandboxResult:
    """Result of one program."""

    outcome: Outcome
    """Reason of the end."""
    output: bytes
    """Standard output, or the value of the expression as `canonical` text. The program chose every
    byte: compare it, and never run, format or log it unescaped."""
    wall_s: float
    """Seconds from the first line of the program to its end."""
    cpu_s: float
    """Seconds of processor time, start of the interpreter included."""
