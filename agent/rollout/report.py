"""The results of a rollout, and their table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch

from trajpack.agent.errors import has_engine_ended
from trajpack.agent.runner.runner import EpisodeResult, Progress
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.batch.inspection import counted, describe
from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.types import Trajectory

_MAX_REASONS = 5


@dataclass(frozen=True)
class RolloutOutcome:
    """Results of the finished episodes, in order of prompt and sample."""

    results: tuple[EpisodeResult, ...]
    """One for each finished episode."""

    @cached_property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """Trajectories of all episodes."""
        return tuple(path for result in self.results for path in result.trajectories)

    @property
    def failures(self) -> Counter[str]:
        """Number of failed episodes by reason."""
        return Counter(result.error.reason for result in self.results if result.error is not None)

    @property
    def engine_failure(self) -> str | None:
        """Reason why the engine ended before the episodes, or ``None``."""
        errors = (result.error for result in self.results)
        return next((error.reason for error in errors if error and has_engine_ended(error)), None)

    def fill_buffer(self, device: torch.device | str) -> TrajectoryBuffer:
        """Return a buffer for ``device`` with the trajectories."""
        buffer = TrajectoryBuffer(device=device)
        buffer.extend(self.trajectories)
        return buffer


def failure_rows(failures: Counter[str]) -> list[tuple[str, str]]:
    """Return a row for each of the most common reasons of failure."""
    rows = [(f"failed {count:,}", reason) for reason, count in failures.most_common(_MAX_REASONS)]
    if len(failures) > _MAX_REASONS:
        rows.append(("failed", counted(len(failures) - _MAX_REASONS, "more reason")))
    return rows


def report(
    outcome: RolloutOutcome, progress: Progress, batch: PackedBatch, *, num_merged: int
) -> list[tuple[str, str]]:
    """Return the results of a rollout as pairs of a name and a formatted value.

    Args:
        outcome: Results of the episodes.
        progress: Last progress of the runner.
        batch: The packed trajectories. Its fill is the share of its tokens in a padded rectangle
            with as many rows as sequences, and as wide as the longest.
        num_merged: Tokens of the trajectories, with shared prefixes counted once.
    """
    turns = [turn for path in outcome.trajectories for turn in path.turns]
    num_as_turns = sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns)
    num_right = sum(turn.reward > 0 for turn in turns)
    num_finished, num_failed = len(outcome.results), sum(outcome.failures.values())
    num_earlier = num_finished - progress.num_finished
    earlier = f", {num_earlier:,} earlier" if num_earlier > 0 else ""
    capacity = len(batch) * batch.max_seqlen
    return [
        ("episodes", f"{num_finished:,} finished, {num_failed:,} of them failed{earlier}"),
        (
            "right answers",
            f"{num_right:,} of {len(turns):,} ({num_right / max(len(turns), 1):.1%})",
        ),
        ("speed", f"{progress.tokens_per_s:,.0f} generated tokens/s, {progress.elapsed_s:.1f} s"),
        (
            "tokens as turns, merged",
            f"{num_as_turns:,} against {num_merged:,}, a ratio of {num_as_turns / num_merged:.2f}",
        ),
        (
            "fill, if padded",
            f"{batch.num_tokens:,} of {capacity:,} tokens ({batch.num_tokens / capacity:.0%})",
        ),
        *describe(batch),
        *failure_rows(outcome.failures),
    ]
