"""What an untrusted program may use, and how it may end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class SandboxError(RuntimeError):
    """A program was not run, or not to its end, for a reason that is none of its own."""


class Outcome(Enum):
    """How a program ended."""

    EXITED = "exited"
    """By itself, with status 0."""
    CRASHED = "crashed"
    """By an exception, another status or a signal."""
    CPU_LIMIT = "cpu_limit"
    """It computed for too long."""
    WALL_LIMIT = "wall_limit"
    """It lasted for too long."""
    MEMORY_LIMIT = "memory_limit"
    """It ended by a MemoryError that it did not catch."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote too much."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one program may use.

    Raises:
        ValueError: If one is not positive, or the memory is less than an interpreter needs.
        TypeError: If a number that must be an integer is not.
    """

    cpu_s: int = 5
    """Seconds of processor time, whole ones: the kernel counts no others."""
    wall_s: float = 15.0
    """Seconds from its first line to its end."""
    memory_bytes: int = 512 << 20
    """Address space, interpreter included; at least 64 MiB."""
    output_bytes: int = 64 << 10
    """Bytes of standard output; at the next one it is killed."""
    num_files: int = 64
    """Descriptors that are open at the same time; at least 16."""
    num_threads: int = 32
    """Threads at the same time, the first one included. A program has only the first one where the
    kernel cannot count them; `Sandbox.protections` says so. There are no other processes."""

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
    """What came of one program."""

    outcome: Outcome
    """How it ended."""
    output: bytes
    """What it wrote to standard output, or the value of an expression as `canonical` text. It is
    whatever the program wanted: compare it, never run, format or log it as it is."""
    wall_s: float
    """Seconds from its first line to its end."""
    cpu_s: float
    """Seconds of processor time, the start of the interpreter included."""
