"""Contents of the stored logs: ``old_log`` of Parquet segments, ``stored_log`` of SQLite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from trajpack import TokenField, Trajectory, Turn
from trajpack.packing.types import VersionSpan

OLD_LOG = Path(__file__).with_name("old_log")
FIELDS = (
    TokenField("values", torch.float32, fill=float("nan")),
    TokenField("experts", torch.bfloat16, (2, 2), fill=1, generated_only=False),
)
SEGMENTS = (("a", "late", "\ud800@0"), ("late",), ("b", "lost"), ("empty",))
"""Names of the episodes in the order in which they were written, a segment each."""
NAMES = ["a", "\ud800@0", "late", "b", "lost", "empty"]
"""Names of the episodes in the order of their last records."""
ERRORS = {("late", 0): "timed out", ("lost", 2): "no\udfffthing"}
"""Errors of the episodes that failed, by name and segment."""


def _rows(seed: int, count: int) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 2**15, (count, 2, 2)).astype(np.int16)
    return torch.from_numpy(raw).view(torch.bfloat16)


def _turn(seed: int, prompt: list[int], completion: list[int], **changes: object) -> Turn:
    size = len(completion)
    fields = {
        "values": np.arange(seed, seed + size, dtype=np.float32) * np.float32(0.1),
        "experts": _rows(7, len(prompt) + size),
    }
    return Turn(prompt, completion, [-0.25 * n for n in range(size)], fields=fields, **changes)  # type: ignore[arg-type]


def trajectories(episode: str) -> list[Trajectory]:
    """Return what an episode was given when it succeeded."""
    first = _turn(1, [5, 6], [7, 2**31 - 1], reward=-0.0, truncated=True, version_end=0)
    spans = [VersionSpan(3, 0, 1), VersionSpan(2**31 - 1, 1, 3)]
    second = _turn(
        2, [5, 6, 7, 2**31 - 1, 8], [9, 0, 1], reward=5e-324,
        version_start=3, version_end=2**31 - 1, version_spans=spans,
    )  # fmt: skip
    other = _turn(3, [1], [])
    return {
        "a": [
            Trajectory("a/0", [first, second], "", 0.1, -(2**63), 2**63 - 1),
            Trajectory("", [other, first], None, -0.0),
        ],
        "late": [Trajectory("late", [other, second, first], "\ud800 group", birth_time_ms=7)],
        "\ud800@0": [Trajectory("\udfff\0", [second])],
        "b": [Trajectory(f"b{n}", [first], "b") for n in range(3)],
        "empty": [],
    }[episode]
